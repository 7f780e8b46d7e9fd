"""The model as it is split: operators by block, their types on every axis, and what is exchanged between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from ..core.annotations import facts, is_getitem, num_bytes, origin, shape, tensor_inputs, value, values
from ..core.sharding import AxisType, gradient, local_shape, parse_type
from ..ir.distributed_program import DistributedProgram
from ..ir.repeated_blocks import block_members
from ..ops.catalog import op_spec
from ..ops.collectives import lower_conversion
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
    """A trained tensor that an operator reads; ``local`` is the shape on a rank."""

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


def units(program: DistributedProgram, operators: list[Operator]) -> list[FoldedUnit[Operator]]:
    """Return operators by stage and block; of blocks that are equal, one."""
    graph = program.source.local.staged.sharded.program.graph
    home = {node.name: block for block, nodes in block_members(graph).items() for node in nodes}
    segments: list[list[Operator]] = [[]]
    stage: int | None = None
    for operator in operators:
        if stage not in (None, operator.stage) and operator.stage is not None:  # a stage may begin within a block
            segments.append([])
        stage = operator.stage if operator.stage is not None else stage
        segments[-1].append(operator)
    folded = (fold(part, lambda item: home.get(item.name), lambda item: item.label) for part in segments)
    return [unit for part in folded for unit in part]


def _operators(program: DistributedProgram) -> Iterator[Operator]:
    local = program.source.local
    sharded, stage = local.staged.sharded, local.staged.stage
    shown = [(index, axis) for index, axis in enumerate(sharded.axes) if axis.role != "time"]
    leaves = sharded.program.leaves
    shown_moves: set[fx.Node] = set()
    for node in sharded.program.graph.nodes:
        if node.op != "call_function" or is_getitem(node):
            continue
        parameters, moves, reads = [], [], []
        for position, operand in enumerate(tensor_inputs(node)):
            source = origin(operand)[0]
            leaf = leaves.get(source)
            name = leaf.name if leaf is not None else source.name
            reads += [] if leaf is not None else [source.name]
            if leaf is not None and leaf.kind == "parameter":
                kinds = sharded.produced(source)
                local_size = local_shape(shape(source), kinds, sharded.axis_sizes)
                types = tuple((axis.name, str(kinds[index])) for index, axis in shown)
                parameters.append(Parameter(leaf.name, shape(source), local_size, types))
            if position < len(read := local.reads.get(node, ())):
                moves += _moves(name, read[position], shown_moves)
        strategies = sharded.strategies[node]
        result_types = tuple((axis.name, str(strategies[i].outputs[0]), strategies[i].splits) for i, axis in shown)
        result = values(node)[0]
        where = facts(node).where
        yield Operator(
            node.name, str(node.target).removesuffix(".default"), f"{str(result.dtype)[6:]}{list(result.shape)}",
            where.module, where.source, stage.get(node), result_types, tuple(moves), tuple(parameters), tuple(reads),
        )  # fmt: skip


def _moves(name: str, node: fx.Node, shown: set[fx.Node]) -> list[Move]:
    """Return conversions on the way to ``node``, each shown once."""
    moves: list[Move] = []
    while node.op == "call_function" and op_spec(node).converts and node not in shown:
        shown.add(node)
        operand, axis, _, source, target = node.args
        assert isinstance(operand, fx.Node)
        a, b = parse_type(str(source)), parse_type(str(target))
        back = gradient(b), gradient(a)
        moved = max(num_bytes(value(operand)), num_bytes(value(node)))
        moves.append(Move(name, str(axis), str(a), str(b), _collective(a, b), _collective(*back), moved))
        node = operand
    return [move for move in reversed(moves) if move.forward or move.backward]


def _collective(source: AxisType, target: AxisType) -> str:
    operator = lower_conversion(source, target)[0]
    name = "" if operator is None else str(operator).split(".")[1]
    return "" if name in ("shard_slice", "shard_pad", "share") else name  # these move nothing
