"""The columns of the table of models: meshes, and what a model is compared on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import quintnet

from .entry import Entry, InDouble


@dataclass(frozen=True)
class Layout:
    """A column of the table: a mesh, and how batch, attention and experts are split."""

    axes: Mapping[str, int]
    microbatches: int = 1
    context: str = "all_gather"
    experts: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = " x ".join(f"{axis}{size}" for axis, size in self.axes.items())
        name += f" ({self.context})" if self.context != "all_gather" else ""
        return name + (f", experts over {' and '.join(self.experts)}" if self.experts else "")


SINGLE = (
    Layout({"dp": 2}, 2),
    Layout({"tp": 2}),
    Layout({"cp": 2}),
    Layout({"cp": 2}, context="ulysses"),
    Layout({"cp": 2}, context="ring"),
    Layout({"pp": 2}, 2),
)
BRIEF = (*SINGLE[:3], SINGLE[5], Layout({"pp": 2, "dp": 2, "tp": 2}, 2))
COMPOSED = (
    Layout({"pp": 2, "dp": 2, "tp": 2}, 2),
    Layout({"pp": 2, "cp": 2, "tp": 2}, 2),
    Layout({"dp": 2, "cp": 2, "tp": 2}, context="ring"),
)
EXPERTS = (
    Layout({"ep": 2}),
    Layout({"pp": 2, "ep": 2, "tp": 2}, 2),
    Layout({"dp": 2, "cp": 2}, experts=("dp", "cp")),
    Layout({"pp": 2, "dp": 2, "cp": 2, "tp": 2}, 2, experts=("dp",)),
)


@dataclass(frozen=True)
class Outcome:
    """The largest relative error of the loss, the outputs and all gradients in float64, or why there is no program."""

    error: float | None
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.error is not None and self.error < 1e-9


def outcome(entry: Entry, layout: Layout) -> Outcome:
    """Compile a model for a layout, and compare all ranks with the unsplit model over two optimizer steps."""
    options: dict[str, Any] = {"microbatches": layout.microbatches, "context": layout.context, "check": "off"}
    with InDouble():
        try:
            program = quintnet.compile(
                entry.build(), quintnet.Mesh(**layout.axes), entry.batch(8), experts=layout.experts, **options
            )
        except quintnet.CompileError as error:
            return Outcome(None, f"{error.code}: {error.message}")
        report = program.verify()
    return Outcome(report.worst.error, str(report.culprit or ""))


def has_experts(entry: Entry) -> bool:
    return bool({"num_local_experts", "num_experts", "n_routed_experts"} & set(entry.config))


def columns(entry: Entry) -> tuple[Layout, ...]:
    """The layouts of a model: those with experts where it has some; all samples at once where its loss couples them."""
    found = BRIEF if entry.brief else SINGLE + COMPOSED + (EXPERTS if has_experts(entry) else ())
    return found if entry.rows_apart else tuple(replace(layout, microbatches=1) for layout in found)
