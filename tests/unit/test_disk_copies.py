"""features.offload.disk_copies: values in files, and what they cost."""

from __future__ import annotations

import fcntl
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts, FastestCosts
from quintnet_compiler.cost_models.hardware_numbers import described
from quintnet_compiler.features.offload.disk_copies import LOCK, DiskCopies
from quintnet_compiler.ir.cost_protocol import way_seconds
from quintnet_compiler.ir.distributed_program import DiskSpec
from quintnet_compiler.runtime.transport.host_copies import HostCopies


def size(folder: Path) -> int:
    """Of all files."""
    return sum(path.stat().st_size for path in folder.glob("*/*"))


def test_values_of_any_layout_and_dtype_come_back_and_files_die_with_them(tmp_path: Path) -> None:
    copies = DiskCopies(DiskSpec(str(tmp_path), 16), 3, HostCopies())
    torch.manual_seed(0)
    given = [
        torch.randn(7, 5).t(), torch.randn(4, 3, 2).permute(2, 0, 1), torch.randn(9, dtype=torch.float64),
        torch.randn(6).bfloat16(), torch.randint(0, 9, (11,)), torch.rand(13) < 0.5, torch.randn(1000),
    ]  # fmt: skip
    kept = [x.clone() for x in given]
    waits = [copies.start_write_out(x, 0) for x in given]
    there = [wait() for wait in waits]
    for x in given:
        x.zero_()
    assert size(tmp_path) == sum(x.nbytes for x in given)
    assert all(x.is_meta and x.stride() == y.stride() for x, y in zip(there, given, strict=True))
    for x, expected in zip(there, kept, strict=True):
        back = copies.read_in(x, torch.device("cpu"), 0)
        assert torch.equal(back, expected) and back.stride() == expected.stride()
    del there, waits, x
    assert size(tmp_path) == 0
    there = [copies.write_out(x, 0) for x in given]
    copies.drop_values()
    assert size(tmp_path) == 0 and len(there) == len(given)
    del copies, there  # a write of a file that is gone failed, and its error refers to the copies
    deadline = time.monotonic() + 60
    while any(tmp_path.iterdir()) and time.monotonic() < deadline:  # threads let go of their last job later
        gc.collect()
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda path: path.write_bytes(b"1"), "a file is shorter than it was"),
        (lambda path: path.unlink(), "No such file or directory"),
    ],
)
def test_a_file_that_somebody_changed_is_an_error(
    harm: Callable[[Path], Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = DiskCopies(DiskSpec(str(tmp_path), 4000), 0, HostCopies())
    there = copies.write_out(torch.arange(1000.0), 0)
    there.stored.written.result()  # type: ignore[attr-defined]
    harm(there.stored.path)  # type: ignore[attr-defined]
    with pytest.raises(OSError, match=told) as error:
        copies.read_in(there, torch.device("cpu"), 0)
    assert error.value.filename == str(tmp_path)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    for name in ("quintnet-0-dead", "quintnet-1-alive"):
        (tmp_path / name).mkdir()
        (tmp_path / name / LOCK).touch()
        (tmp_path / name / "7").write_bytes(b"1234")
    (tmp_path / "other").mkdir()
    with (tmp_path / "quintnet-1-alive" / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        copies = DiskCopies(DiskSpec(str(tmp_path), 16), 0, HostCopies())
        there = {path.name for path in tmp_path.iterdir()}
    assert there == {"quintnet-1-alive", "other", copies.folder.name}


def test_a_disk_is_priced_by_what_it_reads_and_writes() -> None:
    numbers = {
        "name": "one", "tflops": {"fp32": 60, "bf16": 900}, "memory_gb": 80, "memory_gb_per_second": 3000,
        "link_gb_per_second": 400, "network_gb_per_second": 50, "host_gb_per_second": 4, "disk_read_gb_per_second": 5,
        "disk_write_gb_per_second": 2, "host_memory_gb_per_second": 100,
    }  # fmt: skip
    costs = ClusterCosts(Cluster(numbers, 1, 1))
    for way, rate in {"to host": 4, "from host": 4, "to disk": 2, "from disk": 4}.items():
        assert way_seconds(costs, way, 1e9) == pytest.approx(1 / (0.8 * rate), rel=1e-3)
        assert way_seconds(FastestCosts((costs,)), way, 1e9) == way_seconds(costs, way, 1e9)
    assert costs.host_update_seconds(1e9) == pytest.approx(7 / (0.8 * 100))
    assert described("h100").disk_write_bytes_per_second < described("h100").disk_read_bytes_per_second
