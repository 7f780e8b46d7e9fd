"""The space that the planner searches: every way to spread a batch over the devices of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import combinations, product
from math import prod
from typing import Literal, get_args

from ..core.axes import AXES, DataAxis
from ..core.errors import CompileError
from ..core.mesh import Mesh
from ..ir.plan import Plan
from ..schedules.synthesis import check_schedule

UNSPLIT = ("gpipe", "1f1b", "interleaved")  # every backward in one piece
GROUPS = 3  # how many sizes of groups of slices are tried
SLICED = get_args(DataAxis)
Again = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Limits:
    """What a model and a cluster allow. ``ways[axis]``: the sizes that the axis may have; ``units``: how many stages
    there can be at most; ``devices``: how many may be used. ``zero_axes``: over which slices are; None: those that are
    best (:func:`slicings`), also over ranks of some of the ``node``'s devices with copies beyond (0: not so)."""

    devices: tuple[int, ...]
    batch: int
    ways: dict[str, tuple[int, ...]]
    contexts: tuple[str, ...]
    experts: tuple[tuple[str, ...], ...]
    schedules: tuple[str, ...]
    virtual_stages: tuple[int, ...]
    recompute: tuple[Again, ...]
    zero: tuple[int, ...]
    zero_axes: tuple[str, ...] | None
    microbatches: tuple[int, ...]
    units: int
    node: int = 0


