"""Time and memory of a layout, from its units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from ..cost_models.collectives import beside
from .estimate import MOMENTS, Estimate, PlaceLoad, StageMemory
from .layouts import Layout
from .pipeline import pipeline
from .places import Place, alike, placement
from .stage_units import ParameterGroup, StageUnit
from .stages import Slices, Stages, cut_places, held_by, send_seconds, stage_work


def evaluate(places: Sequence[Place], layout: Layout, begins: Sequence[str] = ()) -> Estimate:
    """Cut the model into stages that are balanced as their ``places`` run them (or where ``begins`` says), run the
    schedule, and add up. Where places are unlike and a stage does not fit its devices, stages are cut again, by memory
    too.

    Raises:
        CompileError: QN206 if no unit begins where a stage should, QN208 for stages that the schedule does not have.
    """
    of = {id(place): Slices(layout, place.costs, layout.mesh) for place in places}
    slices = [of[id(place)] for place in places]
    found = _of_stages(cut_places(places, layout, begins), places, layout, slices)
    if begins or all(one.total <= place.memory_bytes for one, place in zip(found.memory, places, strict=True)):
        return found

    def state(unit: StageUnit, place: Place) -> float:
        held = [*unit.parameters, *unit.tied.values()]
        return _memory(held, 0, [unit], of[id(place)]).total - _working([unit], of[id(place)])

    return _of_stages(cut_places(places, layout, state=state), places, layout, slices)


def _of_stages(stages: Stages, places: Sequence[Place], layout: Layout, slices: Sequence[Slices]) -> Estimate:
    home = placement(layout)
    ways = list(zip([0, *home], home, strict=False))
    alone = [index == 0 or ways[index][0] == ways[index][1] for index in range(len(stages))]  # nothing is sent to it
    came = [0 if first else stage[0].crossing for first, stage in zip(alone, stages, strict=True)]
    sent = [*came[1:], 0]
    work = tuple(
        stage_work(stage, alone[index], slices[home[index]], ways[index], sent[index])
        for index, stage in enumerate(stages)
    )
    run = pipeline(
        layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages, work,
        None if alike(places) else home,
    )  # fmt: skip
    mine = [[stage for stage, there in enumerate(run.placement) if there == rank] for rank in range(layout.pp)]
    parts: list[list[StageUnit]] = [list(chain.from_iterable(stages[stage] for stage in found)) for found in mine]
    owners = Counter(name for part in parts for name in {name for unit in part for name in unit.tied})
    held = [held_by(part, owners) for part in parts]
    busy = [layout.microbatches * sum(work[stage].seconds for stage in found) for found in mine]
    fullest = busy.index(max(busy))
    costs = places[fullest].costs
    moved: Counter[str] = Counter()
    for unit in parts[fullest]:
        for axis, seconds in unit.communication.items():
            moved[axis] += seconds * layout.microbatches  # type: ignore[assignment]
    if not costs.overlaps:  # else the way of a value is in the bubble, where anything waits for it
        sends = [send_seconds(stages[stage][0], costs, layout.mesh, ways[stage]) for stage in mine[fullest] if stage]
        if sends:
            moved["pp"] = 2 * sum(sends) * layout.microbatches  # type: ignore[assignment]
    uses = [slices[fullest].each_use(stages[stage]) for stage in mine[fullest]]
    if sliced := sum(ahead + back for ahead, back in uses):
        name = " x ".join(layout.zero_axes)
        moved[name] += sliced * layout.microbatches  # type: ignore[assignment]
    once = max(sum(unit.once for unit in part) for part in parts)
    ends = [_first_message(part, owners) for part in parts]
    each = list(zip(slices, held, ends, parts, strict=True))
    if layout.zero in (1, 2):  # parameters come while the first forward computes
        once += max(
            _waited(one.gather(found), share * one.gather(end), sum(unit.forward for unit in part), one)
            for one, found, (share, end), part in each
        )
    settle = [  # gradients leave during the last backward
        _waited(one.settle(found), share * one.settle(end), sum(unit.backward for unit in part), one)
        for one, found, (share, end), part in each
    ]
    # of each way, what is used or sent, and the next microbatch's, for which there is a buffer already
    buffers = [min(2, layout.microbatches) * sum(came[stage] + sent[stage] for stage in found) for found in mine]
    memory = tuple(
        _memory(found, run.saved[rank], parts[rank], slices[rank], buffers[rank]) for rank, found in enumerate(held)
    )
    step = [place.costs.optimizer_seconds(one.optimizer // MOMENTS) for place, one in zip(places, memory, strict=True)]
    return Estimate(
        layout,
        run.seconds + once,
        max(0.0, run.seconds - busy[fullest]),
        max(0.0, *settle),
        max(step),
        dict(moved),
        memory,
        tuple(stage[0].begin for stage in stages[1:]),
        places=() if not places[0].devices else tuple(
            PlaceLoad(place.devices, len(part), seconds, place.memory_bytes, place.room, place.alone)
            for place, part, seconds in zip(places, parts, busy, strict=True)
        ),
    )  # fmt: skip


def _first_message(part: Sequence[StageUnit], owners: Mapping[str, int]) -> tuple[float, list[ParameterGroup]]:
    """A share of parameters: those that a place's first operators read, whose gradients are ready last."""
    first = next((unit for unit in part if unit.parameters or unit.tied), part[0])
    return first.bucket, held_by([first], owners)


