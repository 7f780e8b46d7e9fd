"""Checkpoints: any layout reads what any layout wrote, bit by bit; what is damaged is refused by name."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import quintnet
from quintnet_compiler.api.compiled_program import CompiledProgram
from quintnet_compiler.checkpoint import (
    background,
    commit,
    lock,
    manifest,
    pieces,
    storage,
    tensor_file,
    training_state,
)
from quintnet_compiler.checkpoint.formats.convert import convert
from quintnet_compiler.checkpoint.formats.format import Format
from quintnet_compiler.checkpoint.stores import disk_folder
from quintnet_compiler.checkpoint.stores.disk_folder import DiskFolder

from .models import CASES, build

Made = tuple[CompiledProgram, torch.optim.Optimizer]


def _made(name: str, axes: dict[str, int], **options: Any) -> Made:
    case = CASES[name]
    program = quintnet.compile(build(name), quintnet.Mesh(**axes), case.batch(8), loss_fn=case.loss_fn, **options)
    return program, torch.optim.AdamW(program.parameters(), lr=1e-2, betas=(0.8, 0.95))


def _train(made: Made, name: str, steps: int = 1) -> list[float]:
    program, optimizer = made
    losses = []
    for _ in range(steps):
        losses.append(float(program.step(CASES[name].batch(8))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _contents(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor, whole, put together without the code under test; and the rest."""
    wholes = {}
    for name, entry in json.loads((checkpoint / "index.json").read_text()).items():
        whole, covered = torch.zeros(entry["shape"], dtype=tensor_file.STORED_TYPES[entry["dtype"]].dtype), 0
        for at, sizes, file, key in entry["boxes"]:
            with safe_open(checkpoint / file, framework="pt") as opened:
                whole[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))] = opened.get_tensor(key)
            covered += torch.Size(sizes).numel()
        assert covered == whole.numel(), name
        wholes[name] = whole
    state = json.loads((checkpoint / "state.json").read_text())
    del state["run"]["mesh"]
    return wholes, state


def _there(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != lock.NAME)


def _require_equal(one: Path, other: Path) -> None:
    (tensors, state), (others, other_state) = _contents(one), _contents(other)
    assert state == other_state
    assert tensors.keys() == others.keys()
    for name, x in tensors.items():
        assert torch.equal(x, others[name]), name


@pytest.fixture(scope="module")
def trained() -> Made:
    made = _made("mlp", {"dp": 1})
    _train(made, "mlp", 2)
    return made


@pytest.fixture
def saved(trained: Made, tmp_path: Path) -> Path:
    program, optimizer = trained
    return program.save(
        tmp_path / "run", step=2, optimizer=optimizer, extra={"samples": 16, "scheduler": {"lrs": [0.1]}}
    )


def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    first = _made("gpt", {"dp": 2})
    _train(first, "gpt", 2)
    first[0].save(tmp_path, step=2, optimizer=first[1], extra={"samples": 16})
    second = _made("gpt", {"dp": 2})
    second[1].param_groups[0]["lr"] = 5.0
    found = second[0].load(tmp_path, optimizer=second[1])
    assert (found.step, found.extra) == (2, {"samples": 16})
    assert second[1].param_groups[0]["betas"] == (0.8, 0.95)
    assert _train(first, "gpt", 3) == _train(second, "gpt", 3)
    for one, other in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())  # type: ignore[attr-defined]


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad"])
def test_optimizers_keep_their_state(optimizer: str, tmp_path: Path) -> None:
    options = {"SGD": {"momentum": 0.9}, "AdamW": {"fused": True, "amsgrad": True}, "Adagrad": {}}[optimizer]
    kind = getattr(torch.optim, optimizer)
    programs = [_made("mlp", {"dp": 1})[0] for _ in range(2)]
    optimizers = [kind(program.parameters(), lr=0.1, **options) for program in programs]
    _train((programs[0], optimizers[0]), "mlp", 2)
    programs[0].save(tmp_path, step=1, optimizer=optimizers[0])
    programs[1].load(tmp_path, optimizer=optimizers[1])
    assert _train((programs[0], optimizers[0]), "mlp", 2) == _train((programs[1], optimizers[1]), "mlp", 2)


