"""Time and memory of a layout, from its units."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from ..cost import RankCosts
from ..errors import CompileError
from ..mesh import Mesh
from ..passes.partition import balanced_starts
from ..schedule import RELEASES, Action, Op, chain, simulate
from ..schedule_kinds import SCHEDULES
from .layouts import Layout
from .units import Held, Unit

# AdamW as torch keeps it: two moments of the parameter's dtype
MOMENTS = 2


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank of a stage, at the schedule's peak."""

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    working: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.saved + self.working


@dataclass(frozen=True)
class Estimate:
    """What a layout costs. ``seconds``: of a step, which is ``pipeline`` (``bubble`` of it idle on the fullest stage),
    gradients that are summed after it (``gradients``) and the ``optimizer``. ``communication``: seconds on the fullest
    stage that computing waits for, by axis. ``begins``: where stages but the first begin."""

    layout: Layout
    pipeline: float
    bubble: float
    gradients: float
    optimizer: float
    communication: Mapping[str, float]
    memory: tuple[StageMemory, ...]
    begins: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.pipeline + self.gradients + self.optimizer

    @property
    def memory_bytes(self) -> int:
        """Of the fullest rank."""
        return max(stage.total for stage in self.memory)

    @property
    def exposed(self) -> float:
        """Seconds that the fullest stage waits for communication."""
        return sum(self.communication.values()) + self.gradients

    def numbers(self) -> dict[str, Any]:
        """Everything, in seconds and bytes."""
        return {
            "layout": str(self.layout),
            "step_seconds": self.seconds,
            "pipeline_seconds": self.pipeline,
            "bubble_seconds": self.bubble,
            "gradient_seconds": self.gradients,
            "optimizer_seconds": self.optimizer,
            "communication_seconds": dict(self.communication),
            "memory_bytes": self.memory_bytes,
            "stage_memory_bytes": [vars(stage) | {"total": stage.total} for stage in self.memory],
            "stages": list(self.begins),
        }

    def to_json(self) -> str:
        return json.dumps(self.numbers(), indent=2)

    def __str__(self) -> str:
        fullest = max(self.memory, key=lambda stage: stage.total)
        parts = ", ".join(f"{name} {gib(size)}" for name, size in vars(fullest).items())
        waits = ", ".join(f"{axis} {time_of(seconds)}" for axis, seconds in self.communication.items())
        return "\n".join(
            [
                f"{self.layout}",
                f"step {time_of(self.seconds)}: pipeline {time_of(self.pipeline)} (bubble {time_of(self.bubble)}), "
                f"gradients {time_of(self.gradients)}, optimizer {time_of(self.optimizer)}",
                f"communication on the fullest stage: {waits or 'none'}",
                f"memory of the fullest rank {gib(fullest.total)}: {parts}",
            ]
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def time_of(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def estimate(units: Sequence[Unit], layout: Layout, costs: RankCosts, begins: Sequence[str] = ()) -> Estimate:
    """Cut ``units`` into balanced stages (or where ``begins`` says), run the schedule, and add up.

    Raises:
        CompileError: QN206 if no unit begins where a stage should.
    """
    mesh = layout.mesh
    starts = _named_starts(units, begins) if begins else _starts(units, layout, costs, mesh)
    stages = [units[a:b] for a, b in zip([0, *starts], [*starts, len(units)], strict=True)]
    sends = [_send(stage[0], costs, mesh) if index else 0.0 for index, stage in enumerate(stages)]
    times = {}
    for stage, (part, send) in enumerate(zip(stages, sends, strict=True)):
        # a stage waits for what it receives; gradients go back the same way
        times[stage, Op.FORWARD] = sum(unit.forward for unit in part) + send
        times[stage, Op.BACKWARD] = sum(unit.backward for unit in part) + send
    schedule = SCHEDULES[layout.schedule](layout.pp, layout.microbatches)
    lines = simulate(schedule, chain(layout.pp), lambda action: times[action.stage, action.op])
    length = max(line[-1].end for line in lines)
    once = max(sum(unit.once for unit in stage) for stage in stages)
    busiest = max(range(layout.pp), key=lambda stage: times[stage, Op.FORWARD] + times[stage, Op.BACKWARD])
    busy = layout.microbatches * (times[busiest, Op.FORWARD] + times[busiest, Op.BACKWARD])
    moved: Counter[str] = Counter()
    for unit in stages[busiest]:
        for axis, seconds in unit.communication.items():
            moved[axis] += seconds * layout.microbatches  # type: ignore[assignment]
    if layout.pp > 1:
        moved["pp"] = 2 * sends[busiest] * layout.microbatches  # type: ignore[assignment]
    owners = Counter(name for stage in stages for name in {name for unit in stage for name in unit.tied})
    held = [_held(stage, owners) for stage in stages]
    settle = max(_settle(found, costs, mesh) - _hidden(stage, costs) for found, stage in zip(held, stages, strict=True))
    sizes = [sum(one.bytes for one in found) for found in held]
    memory = tuple(
        StageMemory(
            size, size, MOMENTS * size, _in_flight(schedule.actions[index]) * sum(unit.saved for unit in stage),
            max(unit.working for unit in stage),
        )
        for index, (size, stage) in enumerate(zip(sizes, stages, strict=True))
    )  # fmt: skip
    return Estimate(
        layout, length + once, max(0.0, length - busy), max(0.0, settle), costs.optimizer_seconds(max(sizes)),
        dict(moved), memory, tuple(stage[0].begin for stage in stages[1:]),
    )  # fmt: skip


def _send(unit: Unit, costs: RankCosts, mesh: Mesh) -> float:
    return costs.send_seconds(unit.received, 0, mesh.rank({"pp": 1}))


def _named_starts(units: Sequence[Unit], begins: Sequence[str]) -> list[int]:
    places = {unit.begin: index for index, unit in enumerate(units)}
    for name in begins:
        if name not in places:
            raise CompileError(
                "QN206", f"{name} lies inside a block, and estimates cut between blocks", fix="leave `stages` open"
            )
    return [places[name] for name in begins]


def _starts(units: Sequence[Unit], layout: Layout, costs: RankCosts, mesh: Mesh) -> list[int]:
    if layout.pp == 1:
        return []
    work = np.concatenate([[0.0], np.cumsum([unit.forward + unit.backward for unit in units])])
    sends = np.array([0.0, *(2 * _send(unit, costs, mesh) for unit in units[1:]), 0.0])
    return balanced_starts(work[None, :] - work[:, None] + sends[:, None], layout.pp)


def _held(stage: Sequence[Unit], stages: Mapping[str, int]) -> list[Held]:
    """What a stage holds, by the axes over which gradients are summed: ``pp`` for what several stages have."""
    found: Counter[tuple[str, ...]] = Counter()
    for unit in stage:
        for one in unit.parameters:
            found[one.axes] += one.bytes
    for name, one in {name: one for unit in stage for name, one in unit.tied.items()}.items():
        found[(*one.axes, "pp") if stages[name] > 1 else one.axes] += one.bytes
    return [Held(size, axes) for axes, size in sorted(found.items())]


def _settle(held: Sequence[Held], costs: RankCosts, mesh: Mesh) -> float:
    """Sums of gradients: over the ranks of their axes, and for what is in two stages over those."""
    total = 0.0
    for one in held:
        inside = mesh.peers(0, [axis for axis in one.axes if axis != "pp"])
        if len(inside) > 1:
            total += costs.group_seconds("all_reduce", one.bytes, inside)
        if "pp" in one.axes:
            total += costs.group_seconds("all_reduce", one.bytes, (0, mesh.rank({"pp": mesh["pp"] - 1})))
    return total


def _hidden(stage: Sequence[Unit], costs: RankCosts) -> float:
    """Seconds of the last backward beside which gradients are summed, where a device does both at once."""
    return sum(unit.backward for unit in stage) if costs.overlaps else 0.0


def _in_flight(row: Sequence[Action]) -> int:
    """How many microbatches' saved values a rank holds at most."""
    now = most = 0
    for action in row:
        now += (action.op is Op.FORWARD) - (action.op in RELEASES)
        most = max(most, now)
    return most
