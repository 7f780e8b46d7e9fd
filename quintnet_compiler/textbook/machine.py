"""The machine of a textbook: equal devices, and links between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from ..core.errors import CompileError, describe_value, finite, whole_number
from ..cost_models.collectives import volume


def _number(name: str, value: Any, *, zero: bool = False) -> None:
    number = finite(value)
    if number is None or number < 0 or (number == 0 and not zero):
        raise _unfit(name, value, f"give a finite number, {'0 or more' if zero else 'above 0'}")


def _unfit(name: str, value: Any, fix: str) -> CompileError:
    return CompileError("QN201", f"{name} is {describe_value(value)}", fix=fix)


@dataclass(frozen=True)
class Link:
    """A message of n bytes takes ``seconds + n / bytes_per_second``: the alpha-beta model.

    Raises:
        CompileError: QN201 for numbers that no link has.
    """

    seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        _number("seconds of a Link", self.seconds, zero=True)
        _number("bytes_per_second of a Link", self.bytes_per_second)

    def time(self, num_bytes: float) -> float:
        return self.seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Machine:
    """``ranks`` devices of ``flops_per_second``. Any two are joined by ``link``, or, where they are in different nodes
    of ``node`` ranks, by ``between``. On a ``"ring"`` only neighbours are joined: a message takes a step for each rank
    on its way, the shorter way around. ``memory_bytes``: of each device.

    Raises:
        CompileError: QN201 for numbers that no machine has.
    """

    ranks: int
    flops_per_second: float = 1e12
    link: Link = Link(1e-6, 1e10)
    between: Link | None = None
    node: int = 0
    topology: Literal["full", "ring"] = "full"
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("node", 0)):
            number = whole_number(getattr(self, name))
            if number is None or number < least or finite(number) is None:
                raise _unfit(f"{name} of a Machine", getattr(self, name), f"give an int, {least} or more")
        _number("flops_per_second of a Machine", self.flops_per_second)
        if not isinstance(self.memory_bytes, float) or self.memory_bytes != math.inf:
            _number("memory_bytes of a Machine", self.memory_bytes)
        for name, link in (("link", self.link), ("between", self.between)):
            if not isinstance(link, Link) and (link is not None or name == "link"):
                raise _unfit(f"{name} of a Machine", link, "give textbook.Link(1e-6, 1e10): seconds, bytes per second")
        if not isinstance(self.topology, str) or self.topology not in ("full", "ring"):
            raise _unfit("topology of a Machine", self.topology, 'use "full" or "ring"')

    def joins(self, rank: int, other: int) -> Link:
        """Return the link that a message between two ranks takes."""
        link = self.link
        if self.between is not None and self.node and rank // self.node != other // self.node:
            link = self.between
        if self.topology == "ring":
            apart = abs(rank - other)
            hops = min(apart, self.ranks - apart)
            return Link(link.seconds * hops, link.bytes_per_second / max(hops, 1))
        return link

    def collective_seconds(self, kind: str, num_bytes: float, over: Sequence[int]) -> float:
        """Along a ring through ``over``, as fast as its slowest link: an all-reduce is 2 (n-1) steps of 1/n of the
        bytes; gathers and scatters are n-1 of them (Thakur, Rabenseifner and Gropp 2005).

        Raises:
            CompileError: QN210 for a collective that does not exist.
        """
        count = len(over)
        moved = volume(kind, num_bytes, count)
        if count == 1:
            return 0.0
        ring = [self.joins(a, b) for a, b in pairwise([*over, over[0]])]
        steps = 2 * (count - 1) if kind == "all_reduce" else count - 1
        slowest = min(link.bytes_per_second for link in ring)
        return steps * max(link.seconds for link in ring) + moved / slowest
