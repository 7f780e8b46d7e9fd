"""What a layout of a model costs at least, from the units of the unsplit model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .estimate import MOMENTS
from .layouts import Layout
from .units import Unit


class UnsplitBounds:
    """What any layout costs at least, from the units of the unsplit model (one device, for as many rows)."""

    def __init__(self, build: Callable[[Layout], Sequence[Unit]], parameters: int) -> None:
        self.build, self.parameters = build, parameters

    def seconds(self, layout: Layout) -> float:
        """No split makes work cheaper than its share, communication comes on top, and no pipeline of p stages and m
        microbatches of ``work`` seconds ends before ``m work / p (1 - (1 - 1/m)^p)``, with p stages: stage s cannot begin
        before those before it did one microbatch, and then has m of its own, however the work is divided."""
        alone = replace(
            layout, tp=1, cp=1, ep=1, pp=1, dp=1, microbatches=layout.microbatches * layout.dp * layout.ep,
            context="all_gather", experts=(), schedule="1f1b",
        )  # fmt: skip
        units = self.build(alone)
        work = sum(unit.forward + unit.backward for unit in units) / (layout.tp * layout.cp)
        return work / (1 - (1 - 1 / layout.microbatches) ** layout.pp)

    def bytes(self, layout: Layout) -> float:
        """Parameters, gradients and moments, split as far as anything can be."""
        ways = layout.tp * layout.pp * layout.ep
        for axis in layout.experts:
            ways *= {"dp": layout.dp, "cp": layout.cp}[axis]
        return (2 + MOMENTS) * self.parameters / ways
