"""The device of the parts: this machine's accelerator, or the emulated one of the tests."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Setting:
    """The device of a report.

    ``emulated``: it is host memory (``tests/accelerator``): times mean nothing, and parts that need CUDA are left out.
    ``library``: an NCCL that supports several ranks on one device.
    """

    device: torch.device
    emulated: bool
    library: Path | None = None

    @classmethod
    def here(cls, *, emulated: bool, library: Path | None = None) -> Setting:
        """Return this machine's accelerator, or the emulated one.

        Raises:
            RuntimeError: If there is no accelerator.
        """
        if emulated:
            from tests.accelerator.device import NAME, install

            install().set_device(0)
            return cls(torch.device(NAME, 0), emulated=True, library=library)
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None:
            raise RuntimeError("torch finds no accelerator on this machine")
        torch.accelerator.set_device_index(0)
        return cls(torch.device(accelerator.type, 0), emulated=False, library=library)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait until the device has done everything that was launched."""
        torch.accelerator.synchronize(self.device)

    def free(self) -> None:
        """Give unused memory back to the device."""
        gc.collect()
        if not self.emulated:  # which keeps none
            torch.accelerator.empty_cache()

    def seconds(self, work: Callable[[], object], times: int = 10, warm: int = 3) -> float:
        """Return the median of ``times`` runs, each until the device is done, after ``warm`` others."""
        times_taken = []
        for _ in range(warm + times):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            times_taken.append(time.perf_counter() - start)
        return statistics.median(times_taken[warm:])