def test_dropout_goes_on_where_it_stood(tmp_path: Path) -> None:
    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(self.linear(x), 0.5, self.training).square().mean()

    torch.manual_seed(0)
    module, batch = Noisy(), (torch.randn(4, 8),)
    first, second = (quintnet.compile(module, quintnet.Mesh(dp=1), batch) for _ in range(2))
    first.step(batch)
    first.save(tmp_path, step=1)
    second.load(tmp_path)
    assert first.step(batch) == second.step(batch)


def test_the_newest_whole_checkpoint_is_used(trained: Made, tmp_path: Path) -> None:
    program, optimizer = trained
    for step in range(1, 6):
        program.save(tmp_path, step=step, optimizer=optimizer, keep=3)
    assert _there(tmp_path) == [f"step-{n:08}" for n in (3, 4, 5)]
    (tmp_path / "step-00000005" / "state.json").write_text("{}")
    with pytest.warns(quintnet.CheckpointWarning, match=r"step-00000005: state.json has 2 bytes"):
        assert program.load(tmp_path).step == 4
    with pytest.raises(quintnet.CheckpointError, match=r"state\.json") as raised:
        program.load(tmp_path, step=5)
    assert raised.value.code == "QN601"
    program.save(tmp_path, step=5)  # a new one in its place
    assert program.load(tmp_path).step == 5


def test_two_hundred_damages_are_all_refused_by_name(trained: Made, saved: Path) -> None:
    program, _ = trained
    whole = {path.name: path.read_bytes() for path in saved.iterdir()}
    chance = random.Random(0)
    for trial in range(200):
        name = sorted(whole)[trial % len(whole)]
        data = bytearray(whole[name])
        if trial % 4:
            bit = chance.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
        else:
            del data[int(len(data) * (0, 0.5, 0.99)[trial % 3]) :]
        (saved / name).write_bytes(data)
        with pytest.raises(quintnet.CheckpointError, match=name) as raised:
            program.load(saved.parent, step=2)
        assert raised.value.code == "QN601", name
        (saved / name).write_bytes(whole[name])
    assert program.load(saved.parent).step == 2


def test_missing_foreign_and_linked_files_are_named(trained: Made, saved: Path, tmp_path: Path) -> None:
    program, _ = trained

    def refused(text: str) -> None:
        with pytest.raises(quintnet.CheckpointError, match=text):
            program.load(saved.parent, step=2)

    (saved / "evil.pkl").write_bytes(b"cos\nsystem\n")
    refused(r"evil\.pkl does not belong")
    (saved / "evil.pkl").unlink()
    shard = saved / "rank-00000.safetensors"
    shard.rename(tmp_path / "elsewhere")
    refused(r"rank-00000\.safetensors is missing")
    shard.symlink_to(tmp_path / "elsewhere")
    refused("not a plain file")
    shard.unlink()
    (tmp_path / "elsewhere").rename(shard)
    saved.rename(saved.with_name("step-00000007"))
    with pytest.raises(quintnet.CheckpointError, match="of another checkpoint"):
        program.load(saved.parent, step=7)
    with pytest.raises(quintnet.CheckpointError, match="no whole checkpoint"):
        program.load(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("dtype", "classes", "text"),
    [
        (torch.float32, 8, r"head\.bias is torch\.float64, and torch\.float32 in the model"),
        (torch.float64, 9, r"head\.bias is \(8,\), and \(9,\) in the model"),
    ],
)
def test_another_model_is_refused_before_anything_changes(
    dtype: torch.dtype, classes: int, text: str, saved: Path
) -> None:
    model, case = build("mlp", dtype), CASES["mlp"]
    model.head = torch.nn.Linear(model.head.in_features, classes).to(dtype)  # type: ignore[union-attr, arg-type]
    x, labels = case.batch(8)
    program = quintnet.compile(model, quintnet.Mesh(dp=1), (x.to(dtype), labels), loss_fn=case.loss_fn)
    before = [p.full_tensor().clone() for p in program.parameters()]  # type: ignore[attr-defined]
    with pytest.raises(quintnet.CheckpointError, match=text) as raised:
        program.load(saved.parent)
    assert raised.value.code == "QN602"
    assert all(torch.equal(a, b.full_tensor()) for a, b in zip(before, program.parameters(), strict=True))  # type: ignore[attr-defined]


