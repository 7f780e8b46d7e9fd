"""What a layout makes of a model, in units that stay together on a pipeline stage: the folded program, compiled with
a stage for each unit, and priced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby

from torch import Size, fx

from ..core.annotations import facts, leaf, viewed
from ..core.sharding import R, local_shape
from ..cost_models.kernels import with_host
from ..ir.cost_protocol import RankCosts
from ..ir.distributed_program import DistributedProgram, StageProgram, StateSpec
from ..ir.program import DifferentiatedProgram
from ..passes.sharding.fold_blocks import Folded
from ..passes.stages.cut_stages import module_starts, staged_operators
from ..schedules.schedule import Action, Op
from ..schedules.synthesis import StageTimes
from ..simulation.footprint import Footprints
from ..simulation.priced import ProgramPrices


@dataclass(frozen=True, order=True)
class Widths:
    """Bytes of one element of a parameter as ranks hold it and as operators read it (``copied``: these are two), and of
    its gradient as microbatches add it up and as ranks do."""

    held: int
    read: int
    gradient: int
    reduced: int
    copied: bool

    @classmethod
    def of(cls, spec: StateSpec) -> Widths:
        held, read, gradient, reduced = (d.itemsize for d in (spec.dtype, spec.read, spec.summed, spec.reduced))
        return cls(held, read, gradient, reduced, spec.read != spec.dtype)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of equal :class:`Widths` on one rank: ``bytes`` as it holds them, and the axes over which ranks add up
    their gradients."""

    bytes: int
    axes: tuple[str, ...]
    widths: Widths

    def over_two_axes(self) -> ParameterGroup:
        """The same, where ranks of ``dp`` are those of ``dp`` and ``ep``."""
        return replace(self, axes=(*self.axes, "ep")) if "dp" in self.axes else self

    @property
    def read(self) -> int:
        """Bytes of what operators read."""
        return self.bytes // self.widths.held * self.widths.read

    @property
    def gradients(self) -> int:
        """Bytes of gradients while they are added up."""
        return self.bytes // self.widths.held * self.widths.gradient

    @property
    def reduced(self) -> int:
        """Bytes of what ranks add up."""
        return self.bytes // self.widths.held * self.widths.reduced


