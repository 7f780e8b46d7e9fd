"""A comparison of two layouts: where each spends its time and memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product
from typing import Any

from ..core.errors import CompileError
from .estimate import Estimate, StageMemory, bytes_of, time_of
from .workload import HOUR, four_digits

LISTABLE_DECISIONS = (
    "precision", "loss_chunks", "async_tp", "offload", "reduce_dtype", "sum_dtype", "sequence_parallel",
    "reshard_after_forward", "overlap", "context_load_balance",
)  # fmt: skip


@dataclass(frozen=True)
class Versus:
    """Two layouts, part by part; ``str()`` for people, ``to_json()`` for programs.

    Attributes:
        refused: why there is no other layout, or why it cannot be used.
        names: of the two, for people.
    """

    best: Estimate
    other: Estimate | None
    refused: str = ""
    names: tuple[str, str] = ("best", "other")

    def rows(self) -> Iterator[tuple[str, float, float]]:
        """Yield names of parts with the seconds or bytes of both layouts."""
        if self.other is None:
            return
        a, b = self.best, self.other
        yield "step", a.seconds, b.seconds
        yield "pipeline", a.pipeline, b.pipeline
        yield "  of it bubble", a.bubble, b.bubble
        for axis in {**a.communication, **b.communication}:
            yield f"  of it waiting for {axis}", a.communication.get(axis, 0.0), b.communication.get(axis, 0.0)
        yield "gradients", a.gradients, b.gradients
        yield "optimizer", a.optimizer, b.optimizer
        fullest: list[StageMemory] = [max(estimate.memory, key=lambda rank: rank.total) for estimate in (a, b)]
        yield "memory", fullest[0].total, fullest[1].total
        for name, size in fullest[0].parts.items():
            yield f"  of it {name}", size, fullest[1].parts[name]

    def figures(self) -> Iterator[tuple[str, float | None, float | None]]:
        """Yield names of figures with their values for both layouts; None where a value is unknown."""
        if self.other is None or not (self.best.workload and self.other.workload):
            return
        best, other = self.best.figures, self.other.figures
        unit = best.unit
        yield "devices", best.devices, other.devices
        yield f"{unit}s/s", best.per_second, other.per_second
        yield f"{unit}s/s/device", best.per_second_per_device, other.per_second_per_device
        yield "model FLOP utilisation", best.utilisation, other.utilisation
        yield "joules a step", best.joules, other.joules
        yield f"cost of a million {unit}s", best.cost_per_million, other.cost_per_million
        yield "hours of training", _hours(best.train_seconds), _hours(other.train_seconds)
        yield "cost of training", best.train_cost, other.train_cost

    def numbers(self) -> dict[str, Any]:
        """Return all fields of both, in seconds and bytes."""
        other = self.other.numbers() if self.other else None
        return {"best": self.best.numbers(), "other": other, "refused": self.refused, "names": list(self.names)}

    def to_json(self) -> str:
        """Return :meth:`numbers` as JSON."""
        return json.dumps(self.numbers(), indent=2)

    def __str__(self) -> str:
        width = max(map(len, self.names)) + 1
        lines = [f"{self.names[0] + ':':<{width}} {self.best.layout}"]
        if self.other:
            lines.append(f"{self.names[1] + ':':<{width}} {self.other.layout}")
        memory = False
        for name, a, b in self.rows():
            memory |= name == "memory"
            show = bytes_of if memory else time_of
            change = f"{b / a - 1:+.1%}" if a else ""
            lines.append(f"{name:<24} {show(a):>10} {show(b):>10} {change:>8}")
        for name, best, other in self.figures():
            if best is not None or other is not None:
                shown = ["-" if x is None else four_digits(x) for x in (best, other)]
                change = f"{other / best - 1:+.1%}" if best and other else ""
                lines.append(f"{name:<24} {shown[0]:>10} {shown[1]:>10} {change:>8}")
        return "\n".join([*lines, *([self.refused] if self.refused else [])])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


@dataclass(frozen=True)
class Alternative:
    """Decisions that a caller listed, and the best layout with them, or why there is none."""

    decisions: Mapping[str, Any]
    found: Estimate | None
    why: str = ""

    @property
    def name(self) -> str:
        """Return the decisions as text."""
        return ", ".join(f"{name}={value}" for name, value in self.decisions.items())

    def numbers(self) -> dict[str, Any]:
        """Return all fields, in seconds and bytes."""
        plan = self.found.numbers() if self.found else None
        return {"decisions": dict(self.decisions), "plan": plan, "why_not": self.why}

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.name}: {self.why}"
        return f"{self.name}: {time_of(self.found.seconds)}, {bytes_of(self.found.memory_bytes)}, {self.found.layout}"


def listed(among: Mapping[str, Sequence[Any]] | None) -> list[dict[str, Any]]:
    """Return every combination of the listed values.

    Raises:
        CompileError: QN216 for a decision that cannot be listed, or has no values.
    """
    for name, values in (among or {}).items():
        if name not in LISTABLE_DECISIONS:
            raise CompileError(
                "QN216",
                f"among={{{name!r}: ...}}",
                fix=f"list values of {', '.join(LISTABLE_DECISIONS)}; layouts are searched anyway",
            )
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise CompileError("QN216", f"among={{{name!r}: {values!r}}}", fix="give a tuple of values")
    names = list(among or {})
    return [dict(zip(names, values, strict=True)) for values in product(*(among or {}).values())] if names else []


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / HOUR