def test_another_optimizer_is_refused(trained: Made, saved: Path, tmp_path: Path) -> None:
    program, optimizer = trained
    other = torch.optim.SGD(program.parameters(), lr=0.1)
    with pytest.raises(quintnet.CheckpointError, match="is a SGD, and the checkpoint has that of a AdamW"):
        program.load(saved.parent, optimizer=other)
    program.save(tmp_path / "bare", step=1)
    with pytest.raises(quintnet.CheckpointError, match="has no optimizer"):
        program.load(tmp_path / "bare", optimizer=optimizer)
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(quintnet.CheckpointError, match=r"make it with program.parameters\(\)"):
        program.save(tmp_path / "bare", step=2, optimizer=stranger)
    with pytest.raises(
        quintnet.CheckpointError, match="extra: dataset is a object, which a checkpoint cannot hold"
    ) as raised:
        program.save(tmp_path / "bare", step=2, extra={"dataset": object()})
    assert raised.value.code == "QN603"
    assert [entry.step for entry in manifest.available(DiskFolder(tmp_path / "bare"))] == [1]


class _Seen(NamedTuple):
    rows: int
    weight: np.float32


def test_extra_values_keep_their_types(trained: Made, tmp_path: Path) -> None:
    program, optimizer = trained
    optimizer.param_groups[0]["lr"] = np.float32(0.25)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 3])
    extra = {
        "seen": _Seen(3, np.float32(0.5)), "span": (1, 2), "names": {"a", "b"}, "random": torch.get_rng_state(),
        "scheduler": scheduler.state_dict(), "best": OrderedDict(loss=0.5), "none": None,
    }  # fmt: skip
    program.save(tmp_path / "own", step=1, optimizer=optimizer, extra=extra)
    convert(tmp_path / "own", tmp_path / "dcp", Format.DCP)
    convert(tmp_path / "dcp", tmp_path / "again", Format.QUINTNET)
    for folder in ("own", "again"):
        restored = dict(program.load(tmp_path / folder, optimizer=optimizer).extra)
        assert torch.equal(restored.pop("random"), extra["random"])
        assert {name: (type(x), x) for name, x in restored.items()} == {
            name: (type(x), x) for name, x in extra.items() if name != "random"
        }
        assert type(restored["seen"].weight) is np.float32 and type(restored["scheduler"]["milestones"]) is Counter
        assert optimizer.param_groups[0]["lr"] == 0.25
    cyclic: list[object] = []
    cyclic.append(cyclic)
    for wrong, text in (({1: 2}, "extra has the key 1"), ({"list": cyclic}, "extra holds itself")):
        with pytest.raises(quintnet.CheckpointError, match=text):
            program.save(tmp_path / "own", step=2, extra=wrong)  # type: ignore[dict-item]
    assert [entry.step for entry in manifest.available(DiskFolder(tmp_path / "own"))] == [1]


