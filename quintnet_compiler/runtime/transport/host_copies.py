"""Copies between an accelerator and pinned memory of its host, each way on a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .transport import Pending

PLAIN = ("cpu", "meta")  # devices whose memory is the host's, or nobody's


@dataclass(frozen=True)
class HostCopies:
    """What generated code calls to move a value. The host waits for nothing: what computes behind a wait runs after the
    copy, and memory is free for others from there on.

    Pinned memory comes from PyTorch's caching allocator, which hands it out again when the copies that read it are
    over. Where there is no accelerator, a copy is a plain one.
    """

    streams: dict[tuple[torch.device, str], torch.Stream] = field(default_factory=dict)

    def copy_out(self, x: Tensor, at: int) -> Tensor:
        made: Tensor = self.start_copy_out(x, at)()
        return made

    def copy_in(self, x: Tensor, device: torch.device, at: int) -> Tensor:
        made: Tensor = self.start_copy_in(x, device, at)()
        return made

    def start_copy_out(self, x: Tensor, at: int) -> Pending:
        if x.device.type in PLAIN:
            made = x.clone(memory_format=torch.preserve_format)
            return lambda: made
        return self.start_into(torch.empty_like(x, device="cpu", pin_memory=True), x)

    def start_into(self, to: Tensor, x: Tensor) -> Pending:
        """As ``start_copy_out``, to memory of the host that there is."""
        if x.device.type in PLAIN:
            made = to.copy_(x)
            return lambda: made
        return self._copied(to, x, x.device, "out")

    def start_copy_in(self, x: Tensor, device: torch.device, at: int) -> Pending:
        if device.type in PLAIN or x.device.type == "meta":
            made = x.clone(memory_format=torch.preserve_format)
            return lambda: made
        room = torch.empty_like(x, device=device)
        return self._copied(room, x, room.device, "in")

    def settle(self) -> None:
        """Have the host wait for all copies."""
        for stream in self.streams.values():
            stream.synchronize()

    def _copied(self, to: Tensor, x: Tensor, device: torch.device, way: str) -> Pending:
        """``to``, once it has what ``x`` has now; both live until then."""
        computing = torch.accelerator.current_stream(device)
        stream = self.stream(device, way)
        stream.wait_stream(computing)
        with stream:
            to.copy_(x, non_blocking=True)
        done = stream.record_event()
        held = [x]

        def wait() -> Tensor:
            torch.accelerator.current_stream(device).wait_event(done)
            held.clear()
            return to

        return wait

    def stream(self, device: torch.device, way: str) -> torch.Stream:
        """Of copies one way."""
        if (device, way) not in self.streams:
            self.streams[device, way] = torch.Stream(device=device)
        return self.streams[device, way]


def host_room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host for what ``device`` copies, pinned if that is another one; none for a device without any."""
    if device.type == "meta":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=device.type not in PLAIN)
