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
from ..schedule_synthesis import StageTimes, schedule_of
from .layouts import Layout
from .units import Held, Unit

# AdamW as torch keeps it: two moments of the parameter's dtype
MOMENTS = 2


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the rank at one place of the pipeline, at the schedule's peak."""

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
    """What a layout costs. ``seconds``: of a step, which is ``pipeline`` (``bubble`` of it idle on the busiest rank),
    gradients that are summed after it (``gradients``) and the ``optimizer``. ``communication``: seconds on the busiest
    rank that computing waits for, by axis. ``memory``: along the pipeline. ``begins``: where stages but the first
    begin."""

    layout: Layout
    pipeline: float
    bubble: float
    gradients: float
    optimizer: float
    communication: Mapping[str, float]
    memory: tuple[RankMemory, ...]
    begins: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.pipeline + self.gradients + self.optimizer

    @property
    def memory_bytes(self) -> int:
        """Of the fullest rank."""
        return max(rank.total for rank in self.memory)

    @property
    def exposed(self) -> float:
        """Seconds that the busiest rank waits for communication."""
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
            "rank_memory_bytes": [vars(rank) | {"total": rank.total} for rank in self.memory],
            "stages": list(self.begins),
        }

    def to_json(self) -> str:
        return json.dumps(self.numbers(), indent=2)

    def __str__(self) -> str:
        fullest = max(self.memory, key=lambda rank: rank.total)
        parts = ", ".join(f"{name} {gib(size)}" for name, size in vars(fullest).items())
        waits = ", ".join(f"{axis} {time_of(seconds)}" for axis, seconds in self.communication.items())
        return "\n".join(
            [
                f"{self.layout}",
                f"step {time_of(self.seconds)}: pipeline {time_of(self.pipeline)} (bubble {time_of(self.bubble)}), "
                f"gradients {time_of(self.gradients)}, optimizer {time_of(self.optimizer)}",
                f"communication on the busiest rank: {waits or 'none'}",
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
    count = layout.pp * layout.virtual_stages
    starts = _named_starts(units, begins) if begins else _starts(units, count, costs, mesh)
    stages = [units[a:b] for a, b in zip([0, *starts], [*starts, len(units)], strict=True)]
    schedule = schedule_of(
        layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages, lambda: [_times(s) for s in stages]
    )
    home = schedule.placement
    alone = [stage == 0 or home[stage] == home[stage - 1] for stage in range(len(home))]
    sends = [0.0 if free else _send(part[0], costs, mesh) for free, part in zip(alone, stages, strict=True)]
    times = {}
    for stage, (part, send) in enumerate(zip(stages, sends, strict=True)):
        # a stage waits for what it receives; gradients go back the same way
        backward = sum(unit.backward for unit in part)
        times[stage, Op.FORWARD] = sum(unit.forward for unit in part) + send
        times[stage, Op.BACKWARD] = backward + send
        # the halves of a backward are taken to be equal
        times[stage, Op.BACKWARD_INPUT], times[stage, Op.BACKWARD_WEIGHT] = backward / 2 + send, backward / 2
    lines = simulate(schedule, chain(schedule.num_stages), lambda action: times[action.stage, action.op])
    length = max(line[-1].end for line in lines)
    mine = [[stage for stage, rank in enumerate(home) if rank == here] for here in range(layout.pp)]
    work = [[unit for stage in own for unit in stages[stage]] for own in mine]
    once = max(sum(unit.once for unit in part) for part in work)
    busiest = max(
        range(layout.pp), key=lambda rank: sum(times[s, Op.FORWARD] + times[s, Op.BACKWARD] for s in mine[rank])
    )
    busy = layout.microbatches * sum(times[s, Op.FORWARD] + times[s, Op.BACKWARD] for s in mine[busiest])
    moved: Counter[str] = Counter()
    for unit in work[busiest]:
        for axis, seconds in unit.communication.items():
            moved[axis] += seconds * layout.microbatches  # type: ignore[assignment]
    if layout.pp > 1:
        moved["pp"] = 2 * sum(sends[s] for s in mine[busiest]) * layout.microbatches  # type: ignore[assignment]
    owners = Counter(name for part in work for name in {name for unit in part for name in unit.tied})
    held = [_held(part, owners) for part in work]
    saved = [sum(unit.saved for unit in part) for part in stages]
    # beside the last backward of a rank's first stage, its gradients are summed
    settle = max(
        _settle(found, costs, mesh) - _hidden(stages[own[0]], costs) for found, own in zip(held, mine, strict=True)
    )
    sizes = [sum(one.bytes for one in found) for found in held]
    memory = tuple(
        RankMemory(
            size, size, MOMENTS * size, _most_saved(schedule.actions[rank], saved), max(unit.working for unit in part)
        )
        for rank, (size, part) in enumerate(zip(sizes, work, strict=True))
    )
    return Estimate(
        layout, length + once, max(0.0, length - busy), max(0.0, settle), costs.optimizer_seconds(max(sizes)),
        dict(moved), memory, tuple(stage[0].begin for stage in stages[1:]),
    )  # fmt: skip


def _times(stage: Sequence[Unit]) -> StageTimes:
    half = sum(unit.backward for unit in stage) / 2
    return StageTimes(sum(unit.forward for unit in stage), half, half)


def _send(unit: Unit, costs: RankCosts, mesh: Mesh) -> float:
    """To a stage that begins with ``unit``, from another rank."""
    return costs.send_seconds(unit.received, 0, mesh.rank({"pp": 1})) if mesh["pp"] > 1 else 0.0


def _named_starts(units: Sequence[Unit], begins: Sequence[str]) -> list[int]:
    places = {unit.begin: index for index, unit in enumerate(units)}
    for name in begins:
        if name not in places:
            raise CompileError(
                "QN206", f"{name} lies inside a block, and estimates cut between blocks", fix="leave `stages` open"
            )
    return [places[name] for name in begins]


def _starts(units: Sequence[Unit], num_stages: int, costs: RankCosts, mesh: Mesh) -> list[int]:
    if num_stages == 1:
        return []
    work = np.concatenate([[0.0], np.cumsum([unit.forward + unit.backward for unit in units])])
    sends = np.array([0.0, *(2 * _send(unit, costs, mesh) for unit in units[1:]), 0.0])
    return balanced_starts(work[None, :] - work[:, None] + sends[:, None], num_stages)


def _held(part: Sequence[Unit], ranks: Mapping[str, int]) -> list[Held]:
    """What a rank holds, by the axes over which gradients are summed: ``pp`` for what several of them have."""
    found: Counter[tuple[str, ...]] = Counter()
    for unit in part:
        for one in unit.parameters:
            found[one.axes] += one.bytes
    for name, one in {name: one for unit in part for name, one in unit.tied.items()}.items():
        found[(*one.axes, "pp") if ranks[name] > 1 else one.axes] += one.bytes
    return [Held(size, axes) for axes, size in sorted(found.items())]


def _settle(held: Sequence[Held], costs: RankCosts, mesh: Mesh) -> float:
    """Sums of gradients: over the ranks of their axes, and for what two ranks of a pipeline have over those."""
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


def _most_saved(row: Sequence[Action], saved: Sequence[int]) -> int:
    """The most bytes that a rank saves at once; ``saved``: of one microbatch of each stage."""
    now = most = 0
    for action in row:
        now += saved[action.stage] * ((action.op is Op.FORWARD) - (action.op in RELEASES))
        most = max(most, now)
    return most