def test_saving_in_the_background_saves_what_was_there(
    trained: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is written after the next steps, which are those of a program that saves nothing."""
    program, optimizer = trained
    program.save(tmp_path / "now", step=1, optimizer=optimizer)
    other, stepped = _made("mlp", {"dp": 1}), threading.Event()
    other[0].load(tmp_path / "now", optimizer=other[1])

    def write_when_stepped(*arguments: Any) -> Path | str:
        assert stepped.wait(60)
        return training_state.write(*arguments)

    monkeypatch.setattr(background, "write", write_when_stepped)
    later = program.save_async(tmp_path / "later", step=1, optimizer=optimizer)
    losses = _train(trained, "mlp", 2)
    assert not later.done()
    stepped.set()
    assert losses == _train(other, "mlp", 2)
    for p, q in zip(program.parameters(), other[0].parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())  # type: ignore[attr-defined]
    _require_equal(tmp_path / "now" / "step-00000001", later.result(30))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(quintnet.CheckpointError) as raised:
        program.save_async(file, step=2).result(30)
    assert raised.value.code == "QN603"


# -- what dies while it saves

PHASES = {
    "write": (pieces, "_hash"),
    "index": (storage, "write_text"),
    "manifest": (manifest, "write_text"),
    "rename": (disk_folder.os, "rename"),
    "cleaning": (commit, "prune"),
}


def _killed(folder: str, phase: str) -> None:
    made = _made("mlp", {"dp": 1})
    made[0].save(folder, step=1, optimizer=made[1], keep=1)
    where, name = PHASES[phase]
    setattr(where, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    made[0].save(folder, step=2, optimizer=made[1], keep=1)


def _out_of_space(folder: str) -> tuple[str, list[str]]:
    made = _made("mlp", {"dp": 1})
    made[0].save(folder, step=1, optimizer=made[1])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    try:
        made[0].save(folder, step=2, optimizer=made[1])
    except quintnet.CheckpointError as error:
        return error.code, _there(Path(folder))
    return "", []


@pytest.mark.parametrize(
    "phase", [name if name == "rename" else pytest.param(name, marks=pytest.mark.slow) for name in PHASES]
)
def test_a_killed_save_leaves_the_checkpoint_before(phase: str, trained: Made, tmp_path: Path) -> None:
    with pytest.raises(quintnet.RunError, match="killed by SIGKILL"):
        quintnet.launch(_killed, 1, (str(tmp_path), phase), timeout=120)
    program, optimizer = trained
    assert program.load(tmp_path).step == (2 if phase in ("rename", "cleaning") else 1)
    program.save(tmp_path, step=3, optimizer=optimizer, keep=1)
    assert _there(tmp_path) == ["step-00000003"]  # and what the dead left is gone


def test_a_full_disk_leaves_the_checkpoint_before(trained: Made, tmp_path: Path) -> None:
    [(code, there)] = quintnet.launch(_out_of_space, 1, (str(tmp_path),), timeout=120)
    assert (code, there) == ("QN603", ["step-00000001"])
    assert trained[0].load(tmp_path).step == 1


# -- layouts

LAYOUTS: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({"pp": 2, "dp": 2}, {"microbatches": 2, "zero": 3}),
    ({"tp": 2, "dp": 2}, {"zero": 1}),
    ({"tp": 4}, {}),
    ({"cp": 2, "dp": 2}, {"context": "ring", "zero": 2}),
    ({"pp": 4}, {"microbatches": 4, "schedule": "zb-h1"}),
    ({"dp": 4}, {"zero": 3}),
    ({"pp": 2, "tp": 2}, {"microbatches": 2, "schedule": "interleaved", "virtual_stages": 2}),
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"cp": 4}, {"context": "all_gather"}),
    ({"pp": 2, "cp": 2}, {"microbatches": 2}),
)


def _pairs(folder: str, name: str, which: list[int], pairs: list[tuple[int, int]]) -> None:
    """Save under one layout, load under another, save again: the same."""
    torch.set_num_threads(1)
    made = {index: _made(name, LAYOUTS[index][0], **LAYOUTS[index][1]) for index in which}
    for number, (source, target) in enumerate(pairs):
        _train(made[source], name)
        one = made[source][0].save(
            Path(folder, str(number), "a"), step=number, optimizer=made[source][1], extra={"at": number}
        )
        found = made[target][0].load(f"{folder}/{number}/a", optimizer=made[target][1])
        other = made[target][0].save(
            Path(folder, str(number), "b"), step=found.step, optimizer=made[target][1], extra=found.extra
        )
        if torch.distributed.get_rank() == 0:
            _require_equal(one, other)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0 and number < len(pairs) - 1:
            shutil.rmtree(f"{folder}/{number}")


@pytest.mark.slow
def test_layouts_read_each_other(tmp_path: Path) -> None:
    quintnet.launch(_pairs, 4, (str(tmp_path), "gpt", [0, 1, 2], [(0, 1), (1, 2), (2, 0)]), timeout=240)
    # and one process reads what four wrote
    alone = _made("gpt", {"dp": 1})
    found = alone[0].load(tmp_path / "2" / "b", optimizer=alone[1])
    again = alone[0].save(tmp_path / "alone", step=found.step, optimizer=alone[1], extra=found.extra)
    _require_equal(tmp_path / "2" / "b" / again.name, again)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), [("gpt", range(len(LAYOUTS))), ("hf_gpt2", (0, 1, 2, 5, 7))])
def test_a_hundred_pairs_of_layouts(name: str, which: Sequence[int], tmp_path: Path) -> None:
    chance = random.Random(name)
    pairs = [tuple(chance.sample(list(which), 2)) for _ in range(50)]
    quintnet.launch(_pairs, 4, (str(tmp_path), name, list(which), pairs), timeout=1800)
