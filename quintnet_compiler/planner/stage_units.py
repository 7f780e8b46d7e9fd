"""Units of a model that stay together on a pipeline stage, and their prices in a layout.

The folded program is compiled with a stage for each unit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby

from torch import Size, fx

from ..core.annotations import facts, leaf, operators_of_parameters, viewed
from ..core.sharding import R, local_shape
from ..cost_models.kernels import with_host
from ..ir.cost_protocol import RankCosts
from ..ir.distributed_program import DistributedProgram, StageProgram, StateSpec
from ..ir.program import DifferentiatedProgram
from ..passes.sharding.fold_blocks import Folded
from ..passes.stages.cut_stages import module_starts
from ..schedules.schedule import Action, Op
from ..schedules.synthesis import StageTimes
from ..simulation.footprint import Footprints
from ..simulation.priced import ProgramPrices
from ..simulation.work import ActionWork


@dataclass(frozen=True, order=True)
class Widths:
    """Bytes of one element of a parameter and of its gradient.

    Attributes:
        held: of the parameter as ranks hold it.
        read: of the parameter as operators read it.
        gradient: of the gradient as microbatches accumulate it.
        reduced: of the gradient as ranks reduce it.
        copied: whether operators read a copy in another dtype.
    """

    held: int
    read: int
    gradient: int
    reduced: int
    copied: bool

    @classmethod
    def from_spec(cls, spec: StateSpec) -> Widths:
        """Return the widths of a parameter."""
        held, read, gradient, reduced = (d.itemsize for d in (spec.dtype, spec.read, spec.summed, spec.reduced))
        return cls(held, read, gradient, reduced, spec.read != spec.dtype)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of equal :class:`Widths` on one rank: bytes as it holds them, and axes that reduce their gradients."""

    bytes: int
    axes: tuple[str, ...]
    widths: Widths

    def over_two_axes(self) -> ParameterGroup:
        """Return the same for a mesh in which ``dp`` is divided into ``dp`` and ``ep``."""
        return replace(self, axes=(*self.axes, "ep")) if "dp" in self.axes else self

    @property
    def read(self) -> int:
        """Return bytes as operators read them."""
        return self.bytes // self.widths.held * self.widths.read

    @property
    def gradients(self) -> int:
        """Return bytes of gradients as microbatches accumulate them."""
        return self.bytes // self.widths.held * self.widths.gradient

    @property
    def reduced(self) -> int:
        """Return bytes of gradients as ranks reduce them."""
        return self.bytes // self.widths.held * self.widths.reduced


@dataclass(frozen=True)
class StageUnit:
    """A repeated block, or the operators before, between or after blocks: what one microbatch costs one rank.

    Times are in seconds, memory is in bytes.

    Attributes:
        begin: the module whose first operator is this unit's, or ``""``: then no stage begins with it.
        once: before the first microbatch.
        forward: with the communication inside.
        backward: with the communication inside.
        weight: the half of the backward that no other stage waits for.
        communication: of forward and backward, by axis.
        saved: values of the forward that the backward reads.
        received: values of the previous unit.
        working: the largest temporary memory.
        parameters: of this unit alone, by the axes that reduce their gradients.
        tied: parameters that other units use too, by name.
        bucket: the share of all parameters in one message: the largest parameter, or several small ones.
        host: launches of kernels, which overlap the device.
        crossing: values of earlier units for this or later ones.
        shared: values that are both sent to other units and saved.
        saved_for_weight: values that the weight half of the backward reads.
        largest_gradient: the largest gradient.
        backward_share: the share of the parameters' bytes that the backward reads, too.
    """

    begin: str
    once: float
    forward: float
    backward: float
    weight: float
    communication: Mapping[str, float]
    saved: int
    received: int
    working: int
    parameters: tuple[ParameterGroup, ...]
    tied: Mapping[str, ParameterGroup]
    bucket: float = 1.0
    host: StageTimes = StageTimes(0.0, 0.0, 0.0)
    crossing: int = 0
    shared: int = 0
    saved_for_weight: int = 0
    largest_gradient: int = 0
    backward_share: float = 1.0

    @property
    def seconds(self) -> float:
        """Return seconds of forward and backward on a stage of their own, of the device and the host together."""
        back = with_host(self.backward, self.host.input + self.host.weight)
        return with_host(self.forward, self.host.forward) + back

    def over_two_axes(self) -> StageUnit:
        """Return the same for a mesh in which ``dp`` is divided into ``dp`` and ``ep``."""
        tied = {name: group.over_two_axes() for name, group in self.tied.items()}
        return replace(self, parameters=tuple(group.over_two_axes() for group in self.parameters), tied=tied)


