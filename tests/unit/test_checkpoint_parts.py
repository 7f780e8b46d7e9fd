"""checkpoint, part by part: boxes of tensors, optimizers' state by names, what is copied and what is written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from quintnet_compiler.checkpoint import background
from quintnet_compiler.checkpoint.lock import FolderLocks
from quintnet_compiler.checkpoint.optimizer_state import merged, restored, tensors_and_note
from quintnet_compiler.checkpoint.parts import ParameterPlace, SavedPart
from quintnet_compiler.checkpoint.staging import Staging, copy_to_host
from quintnet_compiler.checkpoint.stores.disk_folder import DiskFolder
from quintnet_compiler.checkpoint.training_state import Destination
from quintnet_compiler.checkpoint.values import plain
from quintnet_compiler.core.errors import CheckpointError
from quintnet_compiler.runtime.backends.whole_parameters import AllHere
from quintnet_compiler.runtime.state.whole_optimizer import WholeOptimizer


def test_a_rank_may_have_several_boxes_of_a_tensor() -> None:
    whole = torch.arange(24.0).view(6, 4)
    rows, columns = torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3])
    part = SavedPart.of(whole[rows][:, columns], (6, 4), [rows, columns])
    assert {tuple(at): tuple(box.shape) for at, box in part.boxes.items()} == {(0, 2): (2, 2), (4, 2): (2, 2)}
    for (row, column), box in part.boxes.items():
        assert torch.equal(box, whole[row : row + 2, column : column + 2])
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in part.__create_chunk_list__()] == [
        ((0, 2), (2, 2)), ((4, 2), (2, 2)),
    ]  # fmt: skip
    assert part.size() == (6, 4) and len(part.__create_write_items__("x", None)) == 2


def test_copies_stay_as_they_are() -> None:
    x = torch.zeros(3)
    staging = Staging()
    copied, same = staging.copies([x, x[1:], torch.tensor(7)]), copy_to_host([x, x[1:]])
    x.fill_(1)
    assert [y.tolist() for y in copied] == [[0, 0, 0], [0, 0], 7] and [y.tolist() for y in same] == [[1, 1, 1], [1, 1]]
    assert same[0].data_ptr() == x.data_ptr()
    again = staging.copies([x.double()[:1]])
    assert again[0].data_ptr() == copied[0].data_ptr() and again[0].tolist() == [1]


def _stepped(parameter: nn.Parameter, kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    optimizer = kind([parameter], **options)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def _place(parameter: nn.Parameter, shape: tuple[int, ...]) -> ParameterPlace:
    return ParameterPlace(parameter, torch.Size(shape), [torch.arange(n) for n in parameter.shape])


def test_an_optimizers_state_goes_by_names() -> None:
    x = nn.Parameter(torch.ones(2, 3))
    optimizer = _stepped(x, torch.optim.Adam, lr=0.5)
    tensors, note = tensors_and_note(optimizer, {"layer.weight": _place(x, (2, 3))})
    assert set(tensors) == {f"layer.weight/{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    note = merged([note, note])
    assert note["class"] == "Adam" and note["of"] == {"layer.weight": 0} and note["options"][0]["lr"] == 0.5

    saved = {n: TensorStorageMetadata(TensorProperties(dtype=torch.float32), p.shape, []) for n, p in tensors.items()}
    y = nn.Parameter(torch.zeros(2, 3))
    other = torch.optim.Adam([y], lr=0.1)
    targets, finish = restored(other, {"layer.weight": _place(y, (2, 3))}, note, saved)
    for name, target in targets.items():
        target.local.copy_(tensors[name].local)
    finish()
    assert other.param_groups[0]["lr"] == 0.5
    for key, value in optimizer.state[x].items():
        assert torch.equal(other.state[y][key], value)


def test_state_is_read_to_where_it_lies_unless_something_else_lies_there() -> None:
    x = nn.Parameter(torch.ones(2, 3))
    optimizer = _stepped(x, torch.optim.Adam)
    place, state = _place(x, (2, 3)), optimizer.state[x]
    state |= {"slow": x.detach(), "twice": state["exp_avg"], "turned": torch.ones(3, 2).t()}
    tensors, note = tensors_and_note(optimizer, {"w": place})
    saved = {n: TensorStorageMetadata(TensorProperties(dtype=torch.float32), p.shape, []) for n, p in tensors.items()}
    targets, finish = restored(optimizer, {"w": place}, merged([note]), saved)
    where = {key: targets[f"w/{key}"].local.data_ptr() for key in state}
    kept = [key for key, old in state.items() if where[key] == old.data_ptr()]
    assert kept == ["step", "exp_avg", "exp_avg_sq"] and len({*where.values(), x.data_ptr()}) == len(where) + 1
    finish()
    assert {key: found.data_ptr() for key, found in optimizer.state[x].items()} == where


def test_a_parameter_without_saved_state_has_none_after_a_load() -> None:
    """As after a search of a learning rate, which loads what it saved before its first step."""
    x = nn.Parameter(torch.ones(2))
    places = {"w": _place(x, (2,))}
    note = merged([tensors_and_note(torch.optim.Adam([x], lr=0.5), places)[1]])
    optimizer = _stepped(x, torch.optim.Adam)
    restored(optimizer, places, note, {})[1]()
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5
    whole = WholeOptimizer([x], torch.optim.Adam, AllHere())
    whole.step()
    restored(whole, places, note, {})[1]()
    assert not whole.state and not whole.inner.state


def test_states_that_are_no_parameters_or_of_another_optimizer_are_refused() -> None:
    x = nn.Parameter(torch.ones(2))
    optimizer = _stepped(x, torch.optim.Adam)
    places = {"w": _place(x, (2,))}
    with pytest.raises(CheckpointError, match="that is not this program's"):
        tensors_and_note(optimizer, {})
    note = merged([tensors_and_note(optimizer, places)[1]])
    with pytest.raises(CheckpointError, match="the optimizer is a SGD, and the checkpoint has that of a Adam"):
        restored(torch.optim.SGD([x], lr=1.0), places, note, {})
    with pytest.raises(CheckpointError, match="does not have v"):
        restored(optimizer, {"v": _place(x, (2,))}, note, {})


def test_what_json_holds() -> None:
    given = {"a": (1, torch.tensor(2.5)), "b": None}
    assert plain(given, "it") == {"a": [1, 2.5], "b": None}
    with pytest.raises(CheckpointError, match="it is a set, which JSON cannot hold"):
        plain({1}, "it")


def test_saves_follow_each_other_and_see_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[tuple[list[float], int]] = []

    def write(found: Tensor, to: Destination, group: object) -> Path:
        written.append((found.tolist(), to.step))
        return Path(to.folder.path) / str(to.step)

    class Copying:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def copy_to_host(self, copies: Callable[[list[Tensor]], list[Tensor]]) -> Tensor:
            return copies([self.x])[0]

    monkeypatch.setattr(background, "write", write)
    saver, x = background.Background.make(), torch.zeros(2)
    locks, alone = FolderLocks(), contextlib.nullcontext()
    first = saver.save(Copying(x), Destination(DiskFolder(tmp_path), 1, None, locks), alone)  # type: ignore[arg-type]
    x.fill_(5)
    second = saver.save(Copying(x), Destination(DiskFolder(tmp_path), 2, None, locks), alone)  # type: ignore[arg-type]
    assert (first.result(), second.result()) == (tmp_path / "1", tmp_path / "2") and saver.line.group is None
    assert written == [([0.0, 0.0], 1), ([5.0, 5.0], 2)]
