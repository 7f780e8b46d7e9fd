"""runtime.state.reshard, runtime.backends.copied: the plan from one layout to another, and who is refused."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet_compiler.runtime.backends import copied
from quintnet_compiler.runtime.state.reshard import Held, held, moved_parts
from quintnet_compiler.runtime.state.true_part import TruePart


def _layout(*ranks: tuple[slice, slice] | None) -> Held:
    numbers = torch.arange(6), torch.arange(4)
    return [None if cut is None else TruePart((numbers[0][cut[0]], numbers[1][cut[1]])) for cut in ranks]


ALL = slice(None)
LAYOUTS: dict[str, Held] = {
    "rows": _layout((slice(0, 2), ALL), (slice(2, 4), ALL), (slice(4, 6), ALL), None),
    "columns, twice": _layout(*[(ALL, slice(2 * i, 2 * i + 2)) for i in (0, 1, 0, 1)]),
    "every second row": _layout(*[(slice(i, None, 2), ALL) for i in (0, 1)], None, None),
    "whole on the last": _layout(None, None, None, (ALL, ALL)),
    "uneven": _layout((slice(0, 5), ALL), (slice(5, 6), ALL), (slice(6, 6), ALL), None),
}


@pytest.mark.parametrize(("one", "other"), list(product(LAYOUTS, LAYOUTS)), ids=str)
def test_every_rank_gets_all_that_it_lacks_and_nothing_else(one: str, other: str) -> None:
    source, target = LAYOUTS[one], LAYOUTS[other]
    whole = torch.arange(24.0).reshape(6, 4)
    got = [None if part is None else torch.full([len(x) for x in part.positions], -1.0) for part in target]
    for part in moved_parts("w", source, target):
        given, place = source[part.source], got[part.target]
        assert given is not None and place is not None
        values = whole[given.positions[0]][:, given.positions[1]]
        block = values[part.taken[0]][:, part.taken[1]]
        assert list(block.shape) == part.shape and bool((place[part.placed[0][:, None], part.placed[1]] == -1).all())
        place[part.placed[0][:, None], part.placed[1]] = block
    for found, wanted in zip(got, target, strict=True):
        if found is not None and wanted is not None:
            assert torch.equal(found, whole[wanted.positions[0]][:, wanted.positions[1]])
    if one == other:
        assert all(part.source == part.target for part in moved_parts("w", source, target))


def test_ranks_that_hold_the_same_share_the_work() -> None:
    source = _layout(*[(ALL, ALL)] * 2, None, None)
    parts = list(moved_parts("w", source, _layout(*[(ALL, ALL)] * 4)))
    assert [(part.source, part.target) for part in parts] == [(0, 0), (1, 1), (0, 2), (1, 3)]


def test_ranks_hold_what_their_stages_read() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    program = quintnet.compile(model, quintnet.Mesh(pp=2, dp=2), (torch.ones(4, 4),), training=False)
    there = [[part is not None for part in held(program._primary().program, f"{i}.weight")] for i in (0, 2)]
    assert all(a != b for a, b in zip(*there, strict=True)) and all(sum(one) == 2 for one in there)


def test_programs_of_other_parameters_are_refused() -> None:
    def program(model: nn.Module, axes: dict[str, int]) -> quintnet.CompiledProgram:
        return quintnet.compile(model, quintnet.Mesh(**axes), (torch.ones(4, 4),), training=False)

    one, other = program(nn.Linear(4, 6), {"tp": 2}), program(nn.Linear(4, 5), {"dp": 2})
    with pytest.raises(quintnet.CheckpointError, match=r"(?s)QN602.*weight is \(\(5, 4\)"):
        one.copy_parameters(other)
    same = nn.Linear(4, 6)
    assert one.copy_parameters(program(same, {"dp": 4})) == 0
    torch.testing.assert_close(one(torch.ones(4, 4)), same(torch.ones(4, 4)).detach())
    assert copied.ProgramTensors(one._primary().program, one._state(), same).parameters.keys() == {"weight", "bias"}


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.sample(1)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_numbers_are_rounded_as_the_module_would(source: torch.dtype, target: torch.dtype) -> None:
    model = nn.BatchNorm1d(6, dtype=source)
    with torch.no_grad():
        for x in (*model.parameters(), model.running_mean, model.running_var):
            x.copy_(torch.randn(6, dtype=torch.float64) * 70_000)  # more than float16 has
    rollout = nn.BatchNorm1d(6, dtype=target)
    there, here = (
        quintnet.compile(one, quintnet.Mesh(dp=2), (torch.ones(4, 6, dtype=dtype),), training=False, check="off")
        for one, dtype in ((model, source), (rollout, target))
    )
    assert here.copy_parameters(there) == 0
    expected = copy.deepcopy(model).to(target).state_dict()
    for name, x in rollout.state_dict().items():
        assert torch.equal(x, expected[name]) and x.dtype is expected[name].dtype, name


class Table(nn.Module):
    def __init__(self, dtype: torch.dtype, *sizes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.register_buffer("table", torch.ones(sizes, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight + self.table.sum()


@pytest.mark.parametrize("other", [Table(torch.int64, 4), Table(torch.float8_e4m3fn, 4), Table(torch.float32, 1)])
def test_buffers_that_are_not_alike_are_refused(other: Table) -> None:
    program = quintnet.compile(Table(torch.float32, 4), quintnet.Mesh(dp=2), (torch.ones(4, 4),), training=False)
    specs = {"table": other.table}
    with pytest.raises(
        quintnet.CheckpointError, match=r"(?s)QN602.*table is .* there, and \(\(4,\), 'torch.float32'\)"
    ):
        copied._refuse_others(dict(program._task.model.named_buffers()), specs)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_numbers_that_rounding_does_not_give_are_refused(dtype: torch.dtype) -> None:
    one, other = torch.zeros(4), torch.zeros(4, dtype=dtype)
    for here, there in ((one, other), (other, one)):
        with pytest.raises(quintnet.CheckpointError, match=r"(?s)QN602.*16 bits or more"):
            copied._refuse_others({"weight": here}, {"weight": there})
    copied._refuse_others({"weight": other}, {"weight": other})
