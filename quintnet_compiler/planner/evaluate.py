"""Time and memory of a layout, from its units."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from ..cost_models.collectives import MIN_BUCKETS, beside
from ..ir.plans.host_state import HostState
from ..ir.program import BUCKET_MIB
from ..ops.copies import WAYS
from ..runtime.state.gradients import PIECE_BYTES, PIECES
from ..simulation.host_update import MOMENTS
from .estimate import Estimate, PlaceLoad, StageMemory
from .layouts import Layout
from .pipeline import Pipeline, StageWork, pipeline
from .places import Place, are_identical, placement
from .stage_units import ParameterGroup, StageUnit
from .stages import Slices, Stages, cut_places, parameter_groups, send_seconds, stage_work


def evaluate(
    places: Sequence[Place], layout: Layout, begins: Sequence[str] = (), bucket: float = BUCKET_MIB * 2**20,
    *, host: HostState = HostState(),
) -> Estimate:  # fmt: skip
    """Return the cost of a layout: cut the model into stages, run the schedule, and add up time and memory.

    Stages are balanced as their ``places`` run them, or begin at the modules ``begins``. Where places differ and a
    stage does not fit its devices, stages are cut again, by memory too. ``bucket``: bytes of gradients that ranks
    reduce in one message. ``host``: what hosts hold.

    Raises:
        CompileError: QN206 if no unit begins where a stage should, QN208 for stages that the schedule does not have.
    """
    slices_of = {id(place): Slices(layout, place.costs, layout.mesh, host) for place in places}
    slices = [slices_of[id(place)] for place in places]
    estimate = _Evaluation(cut_places(places, layout, begins), places, layout, slices, bucket).to_estimate()
    if begins or all(memory.total <= place.memory_bytes for memory, place in zip(estimate.memory, places, strict=True)):
        return estimate

    def state_bytes(unit: StageUnit, place: Place) -> float:
        rank = _Rank([unit], [*unit.parameters, *unit.tied.values()], slices_of[id(place)])
        memory = _memory(rank, (0, 0))
        return memory.parameters + memory.settled + memory.optimizer

    stages = cut_places(places, layout, state=state_bytes)
    return _Evaluation(stages, places, layout, slices, bucket).to_estimate()


@dataclass(frozen=True)
class _Rank:
    """A rank of one pipeline place: its units, and its parameters by group."""

    units: Sequence[StageUnit]
    groups: Sequence[ParameterGroup]
    slices: Slices
    stages: Sequence[int] = ()


@dataclass(frozen=True)
class _Evaluation:
    """Time and memory of stages; ``places`` and ``slices``: by rank of the pipeline."""

    stages: Stages
    places: Sequence[Place]
    layout: Layout
    slices: Sequence[Slices]
    bucket: float

    def to_estimate(self) -> Estimate:
        """Return the cost of the layout."""
        layout, run = self.layout, self.pipeline_run
        busiest = self.busy.index(max(self.busy))
        return Estimate(
            layout,
            run.seconds + self._start_seconds(busiest),
            max(0.0, run.seconds - self.busy[busiest]),
            max(0.0, *(_gradient_seconds(rank, self.owners) for rank in self.pipeline_ranks)),
            max(rank.slices.update_seconds(rank.groups) for rank in self.pipeline_ranks),
            self._communication(busiest),
            self._memory_of_ranks(),
            tuple(stage[0].begin for stage in self.stages[1:]),
            places=() if not self.places[0].devices else tuple(
                PlaceLoad(place.devices, len(rank.units), seconds, place.memory_bytes, place.room, place.alone)
                for place, rank, seconds in zip(self.places, self.pipeline_ranks, self.busy, strict=True)
            ),
        )  # fmt: skip

    @cached_property
    def hops(self) -> list[tuple[int, int]]:
        """Return the places that send and receive the input of each stage."""
        home = placement(self.layout)
        return list(zip([0, *home], home, strict=False))

    @cached_property
    def received(self) -> list[int]:
        """Return bytes that each stage receives from another rank for a microbatch."""
        hops = [(source, target, stage[0]) for (source, target), stage in zip(self.hops, self.stages, strict=True)]
        return [0 if source == target else unit.crossing for source, target, unit in hops]

    @cached_property
    def sent(self) -> list[int]:
        """Return bytes that each stage sends to another rank for a microbatch."""
        return [*self.received[1:], 0]

    @cached_property
    def stage_works(self) -> tuple[StageWork, ...]:
        """Return the work of one microbatch on each stage."""
        return tuple(
            stage_work(stage, hop[0] == hop[1], self.slices[hop[1]], hop, sent)
            for stage, hop, sent in zip(self.stages, self.hops, self.sent, strict=True)
        )

    @cached_property
    def pipeline_run(self) -> Pipeline:
        """Return the run of the schedule."""
        layout, home = self.layout, placement(self.layout)
        return pipeline(
            layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages, self.stage_works,
            None if are_identical(self.places) else home,
        )  # fmt: skip

    @cached_property
    def pipeline_ranks(self) -> list[_Rank]:
        """Return the ranks of the pipeline."""
        ranks = []
        for rank, slices in enumerate(self.slices):
            stages = self._stages_of(rank)
            units = list(chain.from_iterable(self.stages[stage] for stage in stages))
            ranks.append(_Rank(units, parameter_groups(units, self.owners), slices, stages))
        return ranks

    def _stages_of(self, rank: int) -> list[int]:
        return [stage for stage, home in enumerate(self.pipeline_run.placement) if home == rank]

    @cached_property
    def owners(self) -> Mapping[str, int]:
        """Return how many pipeline ranks hold each tied parameter."""
        owners = Counter[str]()
        for rank in range(self.layout.pp):
            owners.update(
                {name for stage in self._stages_of(rank) for unit in self.stages[stage] for name in unit.tied}
            )
        return owners

    @cached_property
    def busy(self) -> list[float]:
        """Return seconds in which each rank computes."""
        return [
            self.layout.microbatches * sum(self.stage_works[stage].seconds for stage in rank.stages)
            for rank in self.pipeline_ranks
        ]

    def _communication(self, busiest: int) -> dict[str, float]:
        """Return seconds that a rank waits for communication during the pipeline, by axis."""
        rank, costs, count = self.pipeline_ranks[busiest], self.places[busiest].costs, self.layout.microbatches
        seconds = defaultdict[str, float](float)
        for unit in rank.units:
            for axis, waited in unit.communication.items():
                seconds[axis] += waited * count
        if not costs.overlaps:  # else waits for values are in the bubble
            sends = [
                send_seconds(self.stages[stage][0], costs, self.layout.mesh, self.hops[stage])
                for stage in rank.stages
                if stage
            ]
            if sends:
                seconds["pp"] = 2 * sum(sends) * count
        waits = [rank.slices.waits(self.stages[stage]) for stage in rank.stages]
        if sliced := sum(forward + backward for forward, backward in waits):
            name = WAYS["copy_in"] if rank.slices.on_host else " x ".join(self.layout.zero_axes)
            seconds[name] += sliced * count
        return dict(seconds)

    def _start_seconds(self, busiest: int) -> float:
        """Return seconds before the first microbatch: casts, and all-gathers that the first forward does not hide."""
        seconds = 0.0
        if not self.slices[busiest].on_host:
            seconds = max(sum(unit.once for unit in rank.units) for rank in self.pipeline_ranks)
        if self.layout.zero in (1, 2):
            seconds += max(_first_gather_seconds(rank, self.owners) for rank in self.pipeline_ranks)
        return seconds

    def _memory_of_ranks(self) -> tuple[StageMemory, ...]:
        bucket = max(self.bucket, *(_chosen_bucket_bytes(rank) for rank in self.pipeline_ranks))
        memory = []
        for number, rank in enumerate(self.pipeline_ranks):
            peak = _peak_saved_and_gradients(
                rank, self.stage_works[number].saved, self.pipeline_run.saved[number], bucket
            )
            # per direction: one buffer in use and one prefetched
            messages = sum(self.received[stage] + self.sent[stage] for stage in rank.stages)
            memory.append(_memory(rank, peak, min(2, self.layout.microbatches) * messages))
        return tuple(memory)


def _chosen_bucket_bytes(rank: _Rank) -> float:
    """Return the largest bucket that a search may choose for a rank."""
    return sum(rank.slices.sum_bytes(group) + rank.slices.copy_bytes(group) for group in rank.groups) / MIN_BUCKETS


def _first_message(rank: _Rank, owners: Mapping[str, int]) -> tuple[float, list[ParameterGroup]]:
    """Return the parameters of a rank's first unit, whose gradients are ready last, and their share in one message."""
    first = next((unit for unit in rank.units if unit.parameters or unit.tied), rank.units[0])
    return first.bucket, parameter_groups([first], owners)


