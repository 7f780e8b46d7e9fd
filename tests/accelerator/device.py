"""The emulated accelerator as a device of PyTorch: ``torch.device("emulated", 0)`` to ``7``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .build import built

NAME = "emulated"


@dataclass
class Counted:
    """What hosts asked of the device: launches of kernels by operator, copies, and what made the host wait."""

    kernels: Mapping[str, int]
    to_device: int
    to_host: int
    waits: Mapping[str, int]


@dataclass
class Peaks:
    """Bytes of a device, and of pinned memory of its host."""

    device: int = 0
    host: int = 0


class Emulated(ModuleType):
    """``torch.emulated``: what ``torch.cuda`` is for CUDA."""

    def __init__(self, extension: Any) -> None:
        super().__init__(f"torch.{NAME}")
        self.extension = extension

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return int(self.extension.current_device())

    def device_count(self) -> int:
        return int(self.extension.device_count())

    def set_device(self, device: int | str | torch.device) -> None:
        self.extension.set_device(device if isinstance(device, int) else torch.device(device).index)

    def synchronize(self, device: int | str | torch.device | None = None) -> None:
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        self.extension.synchronize(-1 if index is None else index)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream()

    def stream(self, stream: torch.Stream) -> torch.Stream:
        return stream  # is a context manager

    def memory_allocated(self) -> int:
        return int(self.extension.memory(self.current_device())[0])

    def max_memory_allocated(self) -> int:
        return int(self.extension.memory(self.current_device())[1])

    def reset_peak_memory_stats(self) -> None:
        self.extension.reset_peak(self.current_device())

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass

    # beyond torch.cuda

    def launch(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the current stream, when its turn comes."""
        self.extension.launch(function)

    def host_view(self, x: Tensor) -> Tensor:
        """The memory of ``x`` as a CPU tensor, for functions that run on a stream."""
        view: Tensor = self.extension.host_view(x)
        return view

    def delay(self, seed: int, share: float = 0.2, microseconds: int = 2000) -> None:
        """Delay a share of all tasks by up to ``microseconds``, drawn from ``seed``; 0 for none."""
        self.extension.delay(seed, share, microseconds)

    @contextmanager
    def measuring(self, index: int) -> Iterator[Peaks]:
        """The most bytes that are asked for at once until the block ends, beyond those that are there now."""
        found = Peaks()
        self.extension.reset_peak(index)
        device, _, host, _ = self.extension.requested(index)
        try:
            yield found
        finally:
            _, most, _, pinned = self.extension.requested(index)
            found.device, found.host = most - device, pinned - host

    @contextmanager
    def counting(self) -> Iterator[Counted]:
        """Counts what is asked of the device until the block ends."""
        found = Counted({}, 0, 0, {})
        self.extension.count(True)
        try:
            yield found
        finally:
            found.kernels, found.to_device, found.to_host, found.waits = self.extension.counted()
            self.extension.count(False)


def install() -> Emulated:
    """Build the device, once, and make it known to PyTorch; the second call of a process gives the same."""
    if hasattr(torch, NAME):
        module: Emulated = getattr(torch, NAME)
        return module
    extension = built()
    extension.register_hooks()
    torch.utils.rename_privateuse1_backend(NAME)
    module = Emulated(extension)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return module
