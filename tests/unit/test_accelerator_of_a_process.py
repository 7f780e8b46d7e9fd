"""Which accelerator a process takes, and what it tells torch.distributed."""

from __future__ import annotations

import pytest
import torch

from quintnet_compiler.core.errors import RunError
from quintnet_compiler.runtime.launch.accelerator import group_accelerator, take_accelerator


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine of two GPUs; the list has what was made the current one."""
    taken: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    return taken


def test_each_process_takes_its_own(machine: list[int]) -> None:
    assert take_accelerator(1, 2) == {"backend": "nccl", "device_id": torch.device("cuda", 1)}
    assert machine == [1]


def test_more_processes_than_accelerators_are_an_error(machine: list[int]) -> None:
    with pytest.raises(RunError, match=r"number 2 of its machine .* has 2 cuda devices") as found:
        take_accelerator(2)
    assert found.value.code == "QN301"
    assert machine == []


def test_where_the_number_of_processes_is_known_all_of_them_use_gloo(machine: list[int]) -> None:
    assert [take_accelerator(place, 3) for place in range(3)] == [{"backend": "gloo"}] * 3
    assert machine == []


@pytest.mark.parametrize("processes", [None, 4])
def test_where_nccl_lets_ranks_share_a_gpu_they_go_round(
    machine: list[int], processes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert take_accelerator(3, processes) == {"backend": "nccl", "device_id": torch.device("cuda", 1)}
    assert machine == [1]
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    with pytest.raises(RunError, match="QN301"):
        take_accelerator(3)


def test_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert take_accelerator(5) == {"backend": "gloo"}
    assert group_accelerator() is None
