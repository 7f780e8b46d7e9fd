"""The report of the planner, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..core.html import table
from ..cost_models.cluster import Cluster
from ..ir.cost_protocol import guess_note
from ..ir.plan import Plan
from .compare import Alternative, Versus
from .curves import ParetoFront, ScalingCurve, Sweep, front_svg, undominated
from .estimate import Estimate, aligned_columns, bytes_of, cells_of, time_of
from .layouts import Layout
from .search import SearchResult

MAX_SHOWN = 100  # rejected layouts in a notebook
REASONS_NOT_EXAMINED = {
    "proof": "cost more, whatever they do inside",
    "work": "were left when the work was done (work=)",
    "time": "were left when time ran out (seconds=)",
}


class Answers(Protocol):
    """Answers further questions by searching again."""

    def known(self) -> Sequence[Estimate]: ...

    def why_not(self, decisions: Mapping[str, Any]) -> Versus: ...

    def front(self) -> ParetoFront: ...

    def scaling(self, devices: Sequence[int] | None) -> ScalingCurve: ...

    def beside(self, cluster: Cluster, price: float | None) -> Versus: ...

    def sweep(self, argument: str, amounts: Sequence[float]) -> Sweep: ...


@dataclass(frozen=True)
class PlanReport:
    """Ranked layouts of a model on a cluster; ``str()`` for people, ``to_json()`` for programs.

    Attributes:
        cluster: its devices.
        batch: rows of the global batch.
        memory_bytes: of a device.
        reserve: the share of it that plans leave free.
        found: estimates of the ranked layouts, the rejected ones with reasons, and how the search ended.
        plans: a :class:`quintnet.Plan` for each ranked layout, best first.
        seconds: that the search took.
        ask: searches again, for :meth:`why_not`, :meth:`front`, :meth:`scaling`, :meth:`beside` and :meth:`sweep`.
        note: what the ranking does beside minimising, for people.
        simpler: a plan with fewer parts than the best one (axes of the mesh, another schedule, recomputation), which is
            predicted to be at most 3% slower: prices are no more exact. None where there is none.
        alternatives: the best layout with each of the decisions that were listed (``among``).
    """

    cluster: str
    batch: int
    memory_bytes: float
    reserve: float
    found: SearchResult[Layout, Estimate]
    plans: tuple[Plan, ...]
    seconds: float
    ask: Answers = field(repr=False)
    note: str = ""
    simpler: tuple[Estimate, Plan] | None = None
    alternatives: tuple[Alternative, ...] = ()

    def why_not(self, **decisions: Any) -> Versus:
        """Compare the best plan with the best one that has these ``decisions``: their time and memory.

        Decisions are fields of a plan (``mesh={"tp": 8}``, ``recompute="none"``). Without such a plan, return why.

        Raises:
            CompileError: QN207 for a decision that no plan has.
        """
        return self.ask.why_not(decisions)

    def front(self) -> ParetoFront:
        """Return the fastest plans for ever less memory, until no plan takes less.

        Each takes at least a fifth less than the previous one. It searches again; each point may take half as long as
        the planner.
        """
        return self.ask.front()

    def scaling(self, devices: Sequence[int] | None = None) -> ScalingCurve:
        """Return the best plans of the same batch on other numbers of ``devices`` of the same kind.

        These are whole nodes, or a part of one; by default from a quarter of the cluster to four times as many. It
        searches again; each number may take half as long as the planner.

        Raises:
            CompileError: QN216 for a number of devices that is neither whole nodes nor a part of one.
        """
        return self.ask.scaling(devices)

    def beside(self, cluster: Cluster, *, price: float | None = None) -> Versus:
        """Compare the best plan with the best on another cluster, part by part. It searches again.

        Args:
            cluster: e.g. ``quintnet.Cluster("b200", nodes=4)``.
            price: of an hour of one of its devices.

        Raises:
            CompileError: QN201 for what is no cluster, QN210 if an operator has no price there, QN216 for a price that
                is not above 0.
        """
        return self.ask.beside(cluster, price)

    def sweep(self, argument: str, amounts: Sequence[float]) -> Sweep:
        """Return the best plan for each of several values of one ``argument``.

        Arguments are ``"devices"`` of the cluster, ``"network"`` (bytes a second of a node, one way), ``"rows"`` of the
        global batch, and ``"length"`` of rows of tokens. It searches again; each value may take half as long as the
        planner. A value without a plan gets the reason instead.

        Raises:
            CompileError: QN216 for another argument, or for a value that is not above 0 (and whole, but for a network).
        """
        return self.ask.sweep(argument, amounts)

    @property
    def best(self) -> Plan:
        """Return the plan with the lowest predicted cost."""
        return self.plans[0]

    def numbers(self) -> dict[str, Any]:
        """Return all fields, in seconds and bytes."""
        return {
            "cluster": self.cluster,
            "batch": self.batch,
            "memory_bytes": self.memory_bytes,
            "reserve": self.reserve,
            "plans": [
                {**estimate.numbers(), "plan": plan.model_dump(mode="json")}
                for estimate, plan in zip(self.found.ranked, self.plans, strict=True)
            ],
            "simpler": self.simpler
            and {
                **self.simpler[0].numbers(),
                "plan": self.simpler[1].model_dump(mode="json"),
            },
            "alternatives": [alternative.numbers() for alternative in self.alternatives],
            "rejected": [{"layout": str(entry.layout), "reason": entry.reason} for entry in self.found.rejected],
            "not_looked_at": self.found.left,
            "complete": self.found.complete,
            "ended": self.found.ended,
            "gap": self.found.gap,
            "seconds": self.seconds,
        }

    def to_json(self) -> str:
        """Return :meth:`numbers` as JSON."""
        return json.dumps(self.numbers(), indent=2)

    def __str__(self) -> str:
        lines = [f"{self.cluster}, a batch of {self.batch}: {len(self.plans)} plans, best first"]
        lines += aligned_columns(cells_of(self.found.ranked))
        usable = bytes_of((1 - self.reserve) * self.memory_bytes)
        of = "the largest device's " if self.found.ranked[0].places else ""
        lines.append(f"memory may be {usable} of {of}{bytes_of(self.memory_bytes)}: {self.reserve:.0%} stays free")
        lines += [self.note] if self.note else []
        lines += [self._simpler] if self.simpler else []
        lines += ["the best with each of the listed decisions:"] if self.alternatives else []
        lines += [f"  {alternative}" for alternative in self.alternatives]
        reasons = Counter(_kind(entry.reason) for entry in self.found.rejected)
        for reason, count in reasons.most_common():
            example = next(entry for entry in self.found.rejected if _kind(entry.reason) == reason)
            lines.append(f"rejected {count}: {example.reason} ({example.layout})")
        if self.found.left:
            lines.append(f"{self.found.left} layouts {REASONS_NOT_EXAMINED[self.found.ended]}{self._gap}")
        if (best := self.found.ranked[0]).workload:
            lines += ["the best plan:", *(f"  {line}" for line in best.workload.text(best.figures))]
        lines += [f"  {line}" for line in best.places_text()] + self._other_placement(best)
        if guessed := self.found.ranked[0].guessed:
            lines.append(guess_note(guessed))
        return "\n".join([*lines, f"planned in {self.seconds:.1f} s"])

    def _other_placement(self, best: Estimate) -> list[str]:
        """Return lines about the best layout of the other placement on a cluster of several kinds of devices.

        Stages are on one kind each if the best layout has a stage on several kinds, and the other way round.
        """
        if not best.places:
            return []
        usable = (1 - self.reserve) * self.memory_bytes
        mixed = best.mixed
        fitting = [estimate for estimate in self.ask.known() if estimate.claimed_bytes <= usable]
        others = [estimate for estimate in fitting if estimate.mixed != mixed]
        if not others:
            return []
        other = min(others, key=lambda estimate: estimate.seconds)
        kind = "each stage on one kind of device" if mixed else "stages on several kinds, which wait for the slowest"
        lines = [f"the best found with {kind}: {time_of(other.seconds)}, {other.layout}"]
        return lines + [f"  {line}" for line in other.places_text()]

    @property
    def _simpler(self) -> str:
        if self.simpler is None:
            return ""
        simpler, best = self.simpler[0], self.found.ranked[0]
        more = f"{simpler.seconds / best.seconds - 1:.1%} slower, with {bytes_of(simpler.memory_bytes)}"
        return f"simpler, and nearly as fast: {simpler.layout} ({more})"

    @property
    def _gap(self) -> str:
        if self.found.complete:
            return ""
        if self.found.gap == 0:
            return "; the first plan is proven best all the same"
        return f"; by its bound, one of them may be up to {self.found.gap:.0%} better than the first plan"

    def svg(self) -> str:
        """Return a picture of all layouts that were priced and fit: memory to the right, time upwards.

        A line joins those that no other beats in both.
        """
        usable = (1 - self.reserve) * self.memory_bytes
        fitting = [estimate for estimate in self.ask.known() if estimate.memory_bytes <= usable]
        front = undominated(fitting)
        return front_svg(front, [estimate for estimate in fitting if estimate not in front])

    def _repr_html_(self) -> str:
        head, *rows = cells_of(self.found.ranked)
        title = f"{self.cluster}, a batch of {self.batch}: {len(self.plans)} plans, best first"
        plans = f"{table(head, rows, title)}{self.svg()}"
        if not self.found.rejected:
            return plans
        rejected = table(
            ["layout", "why not"], [(entry.layout, entry.reason) for entry in self.found.rejected[:MAX_SHOWN]]
        )
        many = f"{len(self.found.rejected)} rejected"
        return f"{plans}<details><summary>{many}</summary>{rejected}</details>"


def _kind(reason: str) -> str:
    """Return a reason without its numbers, so that equal kinds of reasons are counted together."""
    return "".join(c for c in reason if not c.isdigit() and c != ".")