def _waited(moved: float, alone: float, work: float, slices: Slices) -> float:
    """Seconds that communication of parameters or gradients adds to ``work``, where a device does both at once, all but
    what is ``alone``: nothing is left to compute beside the first, or last, message."""
    return alone + beside(work, moved - alone, slices.lost) - work if slices.costs.overlaps else moved


def _memory(
    held: Sequence[ParameterGroup], saved: int, part: Sequence[StageUnit], slices: Slices, buffers: int = 0
) -> StageMemory:
    """``buffers``: bytes of messages to and from other places."""
    zero, working = slices.layout.zero, _working(part, slices) + buffers
    gradients = sum(one.gradients // (slices.ways(one) if zero >= 2 else 1) for one in held)
    # what an optimizer sees of sums that have more bits than the parameter
    gradients += sum(one.bytes // slices.ways(one) for one in held if one.widths.gradient != one.widths.held)
    moments = MOMENTS * sum(one.bytes // slices.ways(one) for one in held)
    return StageMemory(sum(_parameters(one, slices) for one in held), gradients, moments, saved, working)


def _working(part: Sequence[StageUnit], slices: Slices) -> int:
    """Of ZeRO 2 and 3, with what is whole while a unit's backward runs: its gradients, those of the unit behind it in a
    message, with its slice and that of the message before; of 3 also its parameters, and those of the unit in front of
    it, which arrive."""
    zero, found = slices.layout.zero, 0
    if zero < 2:
        return max(unit.working for unit in part)
    held = [(), *([*unit.parameters, *unit.tied.values()] for unit in part), ()]
    for unit, front, mine, behind in zip(part, held, held[1:], held[2:], strict=False):
        whole = sum(one.gradients for one in mine)
        whole += sum(one.reduced + 2 * (one.reduced // slices.ways(one)) for one in behind)
        if zero == 3:
            whole += sum(one.read for one in (*front, *mine))
        found = max(found, unit.working + whole)
    return found


def _parameters(held: ParameterGroup, slices: Slices) -> int:
    """What a rank stores, and the copies that operators read, whole where they are gathered at the start of a step.
    What is not copied is gathered in the memory where it is stored."""
    zero, ways = slices.layout.zero, slices.ways(held)
    if not held.widths.copied:
        return held.bytes // (ways if zero == 3 else 1)
    slice_of_copy = held.read // ways if ways > 1 else 0
    return held.bytes // ways + (slice_of_copy if zero == 3 else held.read)
