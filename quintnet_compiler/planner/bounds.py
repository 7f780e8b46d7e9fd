"""Lower bounds of a layout's time and memory, from layouts that split the model less.

No split makes work cheaper, or smaller, than its share of the unsplit work.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import log, prod
from types import MappingProxyType

from ..core.errors import CompileError
from ..ir.cost_protocol import RankCosts
from ..ir.plans.host_state import HostState
from ..simulation.host_update import MOMENTS
from .estimate import LowerBound, RankBound
from .layouts import Layout, RecomputeMode
from .pipeline import least_seconds, min_saved
from .places import placement
from .stage_units import StageUnit
from .stages import Slices, StageBounds, cut_units, stage_bounds

# Factors that keep the bounds valid, below the exact result.
SPLIT_FACTOR = 0.95  # of a split model: stages are cut elsewhere, and a few values are saved only where they are whole
TIME_FACTOR = 0.99  # of time where stages share all work evenly, as no cut does better
STEPS = range(6)  # of closer bounds, see LayoutBounds.closer_seconds
TWIN_STEP, LAST_STEP = STEPS[-2:]
MAX_PRICED_ROWS = 8  # rows of the largest small microbatch that is priced
NO_LAYOUTS: Mapping[Layout, None] = MappingProxyType({})


@dataclass(frozen=True)
class DeviceState:
    """The least numbers that devices store for each element of a parameter."""

    parameters: int = 1
    gradients: int = 1
    moments: int = MOMENTS

    @classmethod
    def excluding(cls, host: HostState) -> DeviceState:
        """Return what devices store without what hosts hold."""
        if host.parameters:
            return cls(0, 0, 0)
        return cls(moments=0) if host.optimizer else cls()


class LayoutBounds:
    """Bounds for :func:`.search.search_layouts`.

    Attributes:
        build: returns the units of a layout.
        costs: prices of collectives and of the host.
        parameters: bytes of all parameters.
        routed: bytes that a batch sends to experts and receives from them.
        batch: rows of the global batch.
        slowdown: see :class:`.places.Slowdown`; with it, stages may have any number of units.
        experts: bytes of the experts' parameters.
        slicings: returns the ways in which a layout may slice its parameters.
        known_functions: layouts whose functions are compiled; it grows during the search.
        device_state: what devices store for a parameter.
    """

    def __init__(
        self, build: Callable[[Layout], Sequence[StageUnit]], costs: RankCosts, parameters: int, routed: int,
        batch: int, slowdown: Callable[[Layout, int], float] | None = None, experts: int = 0,
        slicings: Callable[[Layout], Iterable[Layout]] = lambda layout: (layout,),
        known_functions: Mapping[Layout, None] = NO_LAYOUTS, *, device_state: DeviceState = DeviceState(),
    ) -> None:  # fmt: skip
        self.build, self.costs, self.parameters, self.routed, self.batch = build, costs, parameters, routed, batch
        self.slowdown, self.experts, self.slicings = slowdown, experts, slicings
        self.known_functions, self.device_state = known_functions, device_state
        self.reported = 0  # known functions that new_functions has returned
        self.closer_bounds: dict[tuple[Layout, int], LowerBound] = {}
        self.lower_bounds: dict[Hashable, LowerBound] = {}
        self.stage_bounds: dict[Hashable, StageBounds] = {}
        self.collective_seconds: dict[Hashable, float] = {}
        self.overhead_rows: dict[int, float] = {}
        self.widest: dict[Hashable, Layout] = {}
        self.compiled: set[Layout] = set()  # of the widest

    @property
    def steps(self) -> int:
        """Return the number of closer bounds."""
        return len(STEPS)

    def narrow(self, layouts: Iterable[Layout]) -> None:
        """Restrict the bounds to ``layouts``: they may use the most rows that one of these has in a microbatch."""
        for layout in {layout.unsliced: None for layout in layouts}:
            for step in STEPS[2:TWIN_STEP]:
                functions = self._less_split(layout, step)
                key = self._split_key(functions)
                if key not in self.widest or _bounding_rank(functions) > _bounding_rank(self.widest[key]):
                    self.widest[key] = functions

    def similarity(self, layout: Layout) -> tuple[Hashable, ...]:
        """Return keys of layouts with the same pipeline and functions, the same functions, and the same split.

        The split counts with and without what is recomputed. A model in one stage resembles no pipeline: it holds one
        microbatch, and nothing waits.
        """
        experts = layout.experts, layout.dp if layout.experts else 0
        split = layout.tp, layout.cp, layout.ep, layout.context, *experts, layout.pp == 1
        build = *split, layout.recompute, layout.rows
        pipeline = layout.schedule, layout.virtual_stages, layout.microbatches / layout.pp
        return (*build, *pipeline), build, (*split, layout.recompute), split

    def functions(self, layout: Layout) -> Layout:
        """Return the layout that stands for all with the same functions."""
        return layout.inside

    def new_functions(self) -> Sequence[Layout]:
        """Return the functions that became known since the previous call."""
        functions = list(islice(self.known_functions, self.reported, None))
        self.reported += len(functions)
        return functions

    def seconds(self, layout: Layout) -> float:
        """Return a bound from the unsplit model's share in as many stages, and from what slices of its state move."""
        share = self._unsplit_bound(layout).seconds / (layout.tp * layout.cp)
        return self._combined(share, TIME_FACTOR * self._slicing_seconds(layout))

    def closer_seconds(self, layout: Layout, step: int) -> float:
        """Return a bound from a model that is split like ``layout``, with the communication of its splits.

        It has as many rows in a microbatch as any layout with these splits, so that one compilation bounds them all.
        The steps: without cp and recomputing (which costs only time); without recomputing, if that was compiled;
        without cp; with both; with the rows of ``layout``, from the functions of its twin (see :func:`_twin`), if these
        were compiled; and last from its own functions.
        """
        seconds = self._closer_bound(layout, step).seconds
        return self._combined(seconds, TIME_FACTOR * self._slicing_seconds(layout))

    def _combined(self, work: float, communication: float) -> float:
        """Return the least seconds of both, which overlap where the device can do that."""
        return max(work, communication) if self.costs.overlaps else work + communication

    def bytes(self, layout: Layout) -> float:
        """Return a bound from the state, and the unsplit model's share of saved values and temporary memory."""
        bound = self._unsplit_bound(layout)
        gathered = bound.block_bytes * layout.pp / self._parameter_parts(layout) if layout.zero == 3 else 0.0
        return bound.over_ranks(layout.tp * layout.cp).fullest_rank_bytes(*self.state(layout)) + gathered

    def closer_bytes(self, layout: Layout, step: int) -> float:
        """Return a bound from the state, and saved values and temporary memory of a model split like ``layout``."""
        if step < 2 and layout.recompute != "none":  # it takes less memory than what these steps bound
            return self.bytes(layout)
        bound = self._closer_bound(layout, step)
        return bound.fullest_rank_bytes(*self.state(layout)) + (bound.block_bytes if layout.zero == 3 else 0.0)

    def rough_seconds(self, layout: Layout) -> float:
        """Return a rough step time: the bound, corrected for few rows, and the communication of splits.

        In every pass a block's input is reduced over tp and gathered over cp twice, and the rows of experts are sent
        and returned once.
        """
        if not self._unsplit_bound(layout).seconds:
            return 0.0
        over = layout.experts or ("ep",)
        ranks = prod(layout.size(axis) for axis in over) if self.routed else 1
        size = sum(unit.received for unit in self.build(self._whole(layout.recompute)) if unit.begin)
        moved = 2 * self._group_seconds("all_reduce", size, layout, ("tp",))
        moved += 2 * self._group_seconds("all_gather", size, layout, ("cp",))
        # sizes are those of all ranks together; rows travel whole, or in slices that are gathered over tp
        slices = ranks * self._group_seconds("all_to_all", self.routed // layout.tp, layout, over)
        slices += self._group_seconds("all_gather", self.routed, layout, ("tp",))
        moved += min(ranks * self._group_seconds("all_to_all", self.routed, layout, over), slices)
        passes = (3 if layout.recompute == "full" else 2) * layout.microbatches / layout.pp
        factor = self._few_rows_factor(layout.rows * ranks / layout.tp)  # rows of an expert, in equal shares
        return factor * self.seconds(layout) + passes * layout.rows / (self.batch * layout.cp) * moved

    def _few_rows_factor(self, rows: float) -> float:
        """Return how much more a row costs in a microbatch of ``rows`` than in the whole batch.

        The fixed time of kernels is spread over the rows. Less than one row counts as one.
        """
        rows = max(rows, 1.0)
        low, high, most = self._overhead_rows(1), self._overhead_rows(self.small_rows), self.small_rows
        overhead = low + (min(1.0, log(rows) / log(most)) * (high - low) if most > 1 else 0.0)
        return 1 + overhead / rows

    def _overhead_rows(self, rows: int) -> float:
        """Return the fixed time of kernels in a microbatch of ``rows``, in rows that take as long."""
        if rows not in self.overhead_rows:
            whole = self._whole("none").sharded
            small = _twin(replace(whole, rows=rows, microbatches=self.batch // rows))
            self.overhead_rows[rows] = 0.0
            with suppress(CompileError):
                row_of_whole, row_of_small = (
                    sum(unit.seconds for unit in self.build(layout)) / layout.rows for layout in (whole, small)
                )
                self.overhead_rows[rows] = rows * max(0.0, row_of_small / row_of_whole - 1)
        return self.overhead_rows[rows]

    @cached_property
    def small_rows(self) -> int:
        """Return the rows of the small microbatch that is priced besides a single row.

        The most that an unsplit model has, up to :data:`MAX_PRICED_ROWS`: other layouts share its functions.
        """
        widest = self.widest.get(self._split_key(self._whole("none")))
        if widest and widest.rows <= MAX_PRICED_ROWS:
            return widest.rows
        return next(n for n in range(MAX_PRICED_ROWS, 0, -1) if self.batch % n == 0)

    def _group_seconds(self, name: str, size: float, layout: Layout, over: tuple[str, ...]) -> float:
        """Return the seconds of a collective of all bytes at once, so that the latency of calls does not count."""
        over = tuple(axis for axis in over if layout.size(axis) > 1)
        if not over or not size:
            return 0.0
        key = name, size, over, layout.dp, layout.ep, layout.cp, layout.tp
        if key not in self.collective_seconds:
            self.collective_seconds[key] = self.costs.group_seconds(name, size, layout.mesh.peers(0, over))
        return self.collective_seconds[key]

    def _parameter_parts(self, layout: Layout) -> int:
        """Return the most parts in which parameters can be, without ZeRO."""
        spread = layout.ep * prod(layout.size(axis) for axis in layout.experts) if self.experts else 1
        return layout.tp * layout.pp * spread

    def state(self, layout: Layout) -> tuple[float, float]:
        """Return bytes of parameters and moments, and of gradients, split as far as anything can be."""
        expert_axes = {"ep", *layout.experts}
        expert_parts = prod(layout.size(axis) for axis in expert_axes)

        def slice_share(zero: int, *others: str) -> float:
            slices = prod(layout.size(axis) for axis in layout.zero_axes if axis not in others)
            return 1 / (slices if layout.zero >= zero else 1)

        def sliced_bytes(zero: int) -> float:
            """Return bytes of one number for each element of the parameters, which this stage of ZeRO slices."""
            dense = (self.parameters - self.experts) * slice_share(zero)
            return (dense + self.experts * slice_share(zero, *expert_axes) / expert_parts) / (layout.tp * layout.pp)

        stored = self.device_state
        state = stored.parameters * sliced_bytes(3) + stored.moments * sliced_bytes(1)
        return state, stored.gradients * sliced_bytes(2)

    def _slicing_seconds(self, layout: Layout) -> float:
        """Return seconds of a step's reduce-scatters and all-gathers of slices, over the ranks that are fastest."""
        if layout.zero < 2:
            return 0.0
        size = self.parameters // self._parameter_parts(layout)
        return layout.microbatches * min(self._microbatch_slicing_seconds(size, way) for way in self.slicings(layout))

    def _microbatch_slicing_seconds(self, size: int, layout: Layout) -> float:
        over = tuple(axis for axis in layout.zero_axes if not self.experts or axis not in ("ep", *layout.experts))
        scatter, gather = (self._group_seconds(name, size, layout, over) for name in ("reduce_scatter", "all_gather"))
        return scatter + (2 * gather if layout.zero == 3 else 0.0)

    def _whole(self, recompute: RecomputeMode) -> Layout:
        """Return the layout with the whole batch at once on each stage: more rows never cost more per row."""
        return Layout(1, 1, 1, 1, 1, 1, self.batch, "all_gather", (), "1f1b", 1, recompute, 0, ())

    def _unsplit_bound(self, layout: Layout) -> LowerBound:
        key = layout.recompute, *self._pipeline_key(layout)
        return self._cached_bound(key, replace(self._whole(layout.recompute), pp=layout.pp), layout)

    def _closer_bound(self, layout: Layout, step: int) -> LowerBound:
        """Return the bound of a step, see :meth:`closer_seconds`; zeros where there is none.

        It is the same for all layouts that differ only in how they slice parameters.
        """
        key = layout.unsliced, step
        if key in self.closer_bounds:
            return self.closer_bounds[key]
        less = self._less_split(layout, step)
        if step == TWIN_STEP and not self._twin_bounds(less, layout):
            return LowerBound()
        if step < TWIN_STEP:
            less = self._with_most_rows(less)
            if less.rows < layout.rows or (step == 1 and less.inside not in self.compiled):
                return LowerBound()
            self.compiled.add(less.inside)
        bound = self._cached_bound((less.inside, *self._pipeline_key(layout)), less, layout)
        self.closer_bounds[key] = bound if less.cp == layout.cp else bound.over_ranks(layout.cp)
        return self.closer_bounds[key]

    @staticmethod
    def _less_split(layout: Layout, step: int) -> Layout:
        """Return the layout whose functions bound ``layout`` in a step.

        Backwards are one function in all steps but the last two: then more communication overlaps.
        """
        if step == LAST_STEP:
            return layout.unsliced
        if step == TWIN_STEP:
            return _twin(layout.unsliced)
        recompute = layout.recompute if step >= 2 else "none"
        same_split = replace(layout.unsliced, schedule="1f1b", virtual_stages=1, recompute=recompute)
        if step in (1, 3):
            return same_split
        experts = tuple(axis for axis in layout.experts if axis != "cp")
        return replace(same_split, cp=1, context="all_gather", experts=experts)

    def _twin_bounds(self, twin: Layout, layout: Layout) -> bool:
        """Return whether the functions of the twin are known, and bound those of ``layout``.

        They may only communicate over two data ranks where those do so over as many or more.
        """
        if twin == layout.unsliced or twin.inside not in self.known_functions:
            return False
        with suppress(CompileError):
            return layout.dp > 1 or not any(unit.communication.get("dp") for unit in self.build(twin))
        return False

    @staticmethod
    def _split_key(layout: Layout) -> Hashable:
        dp = layout.dp if "dp" in layout.experts else 0
        return layout.tp, layout.cp, layout.ep, layout.context, layout.experts, dp, layout.recompute

    def _with_most_rows(self, layout: Layout) -> Layout:
        """Return ``layout`` with as many rows in a microbatch as any layout with its splits, or the whole batch."""
        widest = self.widest.get(self._split_key(layout))
        if widest is None:
            dp = layout.dp if "dp" in layout.experts else 1
            return replace(layout, dp=dp, microbatches=1, rows=self.batch // (dp * layout.ep))
        return replace(layout, dp=widest.dp, microbatches=widest.microbatches, rows=widest.rows)

    @staticmethod
    def _pipeline_key(layout: Layout) -> tuple[Hashable, ...]:
        return layout.pp, layout.schedule, layout.virtual_stages, layout.microbatches, layout.rows

    def _cached_bound(self, key: Hashable, less: Layout, layout: Layout) -> LowerBound:
        """Return the bound of ``layout`` from the functions of ``less``; zeros where these cannot be compiled."""
        if key not in self.lower_bounds:
            self.lower_bounds[key] = LowerBound()
            with suppress(CompileError):
                self.lower_bounds[key] = self._lower_bound(less, layout)
        return self.lower_bounds[key]

    def _lower_bound(self, less: Layout, layout: Layout) -> LowerBound:
        """Return the share of ``layout`` in what stages of ``less`` cost, which has more rows or is split less."""
        stages, pipeline = self._stages(less, layout), (layout.schedule, layout.pp, layout.microbatches)
        is_exact = less in (layout.unsliced, _twin(layout.unsliced)) and not self.slowdown  # cut in the same places
        memory_factor, time_factor = (1.0, 1.0) if is_exact else (SPLIT_FACTOR, TIME_FACTOR)
        even = layout.microbatches * sum(stage.seconds for stage in stages.work) / layout.pp
        seconds = max(time_factor * even, memory_factor * least_seconds(*pipeline, stages.work))
        if self.slowdown:
            devices = sum(unit.forward + unit.backward for unit in self.build(less))  # the slowdown is without hosts
            even = layout.microbatches * devices / layout.pp
            seconds = max(seconds, SPLIT_FACTOR * even * self.slowdown(less, layout.pp))
        share = layout.rows / less.rows
        memory_share = memory_factor * share
        ranks = self._rank_bounds(stages, layout, is_exact)
        working = stages.working_bytes + min(2, layout.microbatches) * stages.message_bytes
        return LowerBound(
            share * seconds, memory_share * working, memory_factor * stages.block_bytes,
            tuple(replace(rank, saved_bytes=memory_share * rank.saved_bytes) for rank in ranks),
        )  # fmt: skip

    def _rank_bounds(self, stages: StageBounds, layout: Layout, is_exact: bool) -> list[RankBound]:
        """Return bounds of the mean over ranks, and of each rank where stages have about the same units."""
        saved = min_saved(layout.schedule, layout.pp, layout.microbatches, stages.work)
        # a rank that holds all microbatches at once, and whose backwards are one function each
        saves_first = [
            layout.has_whole_backwards and size >= layout.microbatches * stage.saved
            for size, stage in zip(saved, stages.work, strict=False)
        ]
        if self.slowdown:
            mean = sum(stage.saved for stage in stages.work) / len(stages.work)
            return [RankBound(mean, 1.0, any(saves_first))]
        shares = stages.parameter_shares
        if not is_exact:
            shares = [min(1.0, SPLIT_FACTOR * share) for share in shares]
        mean_bound = RankBound(sum(saved) / layout.pp, 1.0, any(saves_first))  # wherever stages are cut
        return [mean_bound, *map(RankBound, saved, shares, saves_first)]

    def _stages(self, less: Layout, layout: Layout) -> StageBounds:
        """Return the bounds of the functions of ``less`` in the stages of ``layout``."""
        less = replace(less, pp=layout.pp, virtual_stages=layout.virtual_stages)
        units = self.build(less)
        less = replace(less, schedule=layout.schedule)
        key = less.inside, *placement(less), id(units)
        if key not in self.stage_bounds:
            self.stage_bounds[key] = stage_bounds(
                cut_units(units, less, self.costs), Slices(less, self.costs, less.mesh), min if self.slowdown else max
            )
        return self.stage_bounds[key]


def _twin(layout: Layout) -> Layout:
    """Return a layout with as many rows in a microbatch on two data ranks, whose functions most layouts share.

    They differ from those of ``layout`` in the communication over data ranks alone. Without such a layout, return
    ``layout`` itself.
    """
    rank_microbatches = layout.dp * layout.microbatches
    if "dp" in layout.experts or rank_microbatches % 2 or rank_microbatches < 4:
        return layout
    return replace(layout, dp=2, microbatches=rank_microbatches // 2)


def _bounding_rank(functions: Layout) -> tuple[int, bool]:
    """Return a key that is larger for functions that bound more layouts: those of more rows, and shared by many."""
    return functions.rows, functions.dp > 1 < functions.microbatches
