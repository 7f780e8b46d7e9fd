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
    """Bounds for :func:`.search.search`. ``parameters``: bytes of all of them; ``rows``: the fewest of a microbatch."""

    def __init__(
        self, build: Callable[[Layout], Sequence[Unit]], costs: RankCosts, parameters: int, batch: int, rows: int
    ) -> None:
        self.build, self.costs, self.parameters, self.batch, self.rows = build, costs, parameters, batch, rows
        self.known: dict[Layout, Estimate | None] = {}

    def seconds(self, layout: Layout) -> float:
        """The unsplit model's share, with as many rows, in as many stages."""
        found = self._less(layout, 1, layout.rows)
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
        found = self._less(layout, 1, self.rows)
        saved = max(stage.saved for stage in found.memory) * layout.rows / self.rows if found else 0.0
        return (2 + MOMENTS) * self.parameters / ways + SLACK * saved / (layout.tp * layout.cp)

    def _less(self, layout: Layout, tp: int, rows: int) -> Estimate | None:
        """None where the model cannot be split less: a loss that couples rows has no microbatches."""
        key = replace(layout, tp=tp, cp=1, ep=1, dp=1, rows=rows, context="all_gather", experts=())
        if key not in self.known:
            try:
                units = self.build(replace(key, pp=1, microbatches=self.batch // rows))
                self.known[key] = estimate(units, key, self.costs)
            except CompileError:
                self.known[key] = None
        return self.known[key]
