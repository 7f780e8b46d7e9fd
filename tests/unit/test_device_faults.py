"""Errors of torch, NCCL and CUDA as they were reported, and what they become."""

from __future__ import annotations

import importlib
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from quintnet_compiler.compat import distributed as compat
from quintnet_compiler.core.errors import RunError
from quintnet_compiler.runtime.launch.device_faults import explained, place_of
from quintnet_compiler.runtime.launch.faults import Scene
from quintnet_compiler.runtime.launch.heartbeat import dump_stacks
from quintnet_compiler.runtime.launch.rank_status import RankStatus, of_communication
from quintnet_compiler.runtime.transport.distributed import DistributedTransport

WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=131072000, "
    "NumelOut=131072000, Timeout(ms)=600000) ran for 600081 milliseconds before timing out."
)
REMOTE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a "
    "network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a "
    "remote process exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv from 10.0.0.1<337> failed : "
    "Connection reset by peer"
)
SETUP = (
    "[5] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
    "store->get('0') got error: wait timeout after 300000ms"
)
CUDA = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1331, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.18.6\nncclUnhandledCudaError: Call to CUDA function failed.\nLast "
    "error:\nCuda failure 'out of range'"
)
INTERNAL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, internal error, NCCL version 2.14.3\n"
    "ncclInternalError: Internal check failed.\nLast error:\nbootstrap root: mismatch"
)
DUPLICATE = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, invalid usage, NCCL version 2.14.3\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : "
    "rank 0 and rank 1 both on CUDA device 1000"
)
ABORTED = f"NCCL communicator was aborted on rank 2.  Original reason for failure was: {WATCHDOG}"
MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.04 GiB is free"
)
ASSERT = (
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other API"
)
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


@pytest.mark.parametrize(
    ("error", "code", "said", "distant"),
    [
        (dist.DistBackendError(WATCHDOG), "QN402", "broadcast of 131072000 elements, given up after 600 s", True),
        (dist.DistBackendError(ABORTED), "QN402", "did not come to it in time", True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 2."), "QN402", "was given up", True),
        (dist.DistBackendError(REMOTE), "QN402", "NCCL: socketProgressOpt: Call to recv", True),
        (dist.DistBackendError(SETUP), "QN402", "connects to the others", True),
        (dist.DistBackendError(CUDA), "QN407", "CUDA failed within NCCL", False),
        (dist.DistBackendError(INTERNAL), "QN407", "NCCL failed", False),
        (dist.DistBackendError(DUPLICATE), "QN407", "two ranks on one GPU", False),
        (torch.OutOfMemoryError(MEMORY), "QN405", "Tried to allocate 2.00 GiB", False),
        (torch.AcceleratorError(ASSERT), "QN406", "index out of range", False),
        (torch.AcceleratorError(ILLEGAL), "QN406", "a kernel failed", False),
    ],
)
def test_an_error_of_a_device_says_what_it_means(error: RuntimeError, code: str, said: str, distant: bool) -> None:
    found = explained(error, 3, 17, ())
    assert found is not None and found.code == code and found.fix
    assert "rank 3 in step 17" in found.message and said in found.message
    found.__cause__ = error
    assert of_communication(found) is distant


def test_other_errors_stay_what_they_are() -> None:
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RunError("QN402", "NCCL error: ours")):
        assert explained(error, 0, 0, ()) is None


def test_the_place_is_that_of_the_collective() -> None:
    sites = ("all_reduce  layers.0.up  model.py:12", "all_gather  head  model.py:14")
    transport = object.__new__(DistributedTransport)
    transport.axis = {}  # no axis has a group: the collective fails where it begins
    for at, site in enumerate(sites):
        with pytest.raises(KeyError) as caught:
            transport.run("all_reduce", torch.ones(1), "tp", at)
        assert place_of(caught.value, sites) == site
    assert place_of(ValueError("never raised"), sites) == ""


def test_ranks_that_the_watchdog_ended_are_not_to_blame(tmp_path: Path) -> None:
    rows = {
        0: RankStatus(calls=5, step=4),
        1: RankStatus(calls=4, step=3, at="train.py:12 in load"),
        2: RankStatus(calls=5),
    }
    fault = Scene(3, rows, [], {0: -signal.SIGABRT, 2: -signal.SIGABRT}, [], tmp_path).fault()
    assert fault.ranks == (1,) and fault.error.code == "QN402" and fault.again
    assert "rank 1 did not come" in fault.error.message and "train.py:12 in load" in fault.error.message
    together = {rank: RankStatus(calls=5) for rank in range(3)}
    assert Scene(3, together, [], {0: -signal.SIGABRT}, [], tmp_path).fault().ranks == (0,)
    assert Scene(3, rows, [], {0: -signal.SIGKILL}, [], tmp_path).fault().ranks == (0,)


def test_the_flight_record_is_kept_beside_the_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c10d = importlib.import_module("torch._C._distributed_c10d")
    dump_stacks(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.txt"]  # nothing was recorded here
    record = b'{"entries":[{"profiling_name":"nccl:all_reduce","state":"started"}],"version":"2.10"}'
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda collectives, active: record, raising=False)
    assert compat.flight_record() == record
    dump_stacks(tmp_path, 1)
    assert (tmp_path / "rank1.collectives.json").read_bytes() == record
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda collectives, active: 1 / 0, raising=False)
    dump_stacks(tmp_path, 2)
    assert (tmp_path / "rank2.txt").read_text() and not (tmp_path / "rank2.collectives.json").exists()
