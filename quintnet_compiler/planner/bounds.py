"""What a layout of a model costs at least, from layouts that split it less: no split makes work cheaper, or smaller,
than its share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..cost import RankCosts
from ..errors import CompileError
from .estimate import MOMENTS, Estimate, estimate
from .layouts import Layout
from .units import Unit

# What of its share a split model may lack: stages are cut elsewhere, and a few values are saved only where they are
# whole.
SLACK = 0.95


class LessSplit:
    """Bounds for :func:`.search.search`. ``parameters``: bytes of all of them."""

    def __init__(
        self, build: Callable[[Layout], Sequence[Unit]], costs: RankCosts, parameters: int, batch: int
    ) -> None:
        self.build, self.costs, self.parameters, self.batch = build, costs, parameters, batch
        self.known: dict[Layout, Estimate | None] = {}

    def seconds(self, layout: Layout) -> float:
        """The unsplit model's share, in as many stages."""
        found = self._less(layout, 1, self._rounded(layout.rows))
        return SLACK * found.pipeline / (layout.tp * layout.cp) if found else 0.0

    def closer(self, layout: Layout) -> float:
        """The share of the model that is split over tp alone, whose communication is in it."""
        found = self._less(layout, layout.tp, layout.rows)
        return SLACK * found.pipeline / layout.cp if found else 0.0

    def bytes(self, layout: Layout) -> float:
        """Parameters, gradients and moments, split as far as anything can be, and the fullest stage's saved values."""
        ways = layout.tp * layout.pp * layout.ep
        for axis in layout.experts:
            ways *= {"dp": layout.dp, "cp": layout.cp}[axis]
        found = self._less(layout, 1, self._rounded(layout.rows))
        saved = max(stage.saved for stage in found.memory) if found else 0.0
        return (2 + MOMENTS) * self.parameters / ways + SLACK * saved / (layout.tp * layout.cp)

    def _rounded(self, rows: int) -> int:
        """Up to 1, 8, 64, ... where the batch divides so: more rows never take more time or memory each."""
        most = 8 ** -(-(rows - 1).bit_length() // 3)
        return next(n for n in range(min(most, self.batch), 0, -1) if self.batch % n == 0)

    def _less(self, layout: Layout, tp: int, rows: int) -> Estimate | None:
        """None where the model cannot be split less: a loss that couples rows has no microbatches."""
        units = self._units(layout, tp, rows)
        if not units:
            return None
        key = replace(layout, tp=tp, cp=1, ep=1, dp=1, context="all_gather", experts=())
        if key not in self.known:
            share = layout.rows / rows
            self.known[key] = estimate([_part(unit, share) for unit in units], key, self.costs)
        return self.known[key]

    def _units(self, layout: Layout, tp: int, rows: int) -> Sequence[Unit]:
        # data ranks where there may be: what such a layout costs inside is then known already
        dp = layout.dp if self.batch % (layout.dp * rows) == 0 else 1
        less = replace(layout, tp=tp, cp=1, ep=1, dp=dp, rows=rows, context="all_gather", experts=())
        try:
            return self.build(replace(less, microbatches=self.batch // (dp * rows)))
        except CompileError:
            return ()


def _part(unit: Unit, share: float) -> Unit:
    """A unit with fewer rows, at least."""
    if share == 1:
        return unit
    return replace(
        unit,
        forward=unit.forward * share,
        backward=unit.backward * share,
        saved=int(unit.saved * share),
        received=int(unit.received * share),
        working=0,
    )
