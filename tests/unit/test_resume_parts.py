"""Where data stands, and the states of random generators, as a checkpoint has them."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import quintnet
from quintnet_compiler.checkpoint.values import from_json, to_json
from quintnet_compiler.core.errors import CheckpointError
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.training.resume.position import Position
from quintnet_compiler.training.resume.random_states import RandomStates
from quintnet_compiler.training.resume.rank_states import RowReader, choose_state, gathered
from quintnet_compiler.training.resume.resumable_loader import ResumableLoader


def test_states_are_json_and_come_back_as_they_were() -> None:
    state = {
        "a": torch.arange(6).reshape(2, 3),
        3: (1, None, "x"),
        "b": b"\0\xff",
        "n": np.int64(7),
        "e": torch.empty(0),
    }
    state["w"] = [torch.ones(2, dtype=torch.bfloat16), np.arange(4.0).reshape(2, 2), float("inf"), {}]
    again = from_json(json.loads(json.dumps(to_json(state, "it"))))
    assert torch.equal(again["a"], state["a"])
    assert again[3] == (1, None, "x")
    assert again["b"] == b"\0\xff"
    assert (again["n"], type(again["n"])) == (7, np.int64)
    assert again["e"].shape == (0,)
    assert again["w"][0].dtype == torch.bfloat16
    assert again["w"][1].tolist() == [[0, 1], [2, 3]]
    assert again["w"][2:] == [float("inf"), {}]
    assert from_json(None) is None
    with pytest.raises(CheckpointError, match="the state of X: a is a object, which a checkpoint cannot hold"):
        to_json({"a": object()}, "the state of X")


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(2, 0, 3),
        torch.empty(0, dtype=torch.float8_e4m3fn),
        torch.tensor(1.5),
        torch.tensor([True, False]),
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.arange(3.0).to(torch.complex64).conj(),
    ],
)
def test_every_tensor_of_a_state_comes_back(x: torch.Tensor) -> None:
    again = from_json(json.loads(json.dumps(to_json({"x": x}, "it"))))["x"]
    assert (again.dtype, again.shape) == (x.dtype, x.shape)
    assert again.resolve_conj().tolist() == x.resolve_conj().tolist()


class _Holder:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = np.random.RandomState(3)


def _drawn(*generators: Any) -> list[float]:
    one, two, three, four = generators
    mine = [float(torch.rand((), generator=one)), two.random(), float(three.random()), float(four.rng.rand())]
    return [*mine, float(torch.rand(())), random.random(), float(np.random.random())]


def test_all_generators_that_a_loader_holds_are_found_and_restored() -> None:
    one, two, three, four = torch.Generator(), random.Random(1), np.random.default_rng(2), _Holder()

    class Data:
        transforms = (functools.partial(lambda draw, x: draw(), three.random), {"deep": [lambda x: two.random() + x]})

        def __init__(self) -> None:
            self.mine, self.also, self.itself = self.transforms, four, self

    loader = DataLoader(Data(), sampler=[1], generator=one)  # type: ignore[arg-type]
    states = RandomStates(loader)
    assert len({id(x) for x in states.own.values()}) == 4
    many = [random.Random(i) for i in range(100)]
    assert len(RandomStates([many, list(range(100))]).own) == 100
    kept = from_json(to_json(states.now(), "it"))
    before = _drawn(one, two, three, four)
    states.restore(kept)
    assert _drawn(one, two, three, four) == before


def test_a_position_counts_rows_of_all_data_ranks_and_tells_other_values_apart() -> None:
    at = Position(epoch=2, seen=20).after((torch.ones(4, 3),), ways=2)
    assert (at.epoch, at.seen, at.rows, at.batches) == (2, 28, 8, 1)
    assert at != Position(epoch=2, seen=20).after((torch.zeros(4, 3),), ways=2)
    assert Position.from_json(at.to_json(), at.digest) == at
    assert at.reaches(Position(rows=8))
    assert not at.reaches(Position(rows=9))
    assert not at.reaches(Position(rows=None, batches=2))


def test_what_ranks_say_is_kept_once_where_it_is_the_same() -> None:
    def all_alike(text: str) -> Sequence[str]:
        return [text] * 3

    assert gathered({"x": 1}, all_alike) == {"states": [{"x": 1}], "of": [0, 0, 0]}

    def unlike(text: str) -> Sequence[str]:
        return [text, '{"x": 2}', text]

    assert gathered({"x": 1}, unlike) == {"states": [{"x": 1}, {"x": 2}], "of": [0, 1, 0]}


def test_a_rank_goes_on_with_what_a_rank_of_the_same_rows_said() -> None:
    said = [{"digest": 1, "loader": None}, {"digest": 2, "loader": None}]
    stored = {"states": said, "of": [0, 0, 1, 1], "data_ranks": 2, "data_rank_of": [0, 0, 1, 1], "batches": 3}
    assert choose_state(stored, RowReader(1, 1, 2), any_ranks=False) == (said[1], True)  # of dp=2, tp=2 to dp=2
    assert choose_state(stored, RowReader(3, 1, 2), any_ranks=False) == (said[1], True)
    assert choose_state(stored, RowReader(0, 0, 1), any_ranks=True) == (said[0], False)
    with pytest.raises(CheckpointError, match="each of 2 data ranks read rows of its own"):
        choose_state(stored, RowReader(0, 0, 1), any_ranks=False)
    fresh = {**stored, "states": said[:1], "of": [0] * 4, "batches": 0}
    assert choose_state(fresh, RowReader(0, 0, 1), any_ranks=False) == (said[0], False)


def test_data_ranks_are_numbered_along_dp_and_ep() -> None:
    mesh = Mesh(pp=2, dp=2, ep=2, tp=2)
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert mesh.data_rank(8) == 0


def test_a_loader_goes_on_before_its_last_batch_where_a_step_has_failed() -> None:
    data = TensorDataset(torch.arange(12.0).reshape(12, 1), torch.zeros(12, 1))
    program = quintnet.compile(torch.nn.Linear(1, 1), Mesh(dp=1), data[:2], loss_fn=torch.nn.functional.mse_loss)
    loaders = [ResumableLoader(DataLoader(data, 2, shuffle=True), program) for _ in range(2)]
    loaders[0].keeps_states = True
    read = []
    for batch in loaders[0]:
        read.append(batch[0].flatten().tolist())
        if len(read) == 4:
            break
    loaders[1].load_state_dict(json.loads(json.dumps(loaders[0].state_before_batch())))
    assert next(iter(loaders[1]))[0].flatten().tolist() == read[3]
