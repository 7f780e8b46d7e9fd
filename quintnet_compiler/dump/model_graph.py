"""The model as it is split: operators by block, their types on every axis, and what is exchanged between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from ..core.annotations import facts, is_getitem, num_bytes, origin, shape, tensor_inputs, value, values
from ..core.sharding import AxisType, gradient, local_shape, parse_type
from ..ir.distributed_program import DistributedProgram
from ..ir.repeated_blocks import block_members
from ..ops.collectives import convert, lower_conversion
from .fold import FoldedUnit, fold


@dataclass(frozen=True)
class Move:
    """A conversion of ``value`` along ``axis``: the collectives that carry it and its gradient ("" where the bits stay
    in place), and the bytes of one of them on a rank (the larger of what goes in and comes out)."""

    value: str
    axis: str
    source: str
    target: str
    forward: str
    backward: str
    bytes: int


@dataclass(frozen=True)
class Parameter:
    """What an operator reads that the model trains: ``local`` is the shape on a rank."""

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    types: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Operator:
    """An operator of the model. ``types``: (axis, what it makes there, whether its work is split); ``moves``: what is
    exchanged before it can run; ``reads``: names of the operators whose values it takes."""

    name: str
    operator: str
    shape: str
    module: str
    source: str
    stage: int | None
    types: tuple[tuple[str, str, bool], ...]
    moves: tuple[Move, ...]
    parameters: tuple[Parameter, ...]
    reads: tuple[str, ...] = field(compare=False)

    @property
    def label(self) -> tuple[object, ...]:
        """Equal for operators that are shown alike."""
        moves = tuple((m.axis, m.source, m.target, m.bytes) for m in self.moves)
        return self.operator, self.shape, self.stage, self.types, moves, tuple(p.types for p in self.parameters)


def operators(program: DistributedProgram) -> list[Operator]:
    """All operators of the model, in order."""
    return list(_operators(program))


def units(program: DistributedProgram, found: list[Operator]) -> list[FoldedUnit[Operator]]:
    """``found`` by stage and block; of blocks that are equal, one."""
    graph = program.source.local.staged.sharded.program.graph
    home = {node.name: block for block, nodes in block_members(graph).items() for node in nodes}
    segments: list[list[Operator]] = [[]]
    stage: int | None = None
    for one in found:
        if stage not in (None, one.stage) and one.stage is not None:  # a stage may begin within a block
            segments.append([])
        stage = one.stage if one.stage is not None else stage
        segments[-1].append(one)
    return [unit for part in segments for unit in fold(part, lambda one: home.get(one.name), lambda one: one.label)]


def _operators(program: DistributedProgram) -> Iterator[Operator]:
    local = program.source.local
    sharded, stage = local.staged.sharded, local.staged.stage
    shown = [(index, axis) for index, axis in enumerate(sharded.axes) if axis.role != "time"]
    leaves = sharded.program.leaves
    told: set[fx.Node] = set()
    for node in sharded.program.graph.nodes:
        if node.op != "call_function" or is_getitem(node):
            continue
        parameters, moves, reads = [], [], []
        for position, given in enumerate(tensor_inputs(node)):
            source = origin(given)[0]
            leaf = leaves.get(source)
            name = leaf.name if leaf is not None else source.name
            reads += [] if leaf is not None else [source.name]
            if leaf is not None and leaf.kind == "parameter":
                kinds = sharded.produced(source)
                here = local_shape(shape(source), kinds, sharded.ranks)
                types = tuple((axis.name, str(kinds[index])) for index, axis in shown)
                parameters.append(Parameter(leaf.name, shape(source), here, types))
            if position < len(read := local.reads.get(node, ())):
                moves += _moves(name, read[position], told)
        strategies = sharded.strategies[node]
        types_made = tuple((axis.name, str(strategies[i].outputs[0]), strategies[i].splits) for i, axis in shown)
        made = values(node)[0]
        where = facts(node).where
        yield Operator(
            node.name, str(node.target).removesuffix(".default"), f"{str(made.dtype)[6:]}{list(made.shape)}",
            where.module, where.source, stage.get(node), types_made, tuple(moves), tuple(parameters), tuple(reads),
        )  # fmt: skip


def _moves(name: str, node: fx.Node, told: set[fx.Node]) -> list[Move]:
    """Conversions on the way to ``node``, each told once."""
    found: list[Move] = []
    while node.op == "call_function" and node.target is convert and node not in told:
        told.add(node)
        given, axis, _, source, target = node.args
        assert isinstance(given, fx.Node)
        a, b = parse_type(str(source)), parse_type(str(target))
        back = gradient(b), gradient(a)
        moved = max(num_bytes(value(given)), num_bytes(value(node)))
        found.append(Move(name, str(axis), str(a), str(b), _collective(a, b), _collective(*back), moved))
        node = given
    return [move for move in reversed(found) if move.forward or move.backward]


def _collective(source: AxisType, target: AxisType) -> str:
    operator = lower_conversion(source, target)[0]
    name = "" if operator is None else str(operator).split(".")[1]
    return "" if name in ("shard_slice", "shard_pad", "share") else name  # these move nothing
