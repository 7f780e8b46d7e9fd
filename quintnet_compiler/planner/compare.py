"""Two layouts beside each other: where the time and the memory of each go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from .estimate import Estimate, StageMemory, bytes_of, time_of


@dataclass(frozen=True)
class Versus:
    """``best`` and ``other``, part by part; ``refused``: why there is no other, or it cannot be used. ``str()`` for
    people, ``to_json()`` for programs."""

    best: Estimate
    other: Estimate | None
    refused: str = ""

    def rows(self) -> Iterator[tuple[str, float, float]]:
        """Parts, in seconds and bytes, of the best and of the other."""
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
        fullest: list[StageMemory] = [max(one.memory, key=lambda rank: rank.total) for one in (a, b)]
        yield "memory", fullest[0].total, fullest[1].total
        for name in vars(fullest[0]):
            yield f"  of it {name}", getattr(fullest[0], name), getattr(fullest[1], name)

    def to_json(self) -> str:
        return json.dumps(
            {
                "best": self.best.numbers(),
                "other": self.other.numbers() if self.other else None,
                "refused": self.refused,
            },
            indent=2,
        )

    def __str__(self) -> str:
        lines = [f"best:  {self.best.layout}"]
        if self.other:
            lines.append(f"other: {self.other.layout}")
        memory = False
        for name, a, b in self.rows():
            memory |= name == "memory"
            show = bytes_of if memory else time_of
            change = f"{b / a - 1:+.1%}" if a else ""
            lines.append(f"{name:<24} {show(a):>10} {show(b):>10} {change:>8}")
        return "\n".join([*lines, *([self.refused] if self.refused else [])])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"
