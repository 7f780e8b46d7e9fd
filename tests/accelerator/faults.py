"""Faults that only accelerators show, put back into the compiler one at a time: the tests must see each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quintnet_compiler.ir.builder import GraphBuilder
from quintnet_compiler.runtime.backends import local, processes
from quintnet_compiler.runtime.transport import collectives, distributed
from quintnet_compiler.runtime.transport.connections import Connection, Connections
from quintnet_compiler.runtime.transport.host_copies import HostCopies

from .device import NAME


def _index_in_code() -> None:
    """Code names the device of the rank that made it."""
    plain = GraphBuilder.call

    def call(self: GraphBuilder, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = plain(self, target, *args, **kwargs)
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device(NAME, dist.get_rank())}
        return node

    GraphBuilder.call = call  # type: ignore[method-assign]


def _first_use() -> None:
    """Nothing connects the communicators of a pipeline before its first step."""
    Connections._connect = lambda self, one, device: None  # type: ignore[method-assign]


def _one_group() -> None:
    """All ways of a pipeline share one group of ranks."""
    plain = Connections.add

    def add(self: Connections, links: Any, device: torch.device) -> None:
        links = list(links)
        plain(self, links[:1], device)
        shared = dist.group.WORLD
        assert shared is not None
        self.group |= dict.fromkeys((link for link in links if self.rank in link[1:]), shared)

    Connections.add = add  # type: ignore[method-assign]


def _no_wait() -> None:
    """Results are used before they are there."""

    def pending(work: Any, given: Tensor, made: Callable[[], Any]) -> Callable[[], Any]:
        kept = [work, given]
        return lambda: (made(), kept)[0]

    collectives.pending = distributed.pending = pending  # type: ignore[assignment]


def _freed() -> None:
    """What a rank sends is freed before it has gone."""

    def send(self: Any, x: Tensor, to: int, channel: int, label: str) -> Callable[[], Any]:
        dist.isend(x.clone(), to, group=self.connections.group[Connection(channel, self.rank, to)])
        return lambda: x

    distributed.DistributedTransport.send = send  # type: ignore[assignment,method-assign]


def _not_moved() -> None:
    """The batch stays where the user has it."""
    for module in (local, processes):
        plain = module.part_of
        module.part_of = lambda x, *rest, plain=plain: _Unmoved.of(plain(x, *rest))  # type: ignore[assignment]


class _Unmoved(Tensor):
    """A part of the batch that ``to`` leaves where it is."""

    @staticmethod
    def of(x: Tensor) -> Tensor:
        return x.as_subclass(_Unmoved) if x.device.type == "cpu" and not x.requires_grad else x

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.as_subclass(Tensor)


def _copies_not_awaited() -> None:
    """What comes back from the host is read before it is there."""
    plain = HostCopies._copied

    def copied(self: HostCopies, to: Tensor, *rest: Any) -> Callable[[], Any]:
        kept = plain(self, to, *rest)
        return lambda: (to, kept)[0]

    HostCopies._copied = copied  # type: ignore[method-assign]


FAULTS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        "device index in code": _index_in_code,
        "communicators made at first use": _first_use,
        "one group for all transfers": _one_group,
        "missing wait": _no_wait,
        "freed while under way": _freed,
        "batch not moved": _not_moved,
        "copies not waited for": _copies_not_awaited,
    }
)
