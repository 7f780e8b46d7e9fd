"""Time and memory of a layout, from its units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from ..cost_models.collectives import SHARE, beside
from ..ir.plan import Offloaded
from ..ir.program import BUCKET_MIB
from ..ops.copies import WAYS
from ..runtime.state.gradients import PIECE_BYTES, PIECES
from ..simulation.host_update import MOMENTS
from .estimate import Estimate, PlaceLoad, StageMemory
from .layouts import UNSPLIT, Layout
from .pipeline import pipeline
from .places import Place, alike, placement
from .stage_units import ParameterGroup, StageUnit
from .stages import Slices, Stages, cut_places, held_by, send_seconds, stage_work


def evaluate(
    places: Sequence[Place], layout: Layout, begins: Sequence[str] = (), bucket: float = BUCKET_MIB * 2**20,
    *, offload: tuple[Offloaded, ...] = (),
) -> Estimate:  # fmt: skip
    """Cut the model into stages that are balanced as their ``places`` run them (or where ``begins`` says), run the
    schedule, and add up. Where places are unlike and a stage does not fit its devices, stages are cut again, by memory
    too. ``bucket``: bytes of gradients that ranks add up in one message. ``offload``: what is on hosts.

    Raises:
        CompileError: QN206 if no unit begins where a stage should, QN208 for stages that the schedule does not have.
    """
    of = {id(place): Slices(layout, place.costs, layout.mesh, offload) for place in places}
    slices = [of[id(place)] for place in places]
    found = _of_stages(cut_places(places, layout, begins), places, layout, slices, bucket)
    if begins or all(one.total <= place.memory_bytes for one, place in zip(found.memory, places, strict=True)):
        return found

    def state(unit: StageUnit, place: Place) -> float:
        held = [*unit.parameters, *unit.tied.values()]
        one = _memory(held, [unit], of[id(place)], (0, 0))
        return one.parameters + one.settled + one.optimizer

    return _of_stages(cut_places(places, layout, state=state), places, layout, slices, bucket)


def _of_stages(
    stages: Stages, places: Sequence[Place], layout: Layout, slices: Sequence[Slices], bucket: float
) -> Estimate:
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
        name = WAYS["copy_in"] if slices[fullest].on_host else " x ".join(layout.zero_axes)
        moved[name] += sliced * layout.microbatches  # type: ignore[assignment]
    once = 0.0 if slices[fullest].on_host else max(sum(unit.once for unit in part) for part in parts)
    ends = [_first_message(part, owners) for part in parts]
    each = list(zip(slices, held, ends, parts, strict=True))
    if layout.zero in (1, 2):  # parameters come while the first forward computes
        once += max(
            _waited(one.gather(found), share * one.gather(end), sum(unit.forward for unit in part), one)
            for one, found, (share, end), part in each
        )
    settle = [_settled(*one) for one in each]
    # of each way, what is used or sent, and the next microbatch's, for which there is a buffer already
    buffers = [min(2, layout.microbatches) * sum(came[stage] + sent[stage] for stage in found) for found in mine]
    # a search may choose larger messages
    bucket = max(
        bucket,
        *(
            sum(one.sums(group) + one.copies(group) for group in found) / SHARE
            for one, found in zip(slices, held, strict=True)
        ),
    )
    memory = tuple(
        _memory(
            found, parts[rank], slices[rank],
            _most(found, parts[rank], slices[rank], work[rank].saved, run.saved[rank], bucket), buffers[rank],
        )
        for rank, found in enumerate(held)
    )  # fmt: skip
    step = [one.update(found) for one, found in zip(slices, held, strict=True)]
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


def _settled(
    slices: Slices, held: Sequence[ParameterGroup], end: tuple[float, list[ParameterGroup]], part: Sequence[StageUnit]
) -> float:
    """Seconds that gradients take after the last backward, during which they leave: for other ranks, and then for the
    host. The two run beside each other, but for the last message."""
    share, last = end
    work, alone = sum(unit.backward for unit in part), share * slices.settle(last)
    found = _waited(slices.settle(held), alone, work, slices)
    if not slices.on_host:
        return found
    left = share * slices.leave(last)
    hidden = work + slices.each_use(part)[1] if slices.costs.overlaps else 0.0
    return max(found, alone + max(0.0, slices.leave(held) - left - hidden)) + left


def _waited(moved: float, alone: float, work: float, slices: Slices) -> float:
    """Seconds that communication of parameters or gradients adds to ``work``, where a device does both at once, all but
    what is ``alone``: nothing is left to compute beside the first, or last, message."""
    return alone + beside(work, moved - alone, slices.lost) - work if slices.costs.overlaps else moved


def _memory(
    held: Sequence[ParameterGroup], part: Sequence[StageUnit], slices: Slices, most: tuple[int, int], buffers: int = 0
) -> StageMemory:
    """``most``: bytes of saved values and of sums of gradients, see :func:`_most`; ``buffers``: of messages to and from
    other places."""
    saved, gradients = most
    copies = sum(slices.copies(one) for one in held)
    updated = sum(slices.updated(one) for one in held)
    there, working = "optimizer" in slices.offload, _working(part, slices) + buffers
    settled = sum(slices.sums(one) for one in held) + copies
    host = (MOMENTS + 2) * updated if there else 0
    if slices.on_host:
        host += sum(map(slices.stored, held)) + settled + (0 if there else MOMENTS * updated)
        return StageMemory(0, gradients, 0, saved, working, 0, host)
    parameters = sum(_parameters(one, slices) for one in held)
    return StageMemory(parameters, gradients + copies, 0 if there else MOMENTS * updated, saved, working, settled, host)


def _most(
    held: Sequence[ParameterGroup], part: Sequence[StageUnit], slices: Slices, each: int, saved: int, bucket: float
) -> tuple[int, int]:
    """Bytes of saved values and of sums of gradients at the moment in which they are the most together. Sums have no
    memory until their first term is added, and none when they have left for the host. So where all microbatches are
    ``saved`` before the first backward (``each``: of one of them), there are no sums yet, or they come while that
    backward frees what one microbatch saved. Where ranks add up in another dtype, with what they do that in, during the
    last backward."""
    layout = slices.layout
    whole = layout.virtual_stages == 1 and layout.schedule in UNSPLIT  # each backward is one function
    early = whole and saved == layout.microbatches * each
    once = slices.on_host and layout.microbatches == 1  # a bucket leaves when it is there
    sums, moving = sum(map(slices.sums, held)), sum(map(slices.moving, held))
    moments = [(saved, 0 if early else sums)]
    if whole and (early or moving or any(unit.tied for unit in part)):
        room = sum(min(slices.sums(one), _bucket(one, slices, part, bucket)) for one in held)
        for mine, some, more in _while_gradients_come(part, slices, each):
            here = room if once else some
            moments.append((saved - each + mine, min(sums, here + room) if early else sums))
            if moving:
                moments.append((mine, sums + more))
    elif moving:
        moments.append((saved, sums + moving))
    return max(moments, key=sum)


def _bucket(one: ParameterGroup, slices: Slices, part: Sequence[StageUnit], bucket: float) -> int:
    """The most bytes that lie in one bucket (:mod:`..runtime.state.gradients`): a limit, and the parameter that exceeds
    it."""
    limit = bucket if slices.messages(one) else slices.sums(one) / PIECES
    return int(max(limit, PIECE_BYTES)) + max(unit.largest for unit in part)


def _while_gradients_come(part: Sequence[StageUnit], slices: Slices, each: int) -> Iterator[tuple[int, int, int]]:
    """While the backward of each unit runs, the last one first: bytes of what its microbatch saved (with the unit's
    behind it, as large as gradients between units), and of sums, and of copies that ranks add up, of this unit and
    those behind it. The gradient of a parameter of several units is a value until the first of them adds its term."""
    left, sums, moving, terms = each, 0, 0, 0
    last = {name: index for index, unit in enumerate(part) for name in unit.tied}
    first = {name: index for index, unit in reversed(list(enumerate(part))) for name in unit.tied}
    for index, unit in reversed(list(enumerate(part))):
        whole = [*unit.parameters, *(one for name, one in unit.tied.items() if index == first[name])]
        sums += sum(map(slices.sums, whole))
        moving += sum(map(slices.moving, whole))
        terms += sum(one.gradients for name, one in unit.tied.items() if index == last[name] > first[name])
        added = 2 * sum(one.gradients for name, one in unit.tied.items() if index < last[name])  # this term, and a sum
        yield left + terms + added, sums, moving
        terms -= sum(one.gradients for name, one in unit.tied.items() if index == first[name] < last[name])
        left -= part[index + 1].saved if index + 1 < len(part) else 0


def _working(part: Sequence[StageUnit], slices: Slices) -> int:
    """Of ZeRO 2 and 3, with what is whole while a unit's backward runs: its gradients, those of the unit behind it in a
    message, with its slice and that of the message before; of 3 also its parameters, and those of the unit in front of
    it, which arrive. Of parameters on hosts, with the copies of both; a backward begins with those of three."""
    zero, found = slices.layout.zero, 0
    if zero < 2 and not slices.on_host:
        return max(unit.working for unit in part)
    held = [(), *([*unit.parameters, *unit.tied.values()] for unit in part), ()]
    for number, (unit, front, mine, behind) in enumerate(zip(part, held, held[1:], held[2:], strict=False)):
        whole = 0
        if zero >= 2:
            whole += sum(one.gradients for one in mine)
            whole += sum(one.reduced + 2 * (one.reduced // slices.ways(one)) for one in behind)
        if zero == 3:
            whole += sum(one.read for one in (*front, *mine))
        if slices.on_host:
            more = held[number - 1] if 0 < number == len(part) - 1 else ()
            whole += sum(slices.stored(one) for one in (*more, *front, *mine))
            whole += sum(one.read for one in mine if one.widths.copied and zero == 0)
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