def _first_gather_seconds(rank: _Rank, owners: Mapping[str, int]) -> float:
    """Return seconds that the first forward waits for the parameters of ZeRO 1 and 2."""
    share, first = _first_message(rank, owners)
    gather = rank.slices.gather_seconds
    forward = sum(unit.forward for unit in rank.units)
    return _exposed_seconds(gather(rank.groups), share * gather(first), forward, rank.slices)


def _gradient_seconds(rank: _Rank, owners: Mapping[str, int]) -> float:
    """Return seconds that gradients take after the last backward.

    They are reduced and then copied to the host during that backward. The two overlap, except for the last message.
    """
    slices, (share, last) = rank.slices, _first_message(rank, owners)
    backward = sum(unit.backward for unit in rank.units)
    last_reduce = share * slices.reduce_seconds(last)
    reduce = _exposed_seconds(slices.reduce_seconds(rank.groups), last_reduce, backward, slices)
    if not slices.on_host:
        return reduce
    last_copy = share * slices.copy_out_seconds(last)
    hidden = backward + slices.waits(rank.units)[1] if slices.costs.overlaps else 0.0
    exposed_copies = max(0.0, slices.copy_out_seconds(rank.groups) - last_copy - hidden)
    return max(reduce, last_reduce + exposed_copies) + last_copy


