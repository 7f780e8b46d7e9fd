"""Time and memory of a layout, from its units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from ..cost_models.collectives import beside
from ..ir.cost_protocol import RankCosts
from .estimate import MOMENTS, Estimate, StageMemory
from .layouts import Layout
from .pipeline import pipeline
from .stage_units import ParameterGroup, StageUnit
from .stages import Slices, cut, held_by, send_seconds, stage_work


def evaluate(units: Sequence[StageUnit], layout: Layout, costs: RankCosts, begins: Sequence[str] = ()) -> Estimate:
    """Cut ``units`` into balanced stages (or where ``begins`` says), run the schedule, and add up.

    Raises:
        CompileError: QN206 if no unit begins where a stage should, QN208 for stages that the schedule does not have.
    """
    slices = Slices(layout, costs, layout.mesh)
    stages = cut(units, layout, costs, begins)
    work = [stage_work(stage, index == 0, slices) for index, stage in enumerate(stages)]
    run = pipeline(layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages, work)
    mine = [[stage for stage, home in enumerate(run.placement) if home == rank] for rank in range(layout.pp)]
    parts: list[list[StageUnit]] = [list(chain.from_iterable(stages[stage] for stage in found)) for found in mine]
    owners = Counter(name for part in parts for name in {name for unit in part for name in unit.tied})
    held = [held_by(part, owners) for part in parts]
    busy = [layout.microbatches * sum(work[stage].seconds for stage in found) for found in mine]
    fullest = busy.index(max(busy))
    moved: Counter[str] = Counter()
    for unit in parts[fullest]:
        for axis, seconds in unit.communication.items():
            moved[axis] += seconds * layout.microbatches  # type: ignore[assignment]
    sends = [send_seconds(stages[stage][0], costs, slices.mesh) for stage in mine[fullest] if stage]
    if sends and not costs.overlaps:  # else the way of a value is in the bubble, where anything waits for it
        moved["pp"] = 2 * sum(sends) * layout.microbatches  # type: ignore[assignment]
    uses = [slices.each_use(stages[stage]) for stage in mine[fullest]]
    if sliced := sum(ahead + back for ahead, back in uses):
        name = " x ".join(layout.zero_axes)
        moved[name] += sliced * layout.microbatches  # type: ignore[assignment]
    once = max(sum(unit.once for unit in part) for part in parts)
    if layout.zero in (1, 2):  # parameters come while the first forward computes
        ahead = [sum(unit.forward for unit in part) for part in parts]
        once += max(_waited(slices.gather(found), work, slices) for found, work in zip(held, ahead, strict=True))
    back = [sum(unit.backward for unit in part) for part in parts]  # gradients leave during the last backward
    settle = [_waited(slices.settle(found), work, slices) for found, work in zip(held, back, strict=True)]
    memory = tuple(_memory(found, run.saved[rank], parts[rank], slices) for rank, found in enumerate(held))
    return Estimate(
        layout,
        run.seconds + once,
        max(0.0, run.seconds - busy[fullest]),
        max(0.0, *settle),
        costs.optimizer_seconds(max(one.optimizer for one in memory) // MOMENTS),
        dict(moved),
        memory,
        tuple(stage[0].begin for stage in stages[1:]),
    )


def _waited(moved: float, work: float, slices: Slices) -> float:
    """Seconds that communication of parameters or gradients adds to ``work``, where a device does both at once."""
    return beside(work, moved, slices.lost) - work if slices.costs.overlaps else moved


def _memory(held: Sequence[ParameterGroup], saved: int, part: Sequence[StageUnit], slices: Slices) -> StageMemory:
    zero, working = slices.layout.zero, max(unit.working for unit in part)
    if zero == 3:  # a block's parameters, whole
        working += max(sum(one.read for one in (*unit.parameters, *unit.tied.values())) for unit in part)
    gradients = sum(one.gradients // (slices.ways(one) if zero >= 2 else 1) for one in held)
    # what an optimizer sees of sums that have more bits than the parameter
    gradients += sum(one.bytes // slices.ways(one) for one in held if one.widths.gradient != one.widths.held)
    moments = MOMENTS * sum(one.bytes // slices.ways(one) for one in held)
    return StageMemory(sum(_parameters(one, slices) for one in held), gradients, moments, saved, working)


def _parameters(held: ParameterGroup, slices: Slices) -> int:
    """What a rank stores, and the copies that operators read, whole where they are gathered at the start of a step.
    What is not copied is gathered in the memory where it is stored."""
    zero, ways = slices.layout.zero, slices.ways(held)
    if not held.widths.copied:
        return held.bytes // (ways if zero == 3 else 1)
    slice_of_copy = held.read // ways if ways > 1 else 0
    return held.bytes // ways + (slice_of_copy if zero == 3 else held.read)
