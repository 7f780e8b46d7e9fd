"""Whether a step is faster with saved values, the optimizer, or parameters on the host than with what else makes it
fit."""

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
from .layouts import Again, Layout
from .planning import Planner, Pricing
from .search import Objective, SearchResult

# what is tried, and what is said of it
OFFLOADS: Mapping[tuple[Offloaded, ...], str] = MappingProxyType(
    {
        ("activations",): "saved values wait in host memory (offload)",
        ("optimizer",): "the optimizer computes on the host (offload)",
        ("activations", "optimizer"): "saved values wait in host memory, and the optimizer computes there (offload)",
        ("parameters",): "parameters, gradients and the optimizer are on the host (offload)",
        ("activations", "parameters"): "all that can wait in host memory does (offload)",
    }
)
SHARE = 0.015  # of a search's work: with more, no further functions are compiled
MOST = 40  # of them are priced, at most
LENIENT = 0.9  # of what a step would take if all but the last block's values moved: some stay


@dataclass(frozen=True)
class Outside:
    """A search with something on the host: what was decided, a ``planner`` that has decided so, its ``pricing``, what
    it ``found``, and what that gains, for people."""

    decisions: Mapping[str, Any]
    planner: Planner
    pricing: Pricing
    found: SearchResult[Layout, Estimate]
    note: str


@dataclass(frozen=True)
class HostMemory:
    """Layouts of a search that would be faster than the best that fits, and take too much memory: with saved values on
    the host, or the optimizer, or parameters, they may fit. Recomputing is a layout's own decision, so that all are
    tried together, too.

    ``found``: what the search with ``planner`` and ``pricing`` found; ``work``: how much it could do. What was proven
    of it holds for layouts without offload.
    """

    planner: Planner
    pricing: Pricing
    found: SearchResult[Layout, Estimate]
    objective: Objective
    work: float

    def better(self, top_k: int) -> Outside | None:
        """The best ``top_k`` with the offload that is best, if they are better than the best without. None where none
        is, where the plan has decided it, and for the least memory."""
        given, machine = "offload" in self.planner.pinned.model_fields_set, self.planner.machine
        if given or self.objective == "memory" or machine.unlike or machine.cluster.gpu is None:
            return None
        best, most = None, self._value(self.found.ranked[0])
        large, build = self._large(), self.pricing.build
        moved = build.deciding(build.plan.changed({"offload": ("activations",)}, keep_open=True))
        for offload in OFFLOADS if large else ():
            if not possible(offload, self.planner.pinned):
                continue
            functions, some = moved if "activations" in offload else build, large
            if "parameters" in offload:
                some = list({one if one.zero in HOSTED else replace(one, zero=3): None for one in large})
            if (found := self._with(offload, functions, some, most, top_k)) is not None:
                best, most = found, self._value(found.found.ranked[0])
        return best

    def _with(
        self, offload: tuple[Offloaded, ...], functions: Builder, large: Sequence[Layout], most: float, top_k: int
    ) -> Outside | None:
        """The best that cost less than ``most``. ``functions``: of all plans with the same values on the host."""
        least = {kind: self._least(kind, offload) for kind in dict.fromkeys(layout.recompute for layout in large)}
        bounds = {one: self._weighed(one, least[one.recompute] / one.mesh.size) for one in large}
        near = [one for one in large if bounds[one] < most]
        decisions = {"offload": offload}
        here = replace(self.planner, pinned=self.planner.pinned.changed(decisions, keep_open=True))
        pricing = replace(self.pricing, build=replace(functions, plan=here.pinned), known={}, run=set())
        ranked = self._priced(here, pricing, near, most, top_k) if near else []
        if not ranked:
            return None
        now = self._value(ranked[0])
        without = self._value(self.found.ranked[0])
        note = f"{OFFLOADS[offload]}: the best without takes {without / now - 1:.1%} more"
        gap = max(self.found.gap, 1 - min(bounds[one] for one in near) / now)
        return Outside(decisions, here, pricing, replace(self.found, ranked=tuple(ranked), ended="work", gap=gap), note)

    def _large(self) -> list[Layout]:
        """What takes too much memory, of the splits that the search has compiled."""
        found = {e.layout: None for e in self.pricing.known.values() if e.claimed_bytes > self._memory}
        found |= {one.layout: None for one in self.found.rejected if 0 < one.lacks < math.inf}
        return [layout for layout in found if layout.sharded in self.pricing.build.found]

    def _priced(
        self, here: Planner, pricing: Pricing, near: Sequence[Layout], most: float, top_k: int
    ) -> list[Estimate]:
        """The best that fit on devices and hosts and cost less than ``most``, of those that are the most promising
        without offload."""
        bounds = here.bounds(self.pricing.build, here.limits(self.objective), self._memory)
        update = self._update(here.pinned.offload)
        some = [one for one in near if sum(bounds.state(one)) <= self._memory]
        some = [one for one in some if self._weighed(one, bounds.seconds(one) + update / one.mesh.size) < most]
        found: list[Estimate] = []
        before = pricing.build.work
        for layout in sorted(some, key=lambda one: (self._weighed(one, bounds.guess(one)), one))[:MOST]:
            if pricing.build.work - before > SHARE * self.work and layout.inside not in pricing.build.learned:
                continue
            with suppress(CompileError):
                one = pricing(layout)
                fits = one.claimed_bytes <= self._memory and self._value(one) < most
                if fits and self._on_host(layout, one) <= self.planner.machine.host_bytes:
                    found = sorted([*found, one], key=lambda e: (self._value(e), e.layout))[:top_k]
        return found

    def _on_host(self, layout: Layout, found: Estimate) -> int:
        """Bytes of the rank with the most: what an optimizer has there, and what it saves on the device without
        offload, and does not with it, nor in files."""
        if self.planner.pinned.offload_folder:
            return found.host_bytes
        plain = self.pricing(layout).memory
        return max(one.saved - other.saved + other.host for one, other in zip(plain, found.memory, strict=False))

    def _least(self, recompute: Again, offload: tuple[Offloaded, ...]) -> float:
        """What a step takes at least, times the devices: each copies its share of values out beside its share of the
        forward, and in beside that of the backward, parameters in and gradients out likewise, and updates its share of
        the parameters on the host."""
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
            out, back = (LENIENT * way_seconds(costs, way, saved) for way in ways)
        moved = costs.copy_seconds(self.planner.parameter_bytes()) if "parameters" in offload else 0.0
        ahead, behind = sum(unit.forward for unit in units), sum(unit.backward for unit in units)
        return self._update(offload) + max(out, moved, ahead) + max(back, moved, behind)

    def _update(self, offload: tuple[Offloaded, ...]) -> float:
        """Seconds that updating all parameters on hosts takes, times the devices, if that is where it is done."""
        costs, size = self.planner.machine.costs, self.planner.parameter_bytes()
        return 0.0 if {*offload} <= {"activations"} else costs.host_update_seconds(size)

    @property
    def _memory(self) -> float:
        return self.planner.machine.memory_bytes * (1 - self.planner.machine.reserve)

    def _value(self, found: Estimate) -> float:
        return self._weighed(found.layout, found.seconds)

    def _weighed(self, layout: Layout, seconds: float) -> float:
        return seconds * (layout.mesh.size if self.objective == "cost" else 1)


def possible(offload: tuple[Offloaded, ...], pinned: Plan) -> bool:
    """Whether a plan that has decided as ``pinned`` can have this on hosts."""
    decided = "zero" in pinned.model_fields_set and pinned.zero not in HOSTED
    return not (decided and "parameters" in offload)