def _exposed_seconds(communication: float, exposed: float, work: float, slices: Slices) -> float:
    """Return seconds that communication of parameters or gradients adds to ``work``.

    ``exposed``: seconds of the first or last message, which nothing hides. Others overlap where the device can do that.
    """
    if not slices.costs.overlaps:
        return communication
    return exposed + beside(work, communication - exposed, slices.overlap_loss) - work


def _memory(rank: _Rank, peak: tuple[int, int], buffers: int = 0) -> StageMemory:
    """Return the memory of a rank.

    ``peak``: bytes of saved values and of gradients, see :func:`_peak_saved_and_gradients`; ``buffers``: bytes of
    messages to and from other ranks of the pipeline.
    """
    saved, gradients = peak
    slices, groups = rank.slices, rank.groups
    copies = sum(slices.copy_bytes(group) for group in groups)
    moments = MOMENTS * sum(slices.updated_bytes(group) for group in groups)
    working = _working_bytes(rank.units, slices) + buffers
    settled = sum(slices.sum_bytes(group) for group in groups) + copies
    host = 0
    if slices.host.optimizer:
        host = moments + 2 * sum(slices.updated_bytes(group) for group in groups)
        moments = 0
    if slices.on_host:
        host += sum(map(slices.stored_bytes, groups)) + settled + moments
        return StageMemory(0, gradients, 0, saved, working, 0, host)
    parameters = sum(_parameter_bytes(group, slices) for group in groups)
    return StageMemory(parameters, gradients + copies, moments, saved, working, settled, host)


def _peak_saved_and_gradients(rank: _Rank, microbatch: int, saved: int, bucket: float) -> tuple[int, int]:
    """Return (saved bytes, gradient bytes) at the peak of their sum.

    ``microbatch``: saved bytes of one microbatch; ``saved``: of all that the rank holds at once. Sums of gradients take
    no memory until their first term is added, nor after they are copied to the host. The moments that count:

    - The last forward ends. There are no sums yet where all microbatches run forward before the first backward.
    - That backward runs: sums appear while it frees what its microbatch saved.
    - The last backward runs, where ranks reduce in another dtype: with the copies in that dtype.
    """
    slices, layout = rank.slices, rank.slices.layout
    one_function = layout.has_whole_backwards
    saves_first = one_function and saved == layout.microbatches * microbatch
    sums, reduced = sum(map(slices.sum_bytes, rank.groups)), sum(map(slices.reduced_bytes, rank.groups))
    moments = [(saved, 0 if saves_first else sums)]
    if one_function and (saves_first or reduced or any(unit.tied for unit in rank.units)):
        buckets = _all_bucket_bytes(rank, bucket)
        for unit_saved, unit_sums, unit_reduced in _during_backward(rank.units, slices, microbatch):
            if slices.on_host and layout.microbatches == 1:  # a full bucket is copied to the host at once
                unit_sums = buckets
            moments.append((saved - microbatch + unit_saved, min(sums, unit_sums + buckets) if saves_first else sums))
            if reduced:
                moments.append((unit_saved, sums + unit_reduced))
    elif reduced:
        moments.append((saved, sums + reduced))
    return max(moments, key=sum)


