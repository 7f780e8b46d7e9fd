"""What a layout of a model costs at least, from layouts that split it less: no split makes work cheaper, or smaller,
than its share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from ..cost import RankCosts
from ..errors import CompileError
from ..mesh import Mesh
from .estimate import MOMENTS
from .layouts import Layout
from .pipeline import StageWork, least_saved, least_seconds
from .stages import Slices, cut, stage_work
from .units import Unit

# What of its share a split model may lack: stages are cut elsewhere, and a few values are saved only where they are
# whole.
SLACK = 0.95


@dataclass(frozen=True)
class Least:
    seconds: float
    saved: float


class LessSplit:
    """Bounds for :func:`.search.search`. ``parameters``: bytes of all of them."""

    def __init__(
        self, build: Callable[[Layout], Sequence[Unit]], costs: RankCosts, parameters: int, batch: int
    ) -> None:
        self.build, self.costs, self.parameters, self.batch = build, costs, parameters, batch
        self.known: dict[tuple[Layout, int], Least] = {}
        self.stages: dict[tuple[Layout, int], list[StageWork]] = {}
        self.moved: dict[tuple[Mesh, tuple[str, ...], int], tuple[float, float]] = {}

    def seconds(self, layout: Layout) -> float:
        """The unsplit model's share, in as many stages, and what slices of its state move."""
        share = self._less(layout, 1, self._rounded(layout.rows)).seconds / (layout.tp * layout.cp)
        return SLACK * (share + self._moved(layout))

    def closer(self, layout: Layout) -> float:
        """The share of the model that is split over tp alone, whose communication is in it."""
        share = self._less(layout, layout.tp, layout.rows).seconds / layout.cp
        return SLACK * (share + self._moved(layout))

    def bytes(self, layout: Layout) -> float:
        """The state, and the unsplit model's share of saved values."""
        found = self._less(layout, 1, self._rounded(layout.rows))
        return self._state(layout) + SLACK * found.saved / (layout.tp * layout.cp)

    def closer_bytes(self, layout: Layout) -> float:
        """The state, and the share of the saved values of the model that is split over tp alone."""
        return self._state(layout) + SLACK * self._less(layout, layout.tp, layout.rows).saved / layout.cp

    def _split(self, layout: Layout) -> int:
        """In how many parts parameters may be, but for slices of state."""
        return layout.tp * layout.pp * layout.ep * prod({"dp": layout.dp, "cp": layout.cp}[a] for a in layout.experts)

    def _slicing(self, layout: Layout) -> tuple[str, ...]:
        return tuple(a for a in layout.zero_axes if a not in layout.experts and layout.mesh[a] > 1)

    def _state(self, layout: Layout) -> float:
        """Parameters, gradients and moments, split as far as anything can be."""
        slices = prod(layout.mesh[axis] for axis in self._slicing(layout))
        state = sum((1, 1, MOMENTS)[i] / (slices if layout.zero >= 3 - i else 1) for i in range(3))
        return state * self.parameters / self._split(layout)

    def _moved(self, layout: Layout) -> float:
        """Seconds of a stage's gradients that are scattered, and parameters gathered, for each microbatch."""
        over = self._slicing(layout)
        if layout.zero < 2 or not over:
            return 0.0
        size = self.parameters // self._split(layout)
        key = layout.mesh, over, size
        if key not in self.moved:
            ranks = layout.mesh.peers(0, over)
            found = [self.costs.group_seconds(name, size, ranks) for name in ("reduce_scatter", "all_gather")]
            self.moved[key] = found[0], found[1]
        scatter, gather = self.moved[key]
        return layout.microbatches * (scatter + (2 * gather if layout.zero == 3 else 0.0))

    def _rounded(self, rows: int) -> int:
        """Up to 1, 8, 64, ... where the batch divides so: more rows never take more time or memory each."""
        most = 8 ** -(-(rows - 1).bit_length() // 3)
        return next(n for n in range(min(most, self.batch), 0, -1) if self.batch % n == 0)

    def _less(self, layout: Layout, tp: int, rows: int) -> Least:
        """Zeros where the model cannot be split less: a loss that couples rows has no microbatches."""
        key = replace(layout, tp=tp, cp=1, ep=1, dp=1, context="all_gather", experts=(), zero=0)
        if (key, rows) not in self.known:
            try:
                self.known[key, rows] = _least(self._work(layout, tp, rows), key, layout.rows / rows)
            except CompileError:
                self.known[key, rows] = Least(0.0, 0.0)
        return self.known[key, rows]

    def _work(self, layout: Layout, tp: int, rows: int) -> list[StageWork]:
        # data ranks where such a layout may be asked for itself: what it costs inside is then known already
        dp = layout.dp if tp > 1 and self.batch % (layout.dp * rows) == 0 else 1
        less = replace(layout, tp=tp, cp=1, ep=1, dp=dp, rows=rows, context="all_gather", experts=(), zero=0)
        less = replace(less, microbatches=self.batch // (dp * rows))
        key = replace(less.inside, pp=layout.pp), layout.virtual_stages
        if key not in self.stages:
            slices = Slices(less, self.costs, replace(less, dp=1).mesh)
            stages = cut(self.build(less), less, self.costs)
            self.stages[key] = [stage_work(stage, index == 0, slices) for index, stage in enumerate(stages)]
        return self.stages[key]


def _least(work: Sequence[StageWork], layout: Layout, share: float) -> Least:
    """Of stages for more rows, ``share`` of the time and memory for each."""
    seconds = least_seconds(layout.schedule, layout.microbatches, layout.virtual_stages, work)
    saved = least_saved(layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages, work)
    return Least(share * seconds, share * saved)
