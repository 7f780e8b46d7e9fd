"""Offloading to the host, compared with the other ways to make a step fit into device memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..core.errors import CompileError
from ..ir.cost_protocol import way_seconds
from ..ir.plan import HOSTED, Offloaded, Plan
from .build import Builder
from .estimate import Estimate
from .layouts import Layout, RecomputeMode
from .planning import Planner, Pricing
from .search import Objective, SearchResult

# offloads that are tried, with their descriptions
OFFLOADS: Mapping[tuple[Offloaded, ...], str] = MappingProxyType(
    {
        ("activations",): "saved values wait in host memory (offload)",
        ("optimizer",): "the optimizer computes on the host (offload)",
        ("activations", "optimizer"): "saved values wait in host memory, and the optimizer computes there (offload)",
        ("parameters",): "parameters, gradients and the optimizer are on the host (offload)",
        ("activations", "parameters"): "all that can wait in host memory does (offload)",
    }
)
COMPILE_SHARE = 0.015  # share of a search's work after which no further functions are compiled
MAX_PRICED = 40  # layouts that are priced
MOVED_SHARE = 0.9  # of the values of all blocks but the last, a lower bound of what is offloaded


@dataclass(frozen=True)
class Outside:
    """A search with offloading.

    Attributes:
        planner: with these decisions.
        note: what offloading gains, for people.
    """

    decisions: Mapping[str, Any]
    planner: Planner
    pricing: Pricing
    found: SearchResult[Layout, Estimate]
    note: str


@dataclass(frozen=True)
class HostMemory:
    """Layouts of a search that are faster than the best, but fit only with saved values or state on the host.

    Layouts with any recompute mode are tried. What the search proved holds for layouts without offload.

    Attributes:
        planner: of the search without offload.
        found: the result of this search.
        work: the work that this search could do.
    """

    planner: Planner
    pricing: Pricing
    found: SearchResult[Layout, Estimate]
    objective: Objective
    work: float

    def better(self, top_k: int) -> Outside | None:
        """Return the best ``top_k`` layouts with the best offload, if that is better than none.

        None where it is not, where the plan has decided ``offload``, and for the objective ``"memory"``.
        """
        is_decided, machine = "offload" in self.planner.pinned.model_fields_set, self.planner.machine
        if is_decided or self.objective == "memory" or machine.unlike or machine.cluster.gpu is None:
            return None
        best, best_value = None, self._value(self.found.ranked[0])
        large, build = self._large(), self.pricing.build
        moved = build.deciding(build.plan.changed({"offload": ("activations",)}, keep_open=True))
        for offload in OFFLOADS if large else ():
            if not is_possible(offload, self.planner.pinned):
                continue
            functions, layouts = moved if "activations" in offload else build, large
            if "parameters" in offload:
                layouts = list({layout if layout.zero in HOSTED else replace(layout, zero=3): None for layout in large})
            if (outside := self._with(offload, functions, layouts, best_value, top_k)) is not None:
                best, best_value = outside, self._value(outside.found.ranked[0])
        return best

    def _with(
        self, offload: tuple[Offloaded, ...], functions: Builder, large: Sequence[Layout], best_value: float, top_k: int
    ) -> Outside | None:
        """Return the best layouts that cost less than ``best_value``; ``functions``: of plans with these offloads."""
        least = {mode: self._device_seconds(mode, offload) for mode in dict.fromkeys(e.recompute for e in large)}
        bounds = {layout: self._weighed(layout, least[layout.recompute] / layout.mesh.size) for layout in large}
        near = [layout for layout in large if bounds[layout] < best_value]
        decisions = {"offload": offload}
        planner = replace(self.planner, pinned=self.planner.pinned.changed(decisions, keep_open=True))
        pricing = replace(self.pricing, build=replace(functions, plan=planner.pinned), known={}, run=set())
        ranked = self._priced(planner, pricing, near, best_value, top_k) if near else []
        if not ranked:
            return None
        value = self._value(ranked[0])
        without = self._value(self.found.ranked[0])
        note = f"{OFFLOADS[offload]}: the best without takes {without / value - 1:.1%} more"
        gap = max(self.found.gap, 1 - min(bounds[layout] for layout in near) / value)
        return Outside(
            decisions, planner, pricing, replace(self.found, ranked=tuple(ranked), ended="work", gap=gap), note
        )

    def _large(self) -> list[Layout]:
        """Return the layouts that take too much memory, of the splits that the search has compiled."""
        layouts = {e.layout: None for e in self.pricing.known.values() if e.claimed_bytes > self._memory}
        layouts |= {rejected.layout: None for rejected in self.found.rejected if 0 < rejected.lacks < math.inf}
        return [layout for layout in layouts if layout.sharded in self.pricing.build.found]

    def _priced(
        self, planner: Planner, pricing: Pricing, near: Sequence[Layout], best_value: float, top_k: int
    ) -> list[Estimate]:
        """Return the best layouts that fit on devices and hosts, of those that are the fastest without offload."""
        bounds = planner.bounds(self.pricing.build, planner.limits(self.objective), self._memory)
        update = self._update_seconds(planner.pinned.offload)

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
        if self.planner.pinned.offload_folder:
            return estimate.host_bytes
        plain = self.pricing(layout).memory
        pairs = zip(plain, estimate.memory, strict=False)
        return max(stage.saved - offloaded.saved + offloaded.host for stage, offloaded in pairs)

    def _device_seconds(self, recompute: RecomputeMode, offload: tuple[Offloaded, ...]) -> float:
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
        if "activations" in offload:
            ways = ("to disk", "from disk") if self.planner.pinned.offload_folder else ("to host", "from host")
            saved = sum(unit.saved for unit in units[:-2])
            out, back = (MOVED_SHARE * way_seconds(costs, way, saved) for way in ways)
        moved = costs.copy_seconds(self.planner.parameter_bytes()) if "parameters" in offload else 0.0
        forward, backward = sum(unit.forward for unit in units), sum(unit.backward for unit in units)
        return self._update_seconds(offload) + max(out, moved, forward) + max(back, moved, backward)

    def _update_seconds(self, offload: tuple[Offloaded, ...]) -> float:
        """Return seconds of updating all parameters on the host, times the devices; 0 if devices do that."""
        costs, size = self.planner.machine.costs, self.planner.parameter_bytes()
        return 0.0 if {*offload} <= {"activations"} else costs.host_update_seconds(size)

    @property
    def _memory(self) -> float:
        return self.planner.machine.memory_bytes * (1 - self.planner.machine.reserve)

    def _value(self, estimate: Estimate) -> float:
        return self._weighed(estimate.layout, estimate.seconds)

    def _weighed(self, layout: Layout, seconds: float) -> float:
        return seconds * (layout.mesh.size if self.objective == "cost" else 1)


def is_possible(offload: tuple[Offloaded, ...], pinned: Plan) -> bool:
    """Return whether the decisions of a pinned plan allow this offload."""
    decided = "zero" in pinned.model_fields_set and pinned.zero not in HOSTED
    return not (decided and "parameters" in offload)