def unit_boundaries(folded: Folded) -> tuple[str, ...]:
    """Return the operators at which units of the folded program begin, except the first."""
    return tuple(run[0].name for run in _runs(folded))[1:]


def unit_count(folded: Folded) -> int:
    """Return the number of units of the whole model, which bounds the number of stages."""
    homes = [folded.home.get(run[0]) for run in _runs(folded)]
    return sum(len(folded.blocks[home]) if home else 1 for home in homes)


def _runs(folded: Folded) -> list[list[fx.Node]]:
    """Return runs of operators of the same block (or of none), in order."""
    return [list(run) for _, run in groupby(operators_of_parameters(folded.program.graph), key=folded.home.get)]


def unit_work(
    program: DistributedProgram, folded: Folded, costs: RankCosts, memory: Footprints | None = None
) -> tuple[StageUnit, ...]:
    """Price each stage of ``program`` (the folded one, cut at :func:`unit_boundaries`), and unfold.

    ``memory``: the footprints of the program, if they are computed already.

    Raises:
        CompileError: QN210 if something has no price.
    """
    priced, memory = ProgramPrices(program, costs), memory or Footprints(program)
    runs = list(zip(_runs(folded), program.stages, strict=True))
    starts = module_starts([node for run, _ in runs for node in run])
    read_by_backward = _read_by_backward(program.source)
    copies = [
        _unfolded(_unit(starts.get(run[0], ""), stage, priced, memory, read_by_backward), run[0], folded)
        for run, stage in runs
    ]

    def period(entry: tuple[int, list[StageUnit]]) -> tuple[int, int]:
        """Return a key that consecutive units of one repeated run share."""
        index, units = entry
        return len(units), 0 if len(units) > 1 else index

    unfolded: list[StageUnit] = []
    for (times, _), group in groupby(enumerate(copies), key=period):
        members = [units for _, units in group]
        unfolded += [units[turn] for turn in range(times) for units in members]
    return tuple(unfolded)


def _unfolded(unit: StageUnit, first: fx.Node, folded: Folded) -> list[StageUnit]:
    """Return the units of the whole program for a unit of the folded one; ``first``: its first operator."""
    block = folded.home.get(first)
    if block is None or unit.begin != f"{block[0]}{block[1]}":
        return [unit] * (len(folded.blocks[block]) if block else 1)
    return [replace(unit, begin=f"{block[0]}{number}") for number in folded.blocks[block]]