def _all_bucket_bytes(rank: _Rank, bucket: float) -> int:
    """Return the most bytes of a bucket of each group (:mod:`..runtime.state.gradients`).

    A bucket has a limit, and the gradient that exceeds it.
    """
    total, largest = 0, max(unit.largest_gradient for unit in rank.units)
    for group in rank.groups:
        size = rank.slices.sum_bytes(group)
        limit = bucket if rank.slices.reduces_at_end(group) else size / PIECES
        total += min(size, int(max(limit, PIECE_BYTES)) + largest)
    return total


def _during_backward(units: Sequence[StageUnit], slices: Slices, microbatch: int) -> Iterator[tuple[int, int, int]]:
    """Yield (saved bytes, sums of gradients, reduced copies) while the backward of each unit runs, the last one first.

    ``microbatch``: saved bytes of the microbatch. The saved bytes include those of the next unit, which are as large as
    gradients between units. The gradient of a tied parameter is a saved value until its first unit adds the last term.
    """
    saved, sums, reduced, tied_gradients = microbatch, 0, 0, 0
    last = {name: index for index, unit in enumerate(units) for name in unit.tied}
    first = {name: index for index, unit in reversed(list(enumerate(units))) for name in unit.tied}
    for index, unit in reversed(list(enumerate(units))):
        complete = [*unit.parameters, *(group for name, group in unit.tied.items() if index == first[name])]
        sums += sum(map(slices.sum_bytes, complete))
        reduced += sum(map(slices.reduced_bytes, complete))
        gradients = {name: group.gradients for name, group in unit.tied.items()}
        tied_gradients += sum(size for name, size in gradients.items() if index == last[name] > first[name])
        term_and_sum = 2 * sum(size for name, size in gradients.items() if index < last[name])
        yield saved + tied_gradients + term_and_sum, sums, reduced
        tied_gradients -= sum(size for name, size in gradients.items() if index == first[name] < last[name])
        saved -= units[index + 1].saved if index + 1 < len(units) else 0


def _working_bytes(units: Sequence[StageUnit], slices: Slices) -> int:
    """Return the largest temporary memory of a unit's backward, with whole gradients, and whole or copied parameters.

    - ZeRO 2 and 3: the unit's gradients, those of the next unit in a message, and the slices of two messages.
    - ZeRO 3: the unit's parameters, and those of the previous unit, which are being gathered.
    - Parameters on hosts: copies of both; the last unit's backward begins with those of three units.
    """
    if slices.layout.zero < 2 and not slices.on_host:
        return max(unit.working for unit in units)
    groups: list[Sequence[ParameterGroup]] = [[*unit.parameters, *unit.tied.values()] for unit in units]
    padded = [(), *groups, ()]
    sizes = []
    for index, unit in enumerate(units):
        previous, current, following = padded[index : index + 3]
        size = unit.working + _whole_bytes(previous, current, following, slices)
        if slices.on_host:
            third = groups[index - 2] if 1 < index == len(units) - 1 else ()
            size += sum(slices.stored_bytes(group) for group in (*third, *previous, *current))
        sizes.append(size)
    return max(sizes)


def _whole_bytes(
    previous: Sequence[ParameterGroup], current: Sequence[ParameterGroup], following: Sequence[ParameterGroup],
    slices: Slices,
) -> int:  # fmt: skip
    """Return bytes of gradients and parameters that are whole during the backward of the ``current`` unit."""
    zero, size = slices.layout.zero, 0
    if zero >= 2:
        size += sum(group.gradients for group in current)
        size += sum(group.reduced + 2 * (group.reduced // slices.count(group)) for group in following)
    if zero == 3:
        size += sum(group.read for group in (*previous, *current))
    if slices.on_host and zero == 0:
        size += sum(group.read for group in current if group.widths.copied)
    return size


def _parameter_bytes(group: ParameterGroup, slices: Slices) -> int:
    """Return bytes of stored parameters, and of the copies that operators read.

    Copies are whole where they are gathered at the start of a step. Without copies, parameters are gathered in place.
    """
    zero, count = slices.layout.zero, slices.count(group)
    if not group.widths.copied:
        return group.bytes // (count if zero == 3 else 1)
    slice_of_copy = group.read // count if count > 1 else 0
    return group.bytes // count + (slice_of_copy if zero == 3 else group.read)
