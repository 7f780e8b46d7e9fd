"""The search space of the planner: every way to spread a batch over the devices of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

UNSPLIT = ("gpipe", "1f1b", "interleaved")  # schedules whose backwards are one function each
HYBRID_GROUP_NODES = (1, 4, 16)  # sizes of the groups of ranks that are tried for hybrid sharding
SLICING_AXES = get_args(DataAxis)
RecomputeMode = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Limits:
    """The choices that a model, a cluster and a pinned plan leave.

    Attributes:
        devices: numbers of devices that may be used.
        batch: rows of the global batch.
        axis_sizes: the sizes that each axis may have.
        contexts: modes of context parallelism.
        experts: further axes over which experts are spread.
        schedules: pipeline schedules.
        virtual_stages: numbers of stages per rank.
        recompute: recompute modes.
        zero: stages of ZeRO.
        zero_axes: the axes over which state is sliced; None: the best ones (:func:`slicings`).
        microbatches: numbers of microbatches.
        units: the largest number of stages.
        node: devices of a node, for hybrid sharding; 0 without it.
    """

    devices: tuple[int, ...]
    batch: int
    axis_sizes: dict[str, tuple[int, ...]]
    contexts: tuple[str, ...]
    experts: tuple[tuple[str, ...], ...]
    schedules: tuple[str, ...]
    virtual_stages: tuple[int, ...]
    recompute: tuple[RecomputeMode, ...]
    zero: tuple[int, ...]
    zero_axes: tuple[str, ...] | None
    microbatches: tuple[int, ...]
    units: int
    node: int = 0


@dataclass(frozen=True, order=True)
class Layout:
    """One point of the search space. ``rows``: of the batch, that one rank sees in one microbatch."""

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
    recompute: RecomputeMode
    zero: int
    zero_axes: tuple[str, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Return the hash, which searches ask for often."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def size(self, axis: str) -> int:
        """Return the size of an axis; 1 for one that the planner does not search over, which has no field."""
        return int(getattr(self, axis, 1))

    @cached_property
    def mesh(self) -> Mesh:
        """Return the mesh of the axes with more than one rank."""
        sizes = {name: self.size(name) for name in AXES}
        return Mesh(**({name: size for name, size in sizes.items() if size > 1} or {"dp": 1}))

    @property
    def complexity(self) -> int:
        """Return the number of non-default choices."""
        axes = sum(self.size(name) > 1 for name in AXES)
        return axes + (self.pp > 1 and self.schedule != "1f1b") + (self.recompute != "none") + (self.zero in (1, 2))

    @property
    def halves(self) -> bool:
        """Return whether the backward is priced as two functions.

        Without communication inside functions the two cost as much as one, so that it always is.
        """
        return self.schedule not in UNSPLIT or (self.tp * self.cp * self.ep == 1 and not self.experts)

    @property
    def has_whole_backwards(self) -> bool:
        """Return whether the backward of a rank is one function."""
        return self.virtual_stages == 1 and self.schedule in UNSPLIT

    @cached_property
    def unsliced(self) -> Layout:
        """Return the layout without ZeRO."""
        return replace(self, zero=0, zero_axes=("dp",))

    @cached_property
    def sharded(self) -> Layout:
        """Return the layout that stands for all with the same functions before recomputing.

        Data ranks, stages and microbatches only change how often functions run; ZeRO is priced separately.
        """
        same = replace(self, pp=1, schedule="1f1b", virtual_stages=1, recompute="none", zero=0, zero_axes=("dp",))
        if self.microbatches == 1 or "dp" in self.experts:
            return same
        fewest = min((n for n in divisors(self.dp) if n > 1), default=1)
        return replace(same, dp=fewest, microbatches=self.microbatches * self.dp // fewest)

    @cached_property
    def inside(self) -> Layout:
        """Return the layout that stands for all with the same functions."""
        return replace(self.sharded, schedule="zb-h1" if self.halves else "1f1b", recompute=self.recompute)

    def decided(self, plan: Plan) -> Plan:
        """Return ``plan`` with this layout's decisions."""
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
        """Return the axes of slices as text; nothing if they are all data axes."""
        axes = [axis for axis in SLICING_AXES if self.size(axis) > 1]
        over = [axis for axis in axes if axis in self.zero_axes]
        return "" if over == axes else f" over {' and '.join(over)}"


