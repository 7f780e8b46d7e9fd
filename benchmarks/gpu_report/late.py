"""All ranks in one process, whose communication runs late: on a stream of its own, after a pause.

This is what NCCL does to the rest of a program. Whoever uses a result before waiting for it, or changes or frees what
is still being read, computes something else than :class:`LocalWorld` alone does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.runtime.backends import local
from quintnet_compiler.runtime.transport.local import LocalTransport, LocalWorld
from quintnet_compiler.runtime.transport.transport import Pending, Wait

from .setting import Setting


class LateWorld(LocalWorld):
    """A world in which collectives and transfers run on ``side``, each after a pause."""

    def __init__(self, mesh: Mesh, sites: Sequence[str], setting: Setting) -> None:
        super().__init__(mesh, sites)
        self.setting, self.side = setting, torch.Stream(device=setting.device)
        self.waited = 0  # of results that were started, how many were waited for

    def transport(self, rank: int) -> LateTransport:
        if rank not in self.transports:
            self.transports[rank] = LateTransport(self, rank)
        transport = self.transports[rank]
        assert isinstance(transport, LateTransport)
        return transport

    @contextlib.contextmanager
    def late(self) -> Iterator[None]:
        """Run work inside on the side stream, after earlier work and a pause."""
        self.side.wait_stream(torch.accelerator.current_stream())
        with self.side:
            pause(self.setting)
            yield

    def _advance(self, waits: dict[int, Any], ready: dict[int, Any]) -> None:
        with self.late():
            super()._advance(waits, ready)

    def join(self, result: Any) -> Any:
        """From here on, what is launched may use ``result``."""
        stream = torch.accelerator.current_stream()
        stream.wait_stream(self.side)
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                x.record_stream(stream)  # its memory is the side's
        return result


class LateTransport(LocalTransport):
    """One rank's side of it. Inputs live until the wait, as with a process group, and no longer."""

    world: LateWorld

    def run(self, collective: str, *args: Any) -> Any:
        return self.world.join(super().run(collective, *args))

    def start(self, collective: str, *args: Any) -> Pending:
        return self._later(super().run(collective, *args), args)

    def _later(self, result: Any, *alive: Any) -> Pending:
        held = list(alive)

        def wait() -> Any:
            self.world.waited += bool(held)
            self.world.join(result)
            held.clear()
            return result

        return wait

    def permute(self, x: Tensor, axis: str, sources: tuple[int, ...], at: int) -> Wait:
        return self._later(super().permute(x, axis, sources, at)(), x)

    def start_sum(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        total = self._meet("sum", x, ranks, label)
        with self.world.late():
            x.copy_(total)
        return self._later(x, total)

    def start_scatter(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        part, scattered = x.chunk(len(ranks))[ranks.index(self.rank)], self._meet("scatter", x, ranks, label, 0, 1)
        with self.world.late():
            part.copy_(scattered)
        return self._later(part, scattered, x)

    def broadcast(self, x: Tensor, ranks: tuple[int, ...], source: int, label: str) -> Tensor:
        received: Tensor = self.world.join(super().broadcast(x, ranks, source, label))
        return received

    def send(self, x: Tensor, to: int, channel: int, label: str) -> Wait:
        with self.world.late():
            sent = x.clone()
        super().send(sent, to, channel, label)
        return self._later(x, x)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, channel: int, label: str) -> Wait:
        arrives = super().receive(shape, dtype, source, channel, label)
        return lambda: self.world.join(arrives())


def pause(setting: Setting) -> None:
    """The current stream does nothing for about a millisecond."""
    if setting.emulated:
        import time

        from tests.accelerator.device import install

        install().launch(lambda: time.sleep(1e-3))
    elif setting.cuda:
        torch.cuda._sleep(2_000_000)  # cycles


@contextlib.contextmanager
def late_worlds(setting: Setting) -> Iterator[list[LateWorld]]:
    """Programs whose first step is inside have late worlds; gives those that were made."""
    worlds: list[LateWorld] = []

    def world(mesh: Mesh, sites: Sequence[str] = ()) -> LateWorld:
        worlds.append(LateWorld(mesh, sites, setting))
        return worlds[-1]

    with mock.patch.object(local, "LocalWorld", world):
        yield worlds
