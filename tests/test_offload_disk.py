"""Saved values that wait in files: the same bits as without, as many bytes as predicted, and nothing stays behind."""

from __future__ import annotations

import errno
import gc
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import quintnet
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.features.offload.disk_copies import LOCK
from quintnet_compiler.ir.distributed_program import SLOTS
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.simulation.program import simulate_program

from .models import CASES, build
from .test_offload import LAYOUTS, Options, stepped

pytestmark = pytest.mark.usefixtures("shared_captures")
torch.set_num_threads(1)
ACTIVATIONS = ("activations",)


def on_disk(folder: Path) -> Options:
    return {"offload": ACTIVATIONS, "offload_folder": str(folder)}


def files(folder: Path) -> Counter[str]:
    """Bytes of the files of each rank."""
    found: Counter[str] = Counter()
    for path in folder.glob("quintnet-*/*"):
        if path.name != LOCK:
            found[path.parent.name.split("-")[1]] += path.stat().st_size
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes", "options"), LAYOUTS, ids=str)
def test_the_bits_and_the_bytes(
    name: str, axes: dict[str, int], options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of each rank have at most as many bytes as simulated, and none is left when a step is over."""
    most, plain = Counter[str](), os.posix_fallocate

    def counted(file: int, at: int, size: int) -> None:
        plain(file, at, size)
        most.update({rank: max(0, now - most[rank]) for rank, now in files(tmp_path).items()})

    monkeypatch.setattr(os, "posix_fallocate", counted)
    _, expected = stepped(name, axes, options)
    program, found = stepped(name, axes, {**options, **on_disk(tmp_path)})
    assert found.keys() == expected.keys() and all(torch.equal(found[key], x) for key, x in expected.items())
    assert not files(tmp_path) and len(list(tmp_path.iterdir())) == program.mesh.size
    compiled = program._primary().program
    rows = simulate_program(compiled, program._prices(None), processes=False).rows
    expected_bytes = {
        str(rank): rows[program.mesh.coordinate(rank).get("pp", 0)].disk_bytes for rank in range(program.mesh.size)
    }
    assert most == expected_bytes and compiled.disk is not None
    assert {row.host_bytes for row in rows} <= {0, (SLOTS + 1) * compiled.disk.largest}
    assert "to disk" in {event.axis for row in rows for event in row.events}
    assert "files" in str(program.simulate())
    del program, compiled
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def _several(folder: str) -> list[bool]:
    """On this rank: whether all gradients of steps with files are those without."""
    torch.set_num_threads(1)
    options = {"zero": 3, "microbatches": 2}
    made = [stepped("gpt", {"dp": 2}, {**options, **more}) for more in ({}, on_disk(Path(folder)))]
    batch = CASES["gpt"].batch(8)
    batch = tuple(x.double() if x.is_floating_point() else x for x in batch)
    (plain, expected), (program, found) = made
    equal = [torch.equal(found[key], x) for key, x in expected.items()]
    for _ in range(3):
        equal.append(torch.equal(program.step(batch), plain.step(batch)))
    return [*equal, not files(Path(folder))["0"] or not files(Path(folder))["1"]]


@pytest.mark.slow
def test_processes_have_files_of_their_own(tmp_path: Path) -> None:
    for equal in quintnet.launch(_several, 2, args=(str(tmp_path),)):
        assert all(equal) and len(equal) > 10
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_full_disk_is_an_error_that_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = stepped("gpt", {"pp": 2}, {"microbatches": 4})
    program, found = stepped("gpt", {"pp": 2}, {"microbatches": 4, **on_disk(tmp_path)})
    batch = CASES["gpt"].batch(8)
    before, left, real = [p.detach().clone() for p in program.parameters()], [9], os.posix_fallocate

    def full(file: int, at: int, size: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, at, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device.*offload_folder") as error:
        program.step(batch)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(tmp_path)) and not files(tmp_path)
    assert all(torch.equal(p, x) for p, x in zip(program.parameters(), before, strict=True))
    monkeypatch.undo()
    program.zero_grad()
    assert torch.equal(program.step(batch), found["loss"])
    for name, p in program.named_parameters():
        assert p.grad is not None and torch.equal(p.grad.full_tensor(), expected[name])  # type: ignore[attr-defined]
    assert not files(tmp_path)


@pytest.mark.slow
def test_a_bad_value_is_found_where_it_is_without_files(tmp_path: Path) -> None:
    told = []
    for more in ({}, on_disk(tmp_path)):
        program, _ = stepped("gpt", {"pp": 2}, {"microbatches": 2, **more})
        with torch.no_grad():
            dict(program.named_parameters())["blocks.1.up.weight"][0, 0] = torch.nan
        program.zero_grad()
        with pytest.raises(quintnet.RunError, match="QN501") as error:
            program.step(CASES["gpt"].batch(8))
        told.append(str(error.value))
    assert told[0] == told[1] and not files(tmp_path)
    program, _ = stepped("mlp", {"dp": 2}, on_disk(tmp_path))
    assert program.verify(CASES["mlp"].batch(8)).ok


@pytest.mark.slow
def test_a_folder_must_be_there_before_anything_is_computed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="offload_folder") as error:
        stepped("mlp", {"dp": 1}, on_disk(tmp_path / "missing"))
    assert error.value.filename == str(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="offload_folder"):
        stepped("mlp", {"dp": 1}, on_disk(tmp_path / "file"))


def test_a_plan_has_a_folder_for_activations_alone(tmp_path: Path) -> None:
    plan = Plan(offload=ACTIVATIONS, offload_folder="/nvme")
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(CompileError, match="no activations leave the device") as error:
        stepped("mlp", {"dp": 1}, {"offload_folder": str(tmp_path)})
    assert error.value.code == "QN207" and "offload_folder" in str(error.value.fix)


def _planned(write: float, **plan: Any) -> quintnet.PlanReport:
    """Of a model whose saved values do not fit, on a device whose disk is so fast."""
    case = CASES["mlp"]
    device = {
        "name": "small", "tflops": {"fp32": 60, "bf16": 900}, "memory_gb_per_second": 3000, "link_gb_per_second": 400,
        "network_gb_per_second": 50, "host_gb_per_second": 64, "disk_read_gb_per_second": 60, "memory_gb": 1,
        "disk_write_gb_per_second": write,
    }  # fmt: skip
    given = {"microbatches": 1, "recompute": "none", "mesh": {"dp": 1}, "offload": ACTIVATIONS, **plan}
    return quintnet.plan(build("mlp"), Cluster(device, 1, 1), case.batch(4096), loss_fn=case.loss_fn, plan=given)


@pytest.mark.slow
def test_plans_with_a_disk_take_as_long_as_it_does() -> None:
    host, fast, slow = _planned(60), _planned(60, offload_folder="/nvme"), _planned(0.1, offload_folder="/nvme")
    seconds = [report.found.ranked[0].seconds for report in (host, fast, slow)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.05) and seconds[2] > 2 * seconds[1]
    assert fast.best.offload_folder == "/nvme" and host.best.offload_folder is None
    assert _planned(60, offload=(), offload_folder="/nvme").best.offload_folder is None