def _unit(
    begin: str, stage: StageProgram, priced: ProgramPrices, memory: Footprints, read_by_backward: Set[str]
) -> StageUnit:
    """Return the unit that is a stage of the folded program."""
    program, index = priced.program, stage.index
    works = [priced.work(Action(op, index, 0)) for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
    forward, backward, weight = works
    traffic = _Traffic.of_stage(program, index)
    specs = [program.state[name] for name in stage.state.values()]
    parameters = [spec for spec in specs if spec.kind == "parameter"]
    saved, shared, saved_for_weight = _saved(stage, memory, traffic.arrived, traffic.sent)
    return StageUnit(
        begin=begin,
        once=priced.begin(index).seconds,
        forward=forward.device_seconds,
        backward=backward.device_seconds + weight.device_seconds,
        weight=weight.device_seconds,
        communication=_communication(works),
        saved=saved,
        received=traffic.received_bytes,
        working=max(memory.calls[index, label].working for label in stage.pieces if label != "once"),
        parameters=_groups([spec for spec in parameters if len(spec.stages) == 1], program),
        tied={spec.name: _group(spec, program) for spec in parameters if len(spec.stages) > 1},
        bucket=_largest_message([_bytes(spec, program) for spec in parameters], program.bucket_mib * 2**20),
        host=StageTimes(forward.host, backward.host, weight.host),
        crossing=traffic.crossing_bytes,
        shared=shared,
        saved_for_weight=saved_for_weight,
        largest_gradient=max((_group(spec, program).gradients for spec in parameters), default=0),
        backward_share=_share(parameters, read_by_backward, program),
    )


@dataclass(frozen=True)
class _Traffic:
    """Values that a stage exchanges with others; ``arrived``: bytes of each value and gradient that it receives."""

    arrived: Mapping[str, int]
    sent: Set[str]
    received_bytes: int
    crossing_bytes: int

    @classmethod
    def of_stage(cls, program: DistributedProgram, index: int) -> _Traffic:
        """Return what a stage of the program exchanges for one microbatch."""
        transfers = program.transfers
        received = {name for t in transfers if t.target == index for name in t.forward}
        sent = {name for t in transfers if t.source == index for name in t.forward}
        gradients = {name for t in transfers if t.source == index for name in t.backward}
        crossing = {name for t in transfers if t.source < index <= t.target for name in t.forward}
        sizes = {name: Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in program.values.items()}
        arrived = {name: sizes[name] for name in received | gradients}
        return cls(arrived, sent, sum(sizes[name] for name in received), sum(sizes[name] for name in crossing))


def _communication(works: Iterable[ActionWork]) -> dict[str, float]:
    """Return seconds of waiting for communication, by axis."""
    seconds = defaultdict[str, float](float)
    for part in (part for work in works for part in work.waited):
        if part.axis:
            seconds[part.axis] += part.seconds
    return dict(seconds)


def _groups(specs: Iterable[StateSpec], program: DistributedProgram) -> tuple[ParameterGroup, ...]:
    sizes: Counter[tuple[tuple[str, ...], Widths]] = Counter()
    for spec in specs:
        sizes[_reduced_axes(spec, program), Widths.from_spec(spec)] += _bytes(spec, program)
    return tuple(ParameterGroup(size, *kind) for kind, size in sorted(sizes.items()))


def _read_by_backward(program: DifferentiatedProgram) -> set[str]:
    """Return the parameters that a backward reads, directly or through values that are computed once a step."""
    sources: dict[fx.Node, set[str]] = {}
    parameters: set[str] = set()
    for node in program.graph.nodes:
        parameter = leaf(node) if node.op == "placeholder" else None
        if parameter is not None:
            sources[node] = {parameter.name}
            continue
        inputs = set[str]().union(*(sources.get(x, ()) for x in node.all_input_nodes))
        if node in program.once or viewed(node) is not None:
            sources[node] = inputs
        elif node.op == "call_function" and facts(node).phase == "backward":
            parameters |= inputs
    return parameters


def _share(parameters: Sequence[StateSpec], names: Set[str], program: DistributedProgram) -> float:
    """Return the bytes of the parameters ``names`` over those of all ``parameters``."""
    sizes = {spec.name: _bytes(spec, program) for spec in parameters}
    return sum(size for name, size in sizes.items() if name in names) / max(1, sum(sizes.values()))


def _saved(stage: StageProgram, memory: Footprints, arrived: Mapping[str, int], sent: Set[str]) -> tuple[int, int, int]:
    """Return bytes that are saved for the backward, those of them that are ``sent``, and those for the weight half.

    Each piece of memory counts once, also where a view of it is read: outputs of functions, and values and gradients
    that ``arrived`` from other stages.
    """
    owners: dict[str, tuple[Hashable, int] | None] = {name: (name, size) for name, size in arrived.items()}
    for label in ("forward", "backward"):
        piece = stage.pieces.get(label)
        if piece is None:
            continue
        arguments = [*piece.static, *piece.dynamic]
        for name, output in zip(piece.outputs, memory.calls[stage.index, label].outputs, strict=True):
            if output.host:
                continue
            is_new = output.fresh >= 0
            owner = ((label, output.fresh), output.bytes) if is_new else owners.get(arguments[output.argument])
            owners[name] = owner

    def pieces(names: Iterable[str]) -> dict[Hashable, int]:
        return dict(owner for owner in map(owners.get, names) if owner)

    saved, saved_for_weight = pieces(stage.saved), pieces(stage.weight.dynamic if stage.weight else ())
    shared = pieces(sent).keys() & saved.keys()
    return sum(saved.values()), sum(saved[piece] for piece in shared), sum(saved_for_weight.values())


def _largest_message(parameters: Sequence[int], bucket: float) -> float:
    """Return the share of all bytes in the largest parameter, or in a bucket if that is larger."""
    return min(1.0, max(bucket, *parameters) / sum(parameters)) if parameters else 1.0


def _group(spec: StateSpec, program: DistributedProgram) -> ParameterGroup:
    return ParameterGroup(_bytes(spec, program), _reduced_axes(spec, program), Widths.from_spec(spec))


def _reduced_axes(spec: StateSpec, program: DistributedProgram) -> tuple[str, ...]:
    kinds = zip(program.axes, spec.sharding, strict=True)
    return tuple(axis.name for axis, kind in kinds if kind is R and axis.role != "time")


def _bytes(spec: StateSpec, program: DistributedProgram) -> int:
    ranks = tuple(axis.size for axis in program.axes)
    return Size(local_shape(spec.shape, spec.sharding, ranks)).numel() * spec.dtype.itemsize
