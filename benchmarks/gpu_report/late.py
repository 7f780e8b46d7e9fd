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
        found = self.transports[rank]
        assert isinstance(found, LateTransport)
        return found

    @contextlib.contextmanager
    def late(self) -> Iterator[None]:
        """What is launched inside runs on the side, after what was launched before, and after a pause."""
        self.side.wait_stream(torch.accelerator.current_stream())
        with self.side:
            pause(self.setting)
            yield

    def _advance(self, waits: dict[int, Any], ready: dict[int, Any]) -> None:
        with self.late():
            super()._advance(waits, ready)

    def join(self, made: Any) -> Any:
        """From here on, what is launched may use ``made``."""
        here = torch.accelerator.current_stream()
        here.wait_stream(self.side)
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, Tensor):
                x.record_stream(here)  # its memory is the side's
        return made


class LateTransport(LocalTransport):
    """One rank's side of it. Inputs live until the wait, as with a process group, and no longer."""

    world: LateWorld

    def run(self, collective: str, *args: Any) -> Any:
        return self.world.join(super().run(collective, *args))

    def start(self, collective: str, *args: Any) -> Pending:
        return self._later(super().run(collective, *args), args)

    def _later(self, made: Any, *kept: Any) -> Pending:
        held = list(kept)

        def wait() -> Any:
            self.world.waited += bool(held)
            self.world.join(made)
            held.clear()
            return made

        return wait

    def permute(self, x: Tensor, axis: str, sources: tuple[int, ...], at: int) -> Wait:
        return self._later(super().permute(x, axis, sources, at)(), x)

    def start_sum(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        made = self._meet("sum", x, ranks, label)
        with self.world.late():
            x.copy_(made)
        return self._later(x, made)

    def start_scatter(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        own, made = x.chunk(len(ranks))[ranks.index(self.rank)], self._meet("scatter", x, ranks, label, 0, 1)
        with self.world.late():
            own.copy_(made)
        return self._later(own, made, x)

    def broadcast(self, x: Tensor, ranks: tuple[int, ...], source: int, label: str) -> Tensor:
        made: Tensor = self.world.join(super().broadcast(x, ranks, source, label))
        return made

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
    made: list[LateWorld] = []

    def world(mesh: Mesh, sites: Sequence[str] = ()) -> LateWorld:
        made.append(LateWorld(mesh, sites, setting))
        return made[-1]

    with mock.patch.object(local, "LocalWorld", world):
        yield made