@dataclass(frozen=True, order=True)
class Layout:
    """One point of the space. ``rows``: of the batch, that one rank sees in one microbatch."""

    tp: int
    cp: int
    ep: int
    pp: int
    dp: int
    microbatches: int
    rows: int
    context: str
    experts: tuple[str, ...]
    schedule: str
    virtual_stages: int
    recompute: Again
    zero: int
    zero_axes: tuple[str, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Searches ask for it often."""
        return hash(tuple(getattr(self, one.name) for one in fields(self)))

    def size(self, axis: str) -> int:
        """1 for an axis that the planner does not search over, because a layout has no field for it."""
        return int(getattr(self, axis, 1))

    @cached_property
    def mesh(self) -> Mesh:
        sizes = {name: self.size(name) for name in AXES}
        return Mesh(**({name: size for name, size in sizes.items() if size > 1} or {"dp": 1}))

    @property
    def parts(self) -> int:
        """How many things a person has to think of who runs it: axes, and whatever is not plain of the rest."""
        axes = sum(self.size(name) > 1 for name in AXES)
        return axes + (self.pp > 1 and self.schedule != "1f1b") + (self.recompute != "none") + (self.zero in (1, 2))

    @property
    def halves(self) -> bool:
        """Whether the backward is two functions. Where nothing is communicated within functions, their price is the
        same, and it always is."""
        return self.schedule not in UNSPLIT or (self.tp * self.cp * self.ep == 1 and not self.experts)

    @cached_property
    def unsliced(self) -> Layout:
        """The same without slices of parameters."""
        return replace(self, zero=0, zero_axes=("dp",))

    @cached_property
    def sharded(self) -> Layout:
        """The layout for all that have its functions, but for recomputing: ranks of dp, stages and microbatches only
        say how often they run, and slices of parameters are priced beside them."""
        same = replace(self, pp=1, schedule="1f1b", virtual_stages=1, recompute="none", zero=0, zero_axes=("dp",))
        if self.microbatches == 1 or "dp" in self.experts:
            return same
        fewest = min((n for n in divisors(self.dp) if n > 1), default=1)
        return replace(same, dp=fewest, microbatches=self.microbatches * self.dp // fewest)

    @cached_property
    def inside(self) -> Layout:
        """The layout for all that have its functions."""
        return replace(self.sharded, schedule="zb-h1" if self.halves else "1f1b", recompute=self.recompute)

    def decided(self, plan: Plan) -> Plan:
        """``plan`` with this layout's decisions."""
        return plan.changed(
            {
                "mesh": dict(self.mesh.axes),
                "microbatches": self.microbatches,
                "schedule": self.schedule,
                "context": self.context,
                "experts": self.experts,
                "virtual_stages": self.virtual_stages,
                "recompute": self.recompute,
                "zero": self.zero,
                "zero_axes": self.zero_axes,
            }
        )

    def __str__(self) -> str:
        parts = [f"{name}={self.size(name)}" for name in AXES if self.size(name) > 1] or ["1 device"]
        more = [f"{self.microbatches} x {self.rows} rows"]
        more += [self.context] if self.cp > 1 else []
        more += [f"experts over {' and '.join(self.experts)}"] if self.experts else []
        more += [self.schedule] if self.pp > 1 and self.schedule != "1f1b" else []
        more += [f"{self.virtual_stages} stages per rank"] if self.virtual_stages > 1 else []
        more += [f"ZeRO {self.zero}{self._sliced}"] if self.zero else []
        more += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        return " x ".join(parts) + ", " + ", ".join(more)

    @property
    def _sliced(self) -> str:
        """Over what, if not over all ranks that have other data."""
        over = [axis for axis in SLICED if axis in self.zero_axes and self.size(axis) > 1]
        all_of_them = all(axis in over for axis in SLICED if self.size(axis) > 1)
        return "" if all_of_them else f" over {' and '.join(over)}"


def layouts(limits: Limits) -> Iterator[Layout]:
    """Every layout that uses so many devices and the whole batch."""
    for devices in limits.devices:
        yield from _on(devices, limits)


def _on(devices: int, limits: Limits) -> Iterator[Layout]:
    for tp in limits.ways["tp"]:
        for cp in limits.ways["cp"]:
            for ep in limits.ways["ep"]:
                for pp in limits.ways["pp"]:
                    inner = tp * cp * ep * pp
                    if devices % inner or pp > limits.units:
                        continue
                    dp = devices // inner
                    if dp in limits.ways["dp"]:
                        yield from _in_time(limits, tp, cp, ep, pp, dp)


def _in_time(limits: Limits, tp: int, cp: int, ep: int, pp: int, dp: int) -> Iterator[Layout]:
    share, left = divmod(limits.batch, dp * ep)
    if left:
        return
    sizes = {"dp": dp, "cp": cp, "ep": ep}
    given = limits.zero_axes is not None
    over = (
        limits.zero_axes if limits.zero_axes is not None else max(_sliceable(sizes, tp), default=(), key=_most(sizes))
    )
    sliced = any(sizes[axis] > 1 for axis in over)
    for microbatches in limits.microbatches:
        if share % microbatches or (pp > 1 and microbatches < min(pp, share)):
            continue
        for context, experts, (schedule, virtual), recompute, zero in product(
            limits.contexts if cp > 1 else ("all_gather",),
            limits.experts if ep == 1 else ((),),
            _orders(limits, pp),
            limits.recompute,
            limits.zero if sliced else (0,),
        ):
            even = virtual == 1 or microbatches % pp == 0  # rounds of unequal length only wait longer
            if even and all(sizes[axis] > 1 for axis in experts):
                rows = share // microbatches
                yield Layout(
                    tp, cp, ep, pp, dp, microbatches, rows, context, experts, schedule, virtual, recompute, zero,
                    over if given is not None or zero else ("dp",),
                )  # fmt: skip


def slicings(layout: Layout, limits: Limits) -> Iterator[Layout]:
    """``layout``, and all that differ from it only in over which ranks slices of parameters are: over some of the data
    and context axes, or over ranks of 1, 4 or 16 nodes, with copies beyond (hybrid sharding)."""
    yield layout
    if not layout.zero or limits.zero_axes is not None:
        return
    spread = {axis: layout.size(axis) for axis in SLICED}
    for over in _sliceable(spread, layout.tp):
        if over != layout.zero_axes:
            yield replace(layout, zero_axes=over)
    inside, ranks = layout.tp * layout.cp, limits.node
    for _ in range(GROUPS if limits.node and layout.ep == 1 and not layout.experts else 0):
        group, left = divmod(ranks, inside)
        if not left and 1 < group < layout.dp and layout.dp % group == 0:
            both = ("ep", "cp") if layout.cp > 1 and layout.tp == 1 else ("ep",)
            yield replace(layout, dp=layout.dp // group, ep=group, zero_axes=both)
        ranks *= 4


def _sliceable(sizes: Mapping[str, int], tp: int) -> list[tuple[str, ...]]:
    """Axes over which parameters can be sliced together: weights have two dims, of which tp takes one."""
    present = [axis for axis in SLICED if sizes[axis] > 1]
    return [over for count in range(1, 2 if tp > 1 else 3) for over in combinations(present, count)]


def _most(sizes: Mapping[str, int]) -> Callable[[tuple[str, ...]], int]:
    return lambda over: prod(sizes[axis] for axis in over)


def _orders(limits: Limits, pp: int) -> Iterator[tuple[str, int]]:
    """Schedules and stages per rank that go together."""
    if pp == 1:
        yield limits.schedules[0] if len(limits.schedules) == 1 else "1f1b", 1
        return
    for schedule in limits.schedules:
        for virtual in limits.virtual_stages:
            with suppress(CompileError):
                check_schedule(schedule, virtual)
                if virtual * pp <= limits.units:
                    yield schedule, virtual


def divisors(number: int) -> tuple[int, ...]:
    """
    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))
