"""Copies between an accelerator and pinned host memory, on one stream for each direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from .transport import Pending

PLAIN = ("cpu", "meta")  # devices without memory apart from the host's


@dataclass(frozen=True)
class HostCopies:
    """Offloads and fetches values for generated code, without blocking the host.

    A wait lets the computing stream, not the host, wait for a copy; the source's memory is free from then on. Pinned
    memory comes from PyTorch's caching allocator, which reuses it after the copies that read it. Without an
    accelerator, values are cloned.
    """

    streams: dict[tuple[torch.device, str], torch.Stream] = field(default_factory=dict)

    def copy_out(self, x: Tensor, at: int) -> Tensor:
        """Return a copy in host memory."""
        copied: Tensor = self.start_copy_out(x, at)()
        return copied

    def copy_in(self, x: Tensor, device: torch.device, at: int) -> Tensor:
        """Return a copy on ``device``."""
        copied: Tensor = self.start_copy_in(x, device, at)()
        return copied

    def start_copy_out(self, x: Tensor, at: int) -> Pending:
        """Start a copy to host memory."""
        if x.device.type in PLAIN:
            copied = x.clone(memory_format=torch.preserve_format)
            return lambda: copied
        return self.start_into(SHIPPED.empty_like(x, device="cpu", pin_memory=True), x)

    def start_into(self, target: Tensor, x: Tensor) -> Pending:
        """Start a copy to ``target``, in host memory."""
        if x.device.type in PLAIN:
            copied = target.copy_(x)
            return lambda: copied
        return self._copied(target, x, x.device, "out")

    def start_copy_in(self, x: Tensor, device: torch.device, at: int) -> Pending:
        """Start a copy to ``device``."""
        if device.type in PLAIN or x.device.type == "meta":
            copied = x.clone(memory_format=torch.preserve_format)
            return lambda: copied
        target = SHIPPED.empty_like(x, device=device)
        return self._copied(target, x, target.device, "in")

    def wait_for_copies(self) -> None:
        """Have the host wait for all copies."""
        for stream in self.streams.values():
            stream.synchronize()

    def _copied(self, target: Tensor, x: Tensor, device: torch.device, direction: str) -> Pending:
        """Start a copy from ``x`` to ``target``, and return what waits for it; both live until then."""
        computing = torch.accelerator.current_stream(device)
        stream = self.stream(device, direction)
        stream.wait_stream(computing)
        with stream:
            target.copy_(x, non_blocking=True)
        done = stream.record_event()
        alive = [x]

        def wait() -> Tensor:
            torch.accelerator.current_stream(device).wait_event(done)
            alive.clear()
            return target

        return wait

    def stream(self, device: torch.device, direction: str) -> torch.Stream:
        """Return the stream of copies in one direction."""
        if (device, direction) not in self.streams:
            self.streams[device, direction] = torch.Stream(device=device)
        return self.streams[device, direction]


def host_room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized host memory for copies from ``device``, pinned for accelerators; meta for a meta device."""
    if device.type == "meta":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=device.type not in PLAIN)