def layouts(limits: Limits) -> Iterator[Layout]:
    """Yield every layout that uses an allowed number of devices and the whole batch."""
    for devices in limits.devices:
        yield from _layouts_on(devices, limits)


def _layouts_on(devices: int, limits: Limits) -> Iterator[Layout]:
    sizes = limits.axis_sizes
    for tp, cp, ep, pp in product(sizes["tp"], sizes["cp"], sizes["ep"], sizes["pp"]):
        inner = tp * cp * ep * pp
        if devices % inner or pp > limits.units:
            continue
        dp = devices // inner
        if dp in sizes["dp"]:
            yield from _layouts_of_mesh(limits, tp, cp, ep, pp, dp)


def _layouts_of_mesh(limits: Limits, tp: int, cp: int, ep: int, pp: int, dp: int) -> Iterator[Layout]:
    rank_rows, remainder = divmod(limits.batch, dp * ep)
    if remainder:
        return
    sizes = {"dp": dp, "cp": cp, "ep": ep}
    zero_axes = _largest_slicing(sizes, tp) if limits.zero_axes is None else limits.zero_axes
    is_sliced = prod(sizes[axis] for axis in zero_axes) > 1
    for microbatches in limits.microbatches:
        fills_pipeline = pp == 1 or microbatches >= min(pp, rank_rows)
        if rank_rows % microbatches or not fills_pipeline:
            continue
        for context, experts, (schedule, virtual), recompute, zero in product(
            limits.contexts if cp > 1 else ("all_gather",),
            _expert_axes(limits, sizes),
            _schedules(limits, pp),
            limits.recompute,
            limits.zero if is_sliced else (0,),
        ):
            if virtual == 1 or microbatches % pp == 0:  # rounds of unequal length only wait longer
                rows = rank_rows // microbatches
                yield Layout(
                    tp, cp, ep, pp, dp, microbatches, rows, context, experts, schedule, virtual, recompute, zero,
                    zero_axes,
                )  # fmt: skip


def _expert_axes(limits: Limits, sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    choices = limits.experts if sizes["ep"] == 1 else ((),)
    return [axes for axes in choices if all(sizes[axis] > 1 for axis in axes)]


def slicings(layout: Layout, limits: Limits) -> Iterator[Layout]:
    """Yield ``layout``, and those that differ only in the ranks over which state is sliced.

    These are some of the data and context axes, or the ranks of 1, 4 or 16 nodes (hybrid sharding).
    """
    yield layout
    if not layout.zero or limits.zero_axes is not None:
        return
    sizes = {axis: layout.size(axis) for axis in SLICING_AXES}
    for zero_axes in _slicing_axes(sizes, layout.tp):
        if zero_axes != layout.zero_axes:
            yield replace(layout, zero_axes=zero_axes)
    if limits.node and layout.ep == 1 and not layout.experts:
        yield from _hybrid_slicings(layout, limits.node)


def _hybrid_slicings(layout: Layout, node: int) -> Iterator[Layout]:
    for nodes in HYBRID_GROUP_NODES:
        group, remainder = divmod(node * nodes, layout.tp * layout.cp)
        if not remainder and 1 < group < layout.dp and layout.dp % group == 0:
            zero_axes = ("ep", "cp") if layout.cp > 1 and layout.tp == 1 else ("ep",)
            yield replace(layout, dp=layout.dp // group, ep=group, zero_axes=zero_axes)


def _slicing_axes(sizes: Mapping[str, int], tp: int) -> list[tuple[str, ...]]:
    """Return the sets of axes over which parameters can be sliced: weights have two dims, of which tp takes one."""
    present = [axis for axis in SLICING_AXES if sizes[axis] > 1]
    return [axes for count in range(1, 2 if tp > 1 else 3) for axes in combinations(present, count)]


def _largest_slicing(sizes: Mapping[str, int], tp: int) -> tuple[str, ...]:
    """Return the axes that slice parameters the finest."""
    return max(_slicing_axes(sizes, tp), default=(), key=lambda axes: prod(sizes[axis] for axis in axes))


def _schedules(limits: Limits, pp: int) -> Iterator[tuple[str, int]]:
    """Yield schedules with numbers of stages per rank that they have."""
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
    """Return the divisors of a number, in ascending order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))