@dataclass(frozen=True)
class StageUnit:
    """A repeated block, or what lies before, between or after blocks: what one microbatch of it costs one rank.

    ``begin``: the module whose first operator is this unit's, for a plan, or ``""``: then no stage begins here.
    ``once``: seconds before the first microbatch; ``forward`` and ``backward``: seconds, with the communication inside,
    ``weight`` of the backward the half that no other stage waits for; ``communication``: seconds of all by axis.
    Bytes: ``saved`` by the forward for the backward, ``received`` of the unit before, ``working`` at most beside what
    is kept. ``parameters``: of this unit alone, by the axes of their gradients; ``tied``: those that other units use
    too, by name. ``bucket``: the share of all these that is one message: the largest, or several of few bytes;
    ``largest``: bytes of the largest gradient.
    ``host``: seconds in which the host starts all that, beside the device. Bytes again: ``crossing``, of what earlier
    units make for this one or for later ones; ``shared``, of what it gives to others and saves, too; ``later``, of what
    the weight half of a backward reads. ``again``: the share of the parameters' bytes that the
    backward reads, too.
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
    later: int = 0
    largest: int = 0
    again: float = 1.0

    @property
    def seconds(self) -> float:
        """Of forward and backward, if nothing else is on its stage: of the device and the host together."""
        back = with_host(self.backward, self.host.input + self.host.weight)
        return with_host(self.forward, self.host.forward) + back

    def over_two_axes(self) -> StageUnit:
        """The same, where ranks of ``dp`` are those of ``dp`` and ``ep``."""
        tied = {name: held.over_two_axes() for name, held in self.tied.items()}
        return replace(self, parameters=tuple(held.over_two_axes() for held in self.parameters), tied=tied)


def unit_boundaries(folded: Folded) -> tuple[str, ...]:
    """The operators at which units of the folded program begin, but the first."""
    return tuple(run[0].name for run in _runs(folded))[1:]


def unit_count(folded: Folded) -> int:
    """How many units the whole model has: so many stages at most."""
    homes = [folded.home.get(run[0]) for run in _runs(folded)]
    return sum(len(folded.blocks[home]) if home else 1 for home in homes)


def _runs(folded: Folded) -> list[list[fx.Node]]:
    """Runs of operators of the same block (or of none), in order."""
    return [list(run) for _, run in groupby(staged_operators(folded.program.graph), key=folded.home.get)]


def unit_work(
    program: DistributedProgram, folded: Folded, costs: RankCosts, memory: Footprints | None = None
) -> tuple[StageUnit, ...]:
    """Price each stage of ``program`` (the folded one, cut at :func:`unit_boundaries`), and unfold. ``memory``: of the
    program, if it is known.

    Raises:
        CompileError: QN210 if something has no price.
    """
    priced, memory = ProgramPrices(program, costs), memory or Footprints(program)
    runs = list(zip(_runs(folded), program.stages, strict=True))
    starts = module_starts([node for run, _ in runs for node in run])
    again = _read_again(program.source)
    named = [_named(_unit(starts.get(run[0], ""), stage, priced, memory, again), run[0], folded) for run, stage in runs]
    found: list[StageUnit] = []
    for (times, _), group in groupby(enumerate(named), key=lambda one: (len(one[1]), one[0] * (len(one[1]) < 2))):
        members = [names for _, names in group]
        found += [names[turn] for turn in range(times) for names in members]
    return tuple(found)


def _named(unit: StageUnit, first: fx.Node, folded: Folded) -> list[StageUnit]:
    """The units of the whole program that one of the folded program, with this first operator, stands for."""
    block = folded.home.get(first)
    if block is None or unit.begin != f"{block[0]}{block[1]}":
        return [unit] * (len(folded.blocks[block]) if block else 1)
    return [replace(unit, begin=f"{block[0]}{number}") for number in folded.blocks[block]]


def _unit(begin: str, stage: StageProgram, priced: ProgramPrices, memory: Footprints, again: Set[str]) -> StageUnit:
    program, at = priced.program, stage.index
    works = {op: priced.work(Action(op, at, 0)) for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)}
    ahead, back, weight = works.values()
    moved: Counter[str] = Counter()
    for work in works.values():
        for part in work.waited:
            moved[part.axis] += part.seconds if part.axis else 0.0  # type: ignore[assignment]
    came = {name for t in program.transfers if t.target == at for name in t.forward}
    sent = {name for t in program.transfers if t.source == at for name in t.forward}
    returned = {name for t in program.transfers if t.source == at for name in t.backward}
    shapes = program.values
    size = {name: Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    specs = [program.state[name] for name in stage.state.values()]
    mine = [spec for spec in specs if spec.kind == "parameter"]
    alone: Counter[tuple[tuple[str, ...], Widths]] = Counter()
    for spec in mine:
        if len(spec.stages) == 1:
            alone[_summed(spec, program), Widths.of(spec)] += _bytes(spec, program)
    saved, shared, later = _saved(stage, memory, {name: size[name] for name in came | returned}, sent)
    return StageUnit(
        begin,
        priced.begin(at).seconds,
        ahead.device,
        back.device + weight.device,
        weight.device,
        {axis: seconds for axis, seconds in moved.items() if axis},
        saved,
        sum(size[name] for name in came),
        max(memory.calls[at, label].working for label in stage.pieces if label != "once"),
        tuple(ParameterGroup(number, *kind) for kind, number in sorted(alone.items())),
        {spec.name: _held(spec, program) for spec in mine if len(spec.stages) > 1},
        _largest_message([_bytes(spec, program) for spec in mine], program.bucket_mib * 2**20),
        StageTimes(ahead.host, back.host, weight.host),
        sum(size[name] for name in {n for t in program.transfers if t.source < at <= t.target for n in t.forward}),
        shared,
        later,
        max((_held(spec, program).gradients for spec in mine), default=0),
        _share(mine, again, program),
    )


def _read_again(program: DifferentiatedProgram) -> set[str]:
    """The parameters that a backward reads, themselves or what is computed of them once a step."""
    of: dict[fx.Node, set[str]] = {}
    read: set[str] = set()
    for node in program.graph.nodes:
        known = leaf(node) if node.op == "placeholder" else None
        found = {known.name} if known is not None else set[str]().union(*(of.get(x, ()) for x in node.all_input_nodes))
        if known is not None or node in program.once or viewed(node) is not None:
            of[node] = found
        elif node.op == "call_function" and facts(node).phase == "backward":
            read |= found
    return read


def _share(parameters: Sequence[StateSpec], some: Set[str], program: DistributedProgram) -> float:
    """The bytes of ``some`` over those of all ``parameters``."""
    sizes = {spec.name: _bytes(spec, program) for spec in parameters}
    return sum(size for name, size in sizes.items() if name in some) / max(1, sum(sizes.values()))


def _saved(stage: StageProgram, memory: Footprints, arrived: Mapping[str, int], sent: Set[str]) -> tuple[int, int, int]:
    """Bytes that are kept for the backward, those of them that hold what is ``sent``, and bytes that are kept for the
    weight half. Each piece of memory counts once: of what functions made, and of values and gradients that ``arrived``
    from other stages, also where a view of them is read."""
    owners: dict[str, tuple[Hashable, int] | None] = {name: (name, size) for name, size in arrived.items()}
    for label in ("forward", "backward"):
        piece = stage.pieces.get(label)
        if piece is None:
            continue
        given = [*piece.static, *piece.dynamic]
        for name, made in zip(piece.outputs, memory.calls[stage.index, label].outputs, strict=True):
            new = made.fresh >= 0
            if made.host:
                continue
            owners[name] = ((label, made.fresh), made.bytes) if new else owners.get(given[made.argument])

    def pieces(names: Iterable[str]) -> dict[Hashable, int]:
        return dict(found for found in map(owners.get, names) if found)

    kept, later = pieces(stage.saved), pieces(stage.weight.dynamic if stage.weight else ())
    shared = pieces(sent).keys() & kept.keys()
    return sum(kept.values()), sum(kept[one] for one in shared), sum(later.values())


def _largest_message(parameters: Sequence[int], bucket: float) -> float:
    """The share of all bytes that is in the largest parameter, or in a bucket if that is larger."""
    return min(1.0, max(bucket, *parameters) / sum(parameters)) if parameters else 1.0


def _held(spec: StateSpec, program: DistributedProgram) -> ParameterGroup:
    return ParameterGroup(_bytes(spec, program), _summed(spec, program), Widths.of(spec))


def _summed(spec: StateSpec, program: DistributedProgram) -> tuple[str, ...]:
    kinds = zip(program.axes, spec.sharding, strict=True)
    return tuple(axis.name for axis, kind in kinds if kind is R and axis.role != "time")


def _bytes(spec: StateSpec, program: DistributedProgram) -> int:
    ranks = tuple(axis.size for axis in program.axes)
    return Size(local_shape(spec.shape, spec.sharding, ranks)).numel() * spec.dtype.itemsize
