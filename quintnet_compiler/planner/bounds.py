"""What a layout of a model costs at least, from layouts that split it less: no split makes work cheaper, or smaller,
than its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from math import log, prod
from types import MappingProxyType

from ..core.errors import CompileError
from ..ir.cost_protocol import RankCosts
from ..ir.plan import Offloaded
from ..simulation.host_update import MOMENTS
from .layouts import UNSPLIT, Again, Layout
from .pipeline import StageWork, least_seconds, min_saved
from .places import placement
from .stage_units import StageUnit
from .stages import Slices, Stages, cut, held_by, stage_work

# What of its share a split model may lack. SLACK: stages are cut elsewhere, and a few values are saved only where they
# are whole. NEAR: of time, where stages share all work evenly, as no cut does better.
SLACK, NEAR = 0.95, 0.99
STEPS = range(6)  # of closer bounds
TWIN, LAST = STEPS[-2:]
FEW = 8  # rows of a microbatch that are priced at most; what they cost more than their share, others cost, too
NOTHING: Mapping[Layout, None] = MappingProxyType({})


@dataclass(frozen=True)
class Least:
    """Seconds of a step; bytes that every rank works with, and of a block's parameters. ``ranks``: of some, the bytes
    that one saves, its share of the state, in times of the mean, and whether it may save all that before it has sums of
    gradients; the fullest holds no less than any."""

    seconds: float = 0.0
    working: float = 0.0
    block: float = 0.0
    ranks: tuple[tuple[float, float, bool], ...] = ()

    def parts(self, number: int) -> Least:
        """Of a model that is split over so many more ranks."""
        ranks = tuple((saved / number, share, early) for saved, share, early in self.ranks)
        return Least(self.seconds / number, self.working / number, self.block / number, ranks)

    def bytes(self, state: float, sums: float) -> float:
        """Of the fullest rank, where a rank holds ``state`` on average, and ``sums`` of gradients beside."""
        found = (
            share * state + (max(saved, share * sums) if early else saved + share * sums)
            for saved, share, early in self.ranks
        )
        return self.working + max(found, default=state + sums)


@dataclass(frozen=True)
class StagesLeast:
    """What stages do, and the least that any has of what it works with, of its largest block's parameters, and of
    messages that it gets and sends. ``shares``: of the parameters, that each place has, in times of the mean."""

    work: list[StageWork]
    working: float
    block: float
    sent: float
    shares: list[float]


@dataclass(frozen=True)
class Kept:
    """How many numbers a device stores for each element of a parameter, at least."""

    parameters: int = 1
    gradients: int = 1
    moments: int = MOMENTS

    @classmethod
    def on_devices(cls, offload: tuple[Offloaded, ...]) -> Kept:
        """What is not on hosts."""
        if "parameters" in offload:
            return cls(0, 0, 0)
        return cls(moments=0) if "optimizer" in offload else cls()


class LessSplit:
    """Bounds for :func:`.search.search`. ``parameters``: bytes of all of them, ``experts``: of those of experts;
    ``routed``: bytes of what a batch sends to experts and gets back; ``ways``: how else a layout may slice its
    parameters; ``learned``: functions that were compiled, as it grows; ``kept``: what devices store;
    ``slower``: see :class:`.places.Slowdown`; then stages may have any number of units."""

    def __init__(
        self, build: Callable[[Layout], Sequence[StageUnit]], costs: RankCosts, parameters: int, routed: int,
        batch: int, slower: Callable[[Layout, int], float] | None = None, experts: int = 0,
        ways: Callable[[Layout], Iterable[Layout]] = lambda layout: (layout,),
        learned: Mapping[Layout, None] = NOTHING, *, kept: Kept = Kept(),
    ) -> None:  # fmt: skip
        self.slower = slower
        self.build, self.costs, self.parameters, self.routed, self.batch = build, costs, parameters, routed, batch
        self.experts, self.ways, self.learned, self.kept = experts, ways, learned, kept
        self.told = 0  # of what was learned
        self.nearest: dict[tuple[Layout, int], Least] = {}
        self.least: dict[Hashable, Least] = {}
        self.stages: dict[Hashable, StagesLeast] = {}
        self.moved: dict[Hashable, float] = {}
        self.more: dict[int, float] = {}
        self.widest: dict[Hashable, Layout] = {}
        self.compiled: set[Layout] = set()  # of the widest

    @property
    def steps(self) -> int:
        return len(STEPS)

    def narrow(self, layouts: Iterable[Layout]) -> None:
        """Bounds need only be true of these from now on: rows that no layout has in one microbatch bound none."""
        for layout in {layout.unsliced: None for layout in layouts}:
            for step in STEPS[2:TWIN]:
                key = self._kind(found := self._functions(layout, step))
                if key not in self.widest or _useful(found) > _useful(self.widest[key]):
                    self.widest[key] = found

    def alike(self, layout: Layout) -> tuple[Hashable, ...]:
        """One pipeline of one build, as deep as it may be; one build; one split; that whatever is computed again. A
        model in one stage is like no pipeline: it holds one microbatch, and nothing waits."""
        split = self._split_of(layout)
        build = *split, layout.recompute, layout.rows
        pipeline = layout.schedule, layout.virtual_stages, layout.microbatches / layout.pp
        return (*build, *pipeline), build, (*split, layout.recompute), split

    def functions(self, layout: Layout) -> Layout:
        return layout.inside

    def news(self) -> Sequence[Layout]:
        found = list(islice(self.learned, self.told, None))
        self.told += len(found)
        return found

    @staticmethod
    def _split_of(layout: Layout) -> tuple[Hashable, ...]:
        experts = layout.experts, layout.dp if layout.experts else 0
        return layout.tp, layout.cp, layout.ep, layout.context, *experts, layout.pp == 1

    def seconds(self, layout: Layout) -> float:
        """The unsplit model's share, in as many stages, and what slices of its state move."""
        return self._with(self._unsplit(layout).seconds / (layout.tp * layout.cp), NEAR * self._sliced(layout))

    def closer(self, layout: Layout, step: int) -> float:
        """The share of the model that is split as it is, with the communication of splits, in as many rows as any
        layout with these splits has: one compilation bounds all of them. First without cp and without recomputing,
        which costs only time; then without recomputing, if that was compiled; without cp; as it is; then with the rows
        of ``layout``, from the functions of its twin, if these were compiled; and last from its own."""
        return self._with(self._nearer(layout, step).seconds, NEAR * self._sliced(layout))

    def _with(self, work: float, moved: float) -> float:
        """At least, if the two may run beside each other."""
        return max(work, moved) if self.costs.overlaps else work + moved

    def bytes(self, layout: Layout) -> float:
        """The state, and the unsplit model's share of what is saved and worked with."""
        found, parts = self._unsplit(layout), layout.tp * layout.cp
        whole = found.block * layout.pp / self._split(layout) if layout.zero == 3 else 0.0
        return found.parts(parts).bytes(*self.state(layout)) + whole

    def closer_bytes(self, layout: Layout, step: int) -> float:
        """The state, and the share of what is saved and worked with by the model that is split as it is."""
        if step < 2 and layout.recompute != "none":  # which takes less memory
            return self.bytes(layout)
        found = self._nearer(layout, step)
        return found.bytes(*self.state(layout)) + (found.block if layout.zero == 3 else 0.0)

    def guess(self, layout: Layout) -> float:
        """With what splits move, roughly: a block's input, added up over tp and gathered over cp twice, and the rows of
        experts once, there and back, in every pass. And with what few rows cost more than their share of many."""
        if not self._unsplit(layout).seconds:
            return 0.0
        over = layout.experts or ("ep",)
        ranks = prod(layout.size(axis) for axis in over) if self.routed else 1
        size = sum(unit.received for unit in self.build(self._whole(layout.recompute)) if unit.begin)
        moved = 2 * self._group("all_reduce", size, layout, ("tp",))
        moved += 2 * self._group("all_gather", size, layout, ("cp",))
        # sizes are those of all ranks together; rows travel whole, or in slices that are gathered over tp
        slices = ranks * self._group("all_to_all", self.routed // layout.tp, layout, over)
        slices += self._group("all_gather", self.routed, layout, ("tp",))
        moved += min(ranks * self._group("all_to_all", self.routed, layout, over), slices)
        passes = (3 if layout.recompute == "full" else 2) * layout.microbatches / layout.pp
        few = self._few(layout.rows * ranks / layout.tp)  # as many rows as an expert sees, in equal shares
        return few * self.seconds(layout) + passes * layout.rows / (self.batch * layout.cp) * moved

    def _few(self, rows: float) -> float:
        """How much more a row costs in a microbatch of so many than in one of all: what a kernel takes however few rows
        there are is spread over them. Less than one row counts as one."""
        rows = max(rows, 1.0)
        low, high = self._more(1), self._more(self.few)
        return 1 + (low + (min(1.0, log(rows) / log(self.few)) * (high - low) if self.few > 1 else 0.0)) / rows

    def _more(self, rows: int) -> float:
        """The rows that the time of kernels is worth before they compute any, in a microbatch of so many."""
        if rows not in self.more:
            whole = self._whole("none").sharded
            some = _twin(replace(whole, rows=rows, microbatches=self.batch // rows))
            self.more[rows] = 0.0
            with suppress(CompileError):
                least, found = (sum(unit.seconds for unit in self.build(one)) / one.rows for one in (whole, some))
                self.more[rows] = rows * max(0.0, found / least - 1)
        return self.more[rows]

    @cached_property
    def few(self) -> int:
        """Rows of a microbatch that are priced beside one: the most, up to a few, that an unsplit model has, whose
        functions others have, too."""
        found = self.widest.get(self._kind(self._whole("none")))
        return found.rows if found and found.rows <= FEW else next(n for n in range(FEW, 0, -1) if self.batch % n == 0)

    def _group(self, name: str, size: float, layout: Layout, over: tuple[str, ...]) -> float:
        """Seconds of all bytes at once, so that what a call takes however small it is does not count."""
        over = tuple(axis for axis in over if layout.size(axis) > 1)
        if not over or not size:
            return 0.0
        key = name, size, over, layout.dp, layout.ep, layout.cp, layout.tp
        if key not in self.moved:
            self.moved[key] = self.costs.group_seconds(name, size, layout.mesh.peers(0, over))
        return self.moved[key]

    def _split(self, layout: Layout) -> int:
        """In how many parts parameters may be, but for slices of state."""
        spread = layout.ep * prod(layout.size(axis) for axis in layout.experts) if self.experts else 1
        return layout.tp * layout.pp * spread

    def state(self, layout: Layout) -> tuple[float, float]:
        """Parameters and moments, and gradients, split as far as anything can be."""
        spread = {"ep", *layout.experts}
        apart = prod(layout.size(axis) for axis in spread)

        def copies(zero: int, *others: str) -> float:
            slices = prod(layout.size(axis) for axis in layout.zero_axes if axis not in others)
            return 1 / (slices if layout.zero >= zero else 1)

        one, two, three = (
            ((self.parameters - self.experts) * copies(zero) + self.experts * copies(zero, *spread) / apart)
            / (layout.tp * layout.pp)
            for zero in (1, 2, 3)
        )
        return self.kept.parameters * three + self.kept.moments * one, self.kept.gradients * two

    def _sliced(self, layout: Layout) -> float:
        """Seconds of a stage's gradients that are scattered, and parameters gathered, for each microbatch, where slices
        are over the ranks that are fastest."""
        if layout.zero < 2:
            return 0.0
        size = self.parameters // self._split(layout)
        return layout.microbatches * min(self._each_time(size, one) for one in self.ways(layout))

    def _each_time(self, size: int, layout: Layout) -> float:
        over = tuple(axis for axis in layout.zero_axes if not self.experts or axis not in ("ep", *layout.experts))
        scatter, gather = (self._group(name, size, layout, over) for name in ("reduce_scatter", "all_gather"))
        return scatter + (2 * gather if layout.zero == 3 else 0.0)

    def _whole(self, recompute: Again) -> Layout:
        """The whole batch at once on each stage: more rows never take more time or memory each."""
        return Layout(1, 1, 1, 1, 1, 1, self.batch, "all_gather", (), "1f1b", 1, recompute, 0, ())

    def _unsplit(self, layout: Layout) -> Least:
        key = layout.recompute, *self._often(layout)
        return self._kept(key, lambda: replace(self._whole(layout.recompute), pp=layout.pp), layout)

    def _nearer(self, layout: Layout, step: int) -> Least:
        """See :meth:`closer`; zeros where nothing is known. The same for all that store parameters otherwise."""
        key = layout.unsliced, step
        if key in self.nearest:
            return self.nearest[key]
        less = self._functions(layout, step)
        if step == TWIN and not self._bounds(less, layout):
            return Least()
        if step < TWIN:
            less = self._widest(less)
            if less.rows < layout.rows or (step == 1 and less.inside not in self.compiled):
                return Least()
            self.compiled.add(less.inside)
        found = self._kept((less.inside, *self._often(layout)), lambda: less, layout)
        self.nearest[key] = found if less.cp == layout.cp else found.parts(layout.cp)
        return self.nearest[key]

    @staticmethod
    def _functions(layout: Layout, step: int) -> Layout:
        """What of ``layout`` a step of the closer bounds splits. But for the last, backwards are in one piece, which
        communicates beside more."""
        if step in (TWIN, LAST):
            return layout.unsliced if step == LAST else _twin(layout.unsliced)
        again = layout.recompute if step >= 2 else "none"
        if step in (1, 3):
            return replace(layout.unsliced, schedule="1f1b", virtual_stages=1, recompute=again)
        experts = tuple(axis for axis in layout.experts if axis != "cp")
        return replace(
            layout.unsliced, schedule="1f1b", virtual_stages=1, cp=1, context="all_gather", experts=experts,
            recompute=again,
        )  # fmt: skip

    def _bounds(self, twin: Layout, layout: Layout) -> bool:
        """Whether the functions of the twin are known, and bound those of the layout: they may only communicate over
        two data ranks where those do so over as many or more."""
        if twin == layout.unsliced or twin.inside not in self.learned:
            return False
        with suppress(CompileError):
            return layout.dp > 1 or not any(unit.communication.get("dp") for unit in self.build(twin))
        return False

    @staticmethod
    def _kind(layout: Layout) -> Hashable:
        dp = layout.dp if "dp" in layout.experts else 0
        return layout.tp, layout.cp, layout.ep, layout.context, layout.experts, dp, layout.recompute

    def _widest(self, layout: Layout) -> Layout:
        """With as many rows in a microbatch as any layout with its splits, or all of them."""
        found = self.widest.get(self._kind(layout))
        if found is None:
            dp = layout.dp if "dp" in layout.experts else 1
            return replace(layout, dp=dp, microbatches=1, rows=self.batch // (dp * layout.ep))
        return replace(layout, dp=found.dp, microbatches=found.microbatches, rows=found.rows)

    @staticmethod
    def _often(layout: Layout) -> tuple[Hashable, ...]:
        return layout.pp, layout.schedule, layout.virtual_stages, layout.microbatches, layout.rows

    def _kept(self, key: Hashable, less: Callable[[], Layout], layout: Layout) -> Least:
        """Of ``less`` with as many microbatches of as many rows as ``layout``; zeros where the model cannot be split
        so."""
        if key not in self.least:
            self.least[key] = Least()
            with suppress(CompileError):
                self.least[key] = self._least(less(), layout)
        return self.least[key]

    def _least(self, less: Layout, layout: Layout) -> Least:
        """Of stages for more rows than ``layout`` has, or less split than it, its share of the time and memory."""
        found = self._stages(less, layout)
        share, often = layout.rows / less.rows, (layout.schedule, layout.pp, layout.microbatches)
        same = less in (layout.unsliced, _twin(layout.unsliced)) and not self.slower  # cut in the same places, too
        slack, near = (1.0, 1.0) if same else (SLACK, NEAR)
        even = layout.microbatches * sum(stage.seconds for stage in found.work) / layout.pp
        seconds, saved = max(near * even, slack * least_seconds(*often, found.work)), min_saved(*often, found.work)
        # as many microbatches as a rank holds at once, whose backwards are one function
        whole = layout.virtual_stages == 1 and layout.schedule in UNSPLIT
        held = zip(saved, found.work, strict=False)
        early = [whole and most >= layout.microbatches * stage.saved for most, stage in held]
        shares = found.shares if same else [min(1.0, slack * one) for one in found.shares]
        mean = sum(saved) / layout.pp, 1.0  # wherever stages are cut
        if self.slower:
            mean, saved = (sum(stage.saved for stage in found.work) / len(found.work), 1.0), []
            devices = sum(unit.forward + unit.backward for unit in self.build(less))  # no host is slower for them
            even = layout.microbatches * devices / layout.pp
            seconds = max(seconds, SLACK * even * self.slower(less, layout.pp))
        ranks = [(*mean, any(early)), *zip(saved, shares, early, strict=False)]
        working = found.working + min(2, layout.microbatches) * found.sent
        return Least(
            share * seconds, slack * share * working, slack * found.block,
            tuple((slack * share * bytes, state, first) for bytes, state, first in ranks),
        )  # fmt: skip

    def _stages(self, less: Layout, layout: Layout) -> StagesLeast:
        """Of the functions of ``less`` in the stages of ``layout``."""
        less = replace(less, pp=layout.pp, virtual_stages=layout.virtual_stages)
        built = self.build(less)
        less = replace(less, schedule=layout.schedule)
        key = less.inside, *placement(less), id(built)
        if key not in self.stages:
            self.stages[key] = _stages_least(
                cut(built, less, self.costs), Slices(less, self.costs, less.mesh), min if self.slower else max
            )
        return self.stages[key]


def _twin(layout: Layout) -> Layout:
    """What has as many rows in a microbatch, on two data ranks: most layouts have its functions. They are those of
    ``layout``, but for communication over data ranks. Itself where there is no other."""
    often = layout.dp * layout.microbatches
    if "dp" in layout.experts or often % 2 or often < 4:
        return layout
    return replace(layout, dp=2, microbatches=often // 2)


def _useful(functions: Layout) -> tuple[int, bool]:
    """Of functions that bound others: those for more rows, and of these such as many layouts have."""
    return functions.rows, functions.dp > 1 < functions.microbatches


def _stages_least(stages: Stages, slices: Slices, most: Callable[[Iterable[int]], int]) -> StagesLeast:
    """``most``: of a stage's blocks, the one that counts."""
    home = placement(slices.layout)
    apart = [a != b for a, b in pairwise(home)]
    sent = [stage[0].crossing if other else 0 for other, stage in zip(apart, stages[1:], strict=True)]
    parts: list[list[StageUnit]] = [[] for _ in range(slices.layout.pp)]
    for rank, stage in zip(home, stages, strict=True):
        parts[rank] += stage
    held = [sum(one.bytes for one in held_by(part, Counter())) for part in parts]
    messages = [0] * slices.layout.pp
    for rank, before, after in zip(home, [0, *sent], [*sent, 0], strict=True):
        messages[rank] += before + after
    return StagesLeast(
        [stage_work(stage, True, slices, sent=after) for stage, after in zip(stages, [*sent, 0], strict=True)],
        min(most(unit.working for unit in stage) for stage in stages),
        min(most(sum(held.read for held in unit.parameters) for unit in stage) for stage in stages),
        min(messages),
        [len(held) * one / max(1, sum(held)) for one in held],
    )
