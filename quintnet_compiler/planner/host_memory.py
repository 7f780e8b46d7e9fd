"""Memory of hosts, compared with the other ways to make a step fit into device memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import CompileError
from ..features.answers import host_state, is_allowed, memory_savers
from ..features.feature import MemorySaver
from ..ir.cost_protocol import way_seconds
from ..ir.plan import Plan
from ..ir.plans.host_state import HostState
from .build import Builder
from .estimate import Estimate
from .layouts import Layout, RecomputeMode
from .planning import Planner, Pricing
from .search import Objective, SearchResult

COMPILE_SHARE = 0.015  # share of a search's work after which no further functions are compiled
MAX_PRICED = 40  # layouts that are priced
MOVED_SHARE = 0.9  # of the values of all blocks but the last, a lower bound of what leaves devices


@dataclass(frozen=True)
class Outside:
    """A search with more on hosts.

    Attributes:
        planner: with these decisions.
        note: what they gain, for people.
    """

    decisions: Mapping[str, Any]
    planner: Planner
    pricing: Pricing
    found: SearchResult[Layout, Estimate]
    note: str


@dataclass(frozen=True)
class HostMemory:
    """Layouts of a search that are faster than the best, but fit only with saved values or state on the host.

    Layouts with any recompute mode are tried. What the search proved holds for layouts with nothing on hosts.

    Attributes:
        planner: of the search with nothing on hosts.
        found: the result of this search.
        work: the work that this search could do.
    """

    planner: Planner
    pricing: Pricing
    found: SearchResult[Layout, Estimate]
    objective: Objective
    work: float

    def better(self, top_k: int) -> Outside | None:
        """Return the best ``top_k`` layouts with the best of what hosts can hold, if that is better than nothing.

        None where it is not, where the plan has decided what hosts hold, and for the objective ``"memory"``.
        """
        machine, large = self.planner.machine, self._large()
        if self.objective == "memory" or machine.unlike or machine.cluster.gpu is None or not large:
            return None
        best, best_value, build = None, self._value(self.found.ranked[0]), self.pricing.build
        leaving: Builder | None = None  # of functions from which values leave
        for saver in memory_savers():
            plan = self.planner.pinned.changed(saver.decisions, keep_open=True)
            host, is_decided = host_state(plan), not self.planner.pinned.model_fields_set.isdisjoint(saver.decisions)
            if is_decided or host == host_state(self.planner.pinned) or not is_allowed(plan):
                continue
            if host.values and leaving is None:
                leaving = build.deciding(plan)
            functions = leaving if host.values and leaving is not None else build
            layouts = _allowed(large, plan)
            if (outside := self._with(saver, functions, layouts, best_value, top_k)) is not None:
                best, best_value = outside, self._value(outside.found.ranked[0])
        return best

    def _with(
        self, saver: MemorySaver, functions: Builder, large: Sequence[Layout], best_value: float, top_k: int
    ) -> Outside | None:
        """Return the best layouts that cost less than ``best_value``; ``functions``: of plans with these decisions."""
        planner = replace(self.planner, pinned=self.planner.pinned.changed(saver.decisions, keep_open=True))
        host = host_state(planner.pinned)
        least = {mode: self._device_seconds(mode, host) for mode in dict.fromkeys(e.recompute for e in large)}
        bounds = {layout: self._weighed(layout, least[layout.recompute] / layout.mesh.size) for layout in large}
        near = [layout for layout in large if bounds[layout] < best_value]
        pricing = replace(self.pricing, build=replace(functions, plan=planner.pinned), known={}, run=set())
        ranked = self._priced(planner, pricing, near, best_value, top_k) if near else []
        if not ranked:
            return None
        value = self._value(ranked[0])
        without = self._value(self.found.ranked[0])
        note = f"{saver.text}: the best without takes {without / value - 1:.1%} more"
        gap = max(self.found.gap, 1 - min(bounds[layout] for layout in near) / value)
        return Outside(
            saver.decisions, planner, pricing, replace(self.found, ranked=tuple(ranked), ended="work", gap=gap), note
        )

    def _large(self) -> list[Layout]:
        """Return the layouts that take too much memory, of the splits that the search has compiled."""
        layouts = {e.layout: None for e in self.pricing.known.values() if e.claimed_bytes > self._memory}
        layouts |= {rejected.layout: None for rejected in self.found.rejected if 0 < rejected.lacks < math.inf}
        return [layout for layout in layouts if layout.sharded in self.pricing.build.found]

    def _priced(
        self, planner: Planner, pricing: Pricing, near: Sequence[Layout], best_value: float, top_k: int
    ) -> list[Estimate]:
        """Return the best layouts that fit on devices and hosts, of the fastest with nothing on hosts."""
        bounds = planner.bounds(self.pricing.build, planner.limits(self.objective), self._memory)
        update = self._update_seconds(host_state(planner.pinned))

        def may_be_better(layout: Layout) -> bool:
            if sum(bounds.state(layout)) > self._memory:
                return False
            return self._weighed(layout, bounds.seconds(layout) + update / layout.mesh.size) < best_value

        def rough_value(layout: Layout) -> tuple[float, Layout]:
            return self._weighed(layout, bounds.rough_seconds(layout)), layout

        estimates: list[Estimate] = []
        work_before = pricing.build.work
        for layout in sorted(filter(may_be_better, near), key=rough_value)[:MAX_PRICED]:
            may_compile = pricing.build.work - work_before <= COMPILE_SHARE * self.work
            if not may_compile and layout.inside not in pricing.build.learned:
                continue
            with suppress(CompileError):
                estimate = pricing(layout)
                fits = estimate.claimed_bytes <= self._memory and self._value(estimate) < best_value
                if fits and self._on_host(layout, estimate) <= self.planner.machine.host_bytes:
                    estimates = sorted([*estimates, estimate], key=lambda e: (self._value(e), e.layout))[:top_k]
        return estimates

    def _on_host(self, layout: Layout, estimate: Estimate) -> int:
        """Return host bytes of the rank with the most: state, and the saved values that the device no longer holds."""
        if host_state(self.planner.pinned).folder:
            return estimate.host_bytes
        plain = self.pricing(layout).memory
        pairs = zip(plain, estimate.memory, strict=False)
        return max(stage.saved - outside.saved + outside.host for stage, outside in pairs)

    def _device_seconds(self, recompute: RecomputeMode, host: HostState) -> float:
        """Return a lower bound of a step's seconds, times the devices.

        Saved values, parameters and gradients are copied out during the forward and in during the backward, and the
        optimizer computes on the host.
        """
        rows = self.planner.folded.program.batch_size
        whole = Layout(1, 1, 1, 1, 1, 1, rows, "all_gather", (), "1f1b", 1, recompute, 0, ())
        try:
            units = self.pricing.build(whole)
        except CompileError:
            return math.inf
        costs, out, back = self.planner.machine.costs, 0.0, 0.0
        if host.values:
            ways = ("to disk", "from disk") if host.folder else ("to host", "from host")
            saved = sum(unit.saved for unit in units[:-2])
            out, back = (MOVED_SHARE * way_seconds(costs, way, saved) for way in ways)
        moved = costs.copy_seconds(self.planner.parameter_bytes()) if host.parameters else 0.0
        forward, backward = sum(unit.forward for unit in units), sum(unit.backward for unit in units)
        return self._update_seconds(host) + max(out, moved, forward) + max(back, moved, backward)

    def _update_seconds(self, host: HostState) -> float:
        """Return seconds of updating all parameters on the host, times the devices; 0 if devices do that."""
        costs, size = self.planner.machine.costs, self.planner.parameter_bytes()
        return costs.host_update_seconds(size) if host.updates else 0.0

    @property
    def _memory(self) -> float:
        return self.planner.machine.memory_bytes * (1 - self.planner.machine.reserve)

    def _value(self, estimate: Estimate) -> float:
        return self._weighed(estimate.layout, estimate.seconds)

    def _weighed(self, layout: Layout, seconds: float) -> float:
        return seconds * (layout.mesh.size if self.objective == "cost" else 1)


def _allowed(layouts: Sequence[Layout], plan: Plan) -> list[Layout]:
    """Return layouts, with parameters in slices where a ZeRO stage is not allowed with what a plan decides."""
    stages = {layout.zero for layout in layouts}
    allowed = {stage for stage in stages if is_allowed(plan.changed({"zero": stage}, keep_open=True))}
    return list(dict.fromkeys(layout if layout.zero in allowed else replace(layout, zero=3) for layout in layouts))
