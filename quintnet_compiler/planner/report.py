"""What the planner found, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.html import table
from ..ir.cost_protocol import guess_note
from ..ir.plan import Plan
from .compare import Versus
from .estimate import Estimate, bytes_of, time_of
from .layouts import Layout
from .search import SearchResult
from .workload import rounded

MOST_SHOWN = 100  # rejected layouts in a notebook
LEFT = {
    "proof": "cost more, whatever they do inside",
    "work": "were left when the work was done (work=)",
    "time": "were left when time ran out (seconds=)",
}


@dataclass(frozen=True)
class PlanReport:
    """Ranked layouts of a model on a cluster; ``str()`` for people, ``to_json()`` for programs.

    Attributes:
        cluster: its devices.
        batch: rows of the global batch.
        memory_bytes: of a device.
        found: estimates of the ranked layouts, the rejected ones with reasons, and how the search ended.
        plans: a :class:`quintnet.Plan` for each ranked layout, best first.
        seconds: that the search took.
        ask: searches again with some decisions, see :meth:`why_not`.
    """

    cluster: str
    batch: int
    memory_bytes: float
    found: SearchResult[Layout, Estimate]
    plans: tuple[Plan, ...]
    seconds: float
    ask: Callable[[Mapping[str, Any]], Versus] = field(repr=False)

    def why_not(self, **decisions: Any) -> Versus:
        """Compare the best plan with the best one that has these ``decisions`` (``mesh={"tp": 8}``,
        ``recompute="none"``): where each spends its time and memory, or why there is none.

        Raises:
            CompileError: QN207 for a decision that no plan has.
        """
        return self.ask(decisions)

    @property
    def best(self) -> Plan:
        """The plan with the lowest predicted cost."""
        return self.plans[0]

    def to_json(self) -> str:
        """Numbers in seconds and bytes."""
        return json.dumps(
            {
                "cluster": self.cluster,
                "batch": self.batch,
                "memory_bytes": self.memory_bytes,
                "plans": [
                    {**one.numbers(), "plan": plan.model_dump(mode="json")}
                    for one, plan in zip(self.found.ranked, self.plans, strict=True)
                ],
                "rejected": [{"layout": str(one.layout), "reason": one.reason} for one in self.found.rejected],
                "not_looked_at": self.found.left,
                "complete": self.found.complete,
                "ended": self.found.ended,
                "seconds": self.seconds,
            },
            indent=2,
        )

    def __str__(self) -> str:
        lines = [f"{self.cluster}, a batch of {self.batch}: {len(self.plans)} plans, best first"]
        lines += lines_of(self.found.ranked)
        reasons = Counter(_kind(one.reason) for one in self.found.rejected)
        for reason, count in reasons.most_common():
            example = next(one for one in self.found.rejected if _kind(one.reason) == reason)
            lines.append(f"rejected {count}: {example.reason} ({example.layout})")
        if self.found.left:
            lines.append(f"{self.found.left} layouts {LEFT[self.found.ended]}")
        if (best := self.found.ranked[0]).workload:
            lines += ["the best plan:", *(f"  {line}" for line in best.workload.text(best.figures))]
        if guessed := self.found.ranked[0].guessed:
            lines.append(guess_note(guessed))
        return "\n".join([*lines, f"planned in {self.seconds:.1f} s"])

    def _repr_html_(self) -> str:
        head, *rows = cells_of(self.found.ranked)
        title = f"{self.cluster}, a batch of {self.batch}: {len(self.plans)} plans, best first"
        if not self.found.rejected:
            return table(head, rows, title)
        rejected = table(["layout", "why not"], [(one.layout, one.reason) for one in self.found.rejected[:MOST_SHOWN]])
        many = f"{len(self.found.rejected)} rejected"
        return f"{table(head, rows, title)}<details><summary>{many}</summary>{rejected}</details>"


def cells_of(estimates: Sequence[Estimate]) -> list[tuple[str, ...]]:
    """Estimates of one workload as rows of a table, below a row of names."""
    first = estimates[0]
    head = ["step", "memory", "bubble", "exposed"]
    if first.workload:
        head += [f"{first.figures.unit}s/s/device", "MFU", *(["per million"] if first.figures.cost_per_million else [])]
    rows = [(*head, "layout")]
    for one in estimates:
        cells = [time_of(one.seconds), bytes_of(one.memory_bytes)]
        cells += [f"{one.bubble / one.seconds:.1%}", f"{one.exposed / one.seconds:.1%}"]
        if one.workload:
            found = one.figures
            cells += [rounded(found.per_second_per_device), found.share]
            cells += [rounded(found.cost_per_million)] if found.cost_per_million else []
        rows.append((*cells, str(one.layout)))
    return rows


def lines_of(estimates: Sequence[Estimate]) -> list[str]:
    """The same, aligned; layouts stand last, and are as long as they are."""
    rows = cells_of(estimates)
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in rows]


def _kind(reason: str) -> str:
    """Reasons that differ in numbers alone are one."""
    return "".join(c for c in reason if not c.isdigit() and c != ".")
