"""Best first: layouts in the order of what they cost at least, until none that is left can be among the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..cost import RankCosts
from ..errors import CompileError
from .estimate import Estimate, estimate
from .layouts import Layout
from .units import Unit

Objective = Literal["time", "memory", "cost"]


@dataclass(frozen=True)
class Rejected:
    """A layout that cannot be used, or that cannot be better than those found, and why."""

    layout: Layout
    reason: str


@dataclass(frozen=True)
class Found:
    """``ranked``: feasible layouts, best first. ``rejected``: the others that were looked at. ``left``: how many were
    never looked at, because they cost at least ``bound`` (or because time ran out: then ``complete`` is False)."""

    ranked: tuple[Estimate, ...]
    rejected: tuple[Rejected, ...]
    left: int
    complete: bool


@dataclass(frozen=True)
class Bounds:
    """What any layout costs at least. ``work``: seconds of the whole batch's forward and backward on one device, without
    communication and at the best efficiency; ``parameters``: bytes of all parameters."""

    work: float
    parameters: int

    def seconds(self, layout: Layout) -> float:
        """No pipeline of p stages and m microbatches ends before ``work / (1 - (1 - 1/m)^p)``: stage s cannot begin
        before the ones before it did one microbatch, and then has m of its own, however work is divided."""
        each = self.work / (layout.dp * layout.ep * layout.cp * layout.tp)
        return each / layout.microbatches / (1 - (1 - 1 / layout.microbatches) ** layout.pp)

    def bytes(self, layout: Layout) -> float:
        """Parameters, gradients and two moments, split as far as anything can be."""
        ways = layout.tp * layout.pp * layout.ep
        for axis in layout.experts:
            ways *= {"dp": layout.dp, "cp": layout.cp}[axis]
        return 4 * self.parameters / ways


def search(
    layouts: Iterable[Layout],
    build: Callable[[Layout], Sequence[Unit]],
    costs: RankCosts,
    bounds: Bounds,
    memory_bytes: float,
    *,
    top_k: int,
    objective: Objective,
    deadline: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Found:
    """Evaluate layouts until the best ``top_k`` are known, or ``deadline`` (of time.monotonic) has come."""
    value = {"time": lambda e: e.seconds, "memory": lambda e: float(e.memory_bytes), "cost": lambda e: e.seconds}[objective]
    rejected: list[Rejected] = []
    order: list[tuple[float, Layout]] = []
    for layout in layouts:
        least = bounds.bytes(layout)
        if least > memory_bytes:
            rejected.append(Rejected(layout, f"state alone takes at least {_gib(least)} of {_gib(memory_bytes)}"))
            continue
        order.append((least if objective == "memory" else bounds.seconds(layout), layout))
    order.sort()
    ranked: list[Estimate] = []
    for position, (bound, layout) in enumerate(order):
        progress(position, len(order))
        if len(ranked) >= top_k and bound > value(ranked[top_k - 1]):
            return Found(tuple(ranked[:top_k]), tuple(rejected), len(order) - position, complete=True)
        if time.monotonic() > deadline:
            return Found(tuple(ranked[:top_k]), tuple(rejected), len(order) - position, complete=False)
        try:
            found = estimate(build(layout), layout, costs)
        except CompileError as error:
            rejected.append(Rejected(layout, f"{error.code} {error.message}"))
            continue
        if found.memory_bytes > memory_bytes:
            rejected.append(Rejected(layout, f"needs {_gib(found.memory_bytes)} of {_gib(memory_bytes)}"))
            continue
        ranked.append(found)
        ranked.sort(key=lambda e: (value(e), e.seconds, e.layout))
    progress(len(order), len(order))
    return Found(tuple(ranked[:top_k]), tuple(rejected), 0, complete=True)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
