"""What a layout of a model costs at least, from layouts that split it less: no split makes work cheaper, or smaller,
than its share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .estimate import MOMENTS
from .layouts import Layout
from .units import Unit

# what of a split model's saved values may be missing beside its share of the whole model's
SLACK = 0.9


class UnsplitBounds:
    """Bounds for :func:`.search.search`. ``parameters``: bytes of all parameters."""

    def __init__(self, build: Callable[[Layout], Sequence[Unit]], parameters: int) -> None:
        self.build, self.parameters = build, parameters
        self.smallest: dict[str, tuple[int, int]] = {}

    def seconds(self, layout: Layout) -> float:
        """From the unsplit model with as many rows: its share, and the pipeline's bubble."""
        alone = _unsplit(layout, tp=1)
        return _pipelined(self.build(alone), layout) / (layout.tp * layout.cp)

    def closer(self, layout: Layout) -> float:
        """The same from the model that is split over tp alone, whose communication is in it."""
        if layout.cp == layout.ep == 1:
            return 0.0
        return _pipelined(self.build(_unsplit(layout, tp=layout.tp)), layout) / layout.cp

    def bytes(self, layout: Layout) -> float:
        """Parameters, gradients and moments, split as far as anything can be, and a microbatch's saved values: no stage
        can have less than the average."""
        ways = layout.tp * layout.pp * layout.ep
        for axis in layout.experts:
            ways *= {"dp": layout.dp, "cp": layout.cp}[axis]
        if layout.recompute not in self.smallest:
            units = self.build(_unsplit(layout, tp=1))
            self.smallest[layout.recompute] = layout.rows, sum(unit.saved for unit in units)
        rows, saved = self.smallest[layout.recompute]
        saved_here = SLACK * saved * layout.rows / rows / (layout.tp * layout.cp * layout.pp)
        return (2 + MOMENTS) * self.parameters / ways + saved_here


def _unsplit(layout: Layout, tp: int) -> Layout:
    return replace(
        layout, tp=tp, cp=1, ep=1, pp=1, dp=1, microbatches=layout.microbatches * layout.dp * layout.ep,
        context="all_gather", experts=(), schedule="1f1b",
    )  # fmt: skip


def _pipelined(units: Sequence[Unit], layout: Layout) -> float:
    """All microbatches of ``units`` through a pipeline, at least.

    With m microbatches and p stages, stage s cannot begin before those before it did one microbatch, and then has m of
    its own, however the work is divided.
    """
    work = sum(unit.forward + unit.backward for unit in units)
    return work / (1 - (1 - 1 / layout.microbatches) ** layout.pp)
