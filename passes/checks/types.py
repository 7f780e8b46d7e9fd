"""Type check of a whole layout: every operator runs as its rule allows, every move between two shardings is one that
the types allow, and what enters an operator is what its strategy asks for.

Together with the rules and conversions, which are proven by brute force, this is the proof that the forward computes
the unsplit program's values; and since a type determines the type of its gradient, that every gradient is partial
exactly where its type says so. It shares the rules with the passes that chose and inserted what is checked here, and
no code that decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ...core.annotations import (
    Leaf,
    copied_from,
    facts,
    is_getitem,
    leaf,
    needs_grad,
    origin,
    shape,
    tensor_inputs,
    value,
    values,
)
from ...core.errors import REPORT, CompileError
from ...core.sharding import AxisType, I, P, R, Shard, parse_type
from ...ir.program import Axis, LocalProgram, ShardedProgram, outputs
from ...ops.collectives import COMMUNICATION, convert, share
from ...ops.experts.scaled_groups import EXPERT_LAYERS, scaled_expert_linear
from ...ops.rank_local import microbatch
from ...ops.rules.notation import Factors
from ...ops.scaled_products import block_max
from .padding import peel, without_fill
from .rewrites.scaled_experts import ScaledLayer, Wrong, largest_over
from .rewrites.token_dispatch import moved_there, splits, travels, wrong_way
from .strategies import Reading, Rules
from .tables import bare

Value = tuple[fx.Node, int]
_MOVES = COMMUNICATION | {convert}


@dataclass(frozen=True)
class Step:
    """One move of a value on its way into an operator: on axis ``axis`` from one type to another."""

    axis: int
    before: AxisType
    after: AxisType
    node: fx.Node


def check_types(local: LocalProgram, rules: Rules) -> None:
    """Raises: CompileError QN209 with the operator and the types that do not fit."""
    sharded = local.staged.sharded
    factors = rules.factors(sharded.program.graph)
    for node in sharded.program.graph.nodes:
        if node.op == "output" or is_getitem(node):
            continue
        if node.op == "placeholder":
            _check_strategies(sharded, node, _leaf_rule(node))
            _check_leaf(sharded, node)
        else:
            _check_inputs(local, node, _check_strategies(sharded, node, factors[node]))
    for node, found in sharded.program.leaves.items():
        if found.kind == "parameter":
            _check_held(local, node, found)
    _check_outputs(local)


def _fail(what: str, node: fx.Node) -> CompileError:
    return CompileError("QN209", f"type check: {what}", where=facts(node).where, fix=REPORT)


def _check_strategies(sharded: ShardedProgram, node: fx.Node, rule: Factors) -> frozenset[str]:
    """Each axis' strategy is one that the rule allows, given what the axes before it left. Returns the axes over which
    the operator itself communicates."""
    reading, own = Reading(node, rule), set[str]()
    for axis, chosen in zip(sharded.axes, sharded.strategies[node], strict=True):
        why, split = reading.axis(chosen, axis.size)
        if why:
            raise _fail(f"no rule lets {node.name} run as {chosen.signature} over {axis.name}: {why}", node)
        exchanges = len(split) > 1
        if exchanges is not chosen.exchanges:
            raise _fail(f"{node.name} is told to exchange what it has, or not to, over {axis.name}", node)
        if exchanges and axis.role == "time":
            raise _fail(f"{node.name} would communicate between microbatches", node)
        scales = bool(split) and node.target is scaled_expert_linear and axis.role != "time"
        if exchanges or chosen.inside is not None or split & rule.settled or scales:
            own.add(axis.name)
    return frozenset(own)


def _leaf_rule(node: fx.Node) -> Factors:
    """Each dim of a leaf is a factor of its own."""
    names = [f"dim{i}" for i in range(len(shape(node)))]
    return Factors((), (tuple((name,) for name in names),), dict(zip(names, shape(node), strict=True)))


def _check_leaf(sharded: ShardedProgram, node: fx.Node) -> None:
    """A parameter's gradient is added up over microbatches, so it must be a term of each; nothing arrives partial."""
    found = leaf(node)
    for axis, kind in zip(sharded.axes, sharded.produced(node), strict=True):
        if kind is P:
            raise _fail(f"{node.name} arrives partial over {axis.name}", node)
        if axis.role == "time" and isinstance(kind, Shard):
            raise _fail(f"{node.name} arrives split over {axis.name}", node)
        if found is not None and found.trainable and axis.role == "time" and kind is not R:
            raise _fail(f"the gradient of {found.name} would count once for each microbatch", node)


def _check_held(local: LocalProgram, node: fx.Node, known: Leaf) -> None:
    """A parameter that is held in more bits than operators read is copied once a step, before anything else. One that
    is stored in slices is gathered where only data is split. If the transpose of either is left to the end of the
    step, it is that of what every user sees: the same, at the start of it."""
    sharded = local.staged.sharded
    held, stored = sharded.gathered.get(node), sharded.produced(node)
    for axis, kind, whole in zip(sharded.axes, stored, held.sharding if held else stored, strict=True):
        if kind != whole and not (isinstance(kind, Shard) and whole in (I, R) and axis.role in ("data", "context")):
            raise _fail(f"{node.name} is stored as {kind} over {axis.name}, and gathered to {whole}", node)
    start, later = local.parts.get((node, 0)), held is not None and held.deferred
    if start is None:
        return
    copies = {user for user in start.users if copied_from(user)}
    for copy in copies:
        if copy not in local.once or value(copy).dtype is not value(node).dtype:
            raise _fail(f"{copy.name} is not what operators read of {node.name}", node)
    if copies and (not copies.issuperset(start.users) or value(start).dtype is not known.held):
        raise _fail(f"an operator reads {node.name} itself, and others a copy", node)
    between = set(copies)
    for end in (end for end, found in local.deferred.items() if found is start):
        steps = moves(local, end, (node, 0))
        between |= {step.node for step in steps}
        arrived = arrive(sharded, (node, 0), steps, grad=True, user=node)
        direct = all(step.before == stored[step.axis] and step.after is R for step in steps)
        wanted = held.sharding if held is not None and end not in copies else stored
        if not ((later or end in copies) and direct and arrived == wanted and between <= local.once):
            raise _fail(f"{end.name} is not what {node.name} is gathered to at the start of a step", node)
    read = {user for one in (copies or {start}) for user in one.users if needs_grad(user)}
    if later and not between.issuperset(read):
        raise _fail(f"an operator reads the slices of {node.name} whose gradient is scattered later", node)


def _check_inputs(local: LocalProgram, node: fx.Node, own: frozenset[str]) -> None:
    """What the local operator reads is, by the moves in between, what its strategies ask for."""
    sharded = local.staged.sharded
    reads = _reads(local, node, own)
    if reads is None:
        return
    for position, given in enumerate(tensor_inputs(node)):
        source = origin(given)
        grad = needs_grad(node) and needs_grad(given)
        steps = moves(local, reads[position], source)
        found = arrive(sharded, source, steps, grad=grad, user=node)
        wanted = sharded.wanted(node, position)
        if found != tuple(bare(kind, grad) for kind in wanted):
            raise _fail(f"{node.name} reads {given.name} as {found} where its strategies take {wanted}", node)


def _reads(local: LocalProgram, node: fx.Node, own: frozenset[str]) -> tuple[fx.Node, ...] | None:
    """The local nodes that stand for the operator's inputs, in order; None where nothing of it is left.

    Some operators become several: these together may read nothing else than what stands for the inputs, and
    communicate over no other axes than ``own``.
    """
    made = [without_fill(local.parts[node, i]) for i in range(len(values(node))) if (node, i) in local.parts]
    if made and node.target in EXPERT_LAYERS and node not in local.reads:
        raise _fail(f"nothing stands for some of what {node.name} reads", node)
    if not made or node not in local.reads:
        return None
    reads, todo, seen = local.reads[node], list(made), set[fx.Node]()
    if node.target is block_max:
        _check_largest(local, node, made[0], own)
    if node.target in EXPERT_LAYERS:
        axes, chosen = local.staged.sharded.axes, local.staged.sharded.strategies[node]
        way, there = travels(axes, chosen), moved_there(axes, chosen)
        scaled = ScaledLayer(node, reads[2:], axes, chosen) if node.target is scaled_expert_linear else None
        experts = shape(tensor_inputs(node)[2])[0]
        split = splits(axes, chosen)
        if why := wrong_way(made[0], reads, way, there, split, experts, bool(node.args[4]), scaled):
            raise _fail(f"{node.name}: {why}", node)
    while todo:
        here = todo.pop()
        if here in reads or here in seen:
            continue
        seen.add(here)
        if here.op == "placeholder":
            raise _fail(f"{node.name} reads {here.name}, which is none of its inputs", node)
        if here.target in _MOVES and here.args[1] not in own:
            raise _fail(f"{here.name} communicates over {here.args[1]} within {node.name}", node)
        if here.target is node.target and tensor_inputs(here)[: len(reads)] != list(reads):
            raise _fail(f"{node.name} reads {here.all_input_nodes} where {list(reads)} stand for its inputs", node)
        todo += here.all_input_nodes
    return reads


def _check_largest(local: LocalProgram, node: fx.Node, made: fx.Node, own: frozenset[str]) -> None:
    """The largest number of a block is that of all ranks that have parts of it; a microbatch has its own."""
    axes = sorted(a.name for a in local.staged.sharded.axes if a.name in own and a.role != "time")
    try:
        found, over = largest_over(made)
    except Wrong as wrong:
        raise _fail(str(wrong), node) from None
    if found.target is not block_max or sorted(over) != axes:
        raise _fail(f"{node.name} is the largest over {over} where ranks over {axes} have parts", node)


def moves(local: LocalProgram, node: fx.Node, source: Value) -> list[Step]:
    """The moves that carry ``source`` to the local ``node``, first one first."""
    start, axes = local.parts[source], local.staged.sharded.axes
    steps: list[Step] = []
    while node is not start and copied_from(node) is not start:
        padding = peel(node)
        if padding is not None:  # see check_padding
            node = padding[0]
            continue
        step = _step(axes, node)
        if step is None:
            raise _fail(f"{node.name} stands where {source[0].name} should", node)
        steps.append(step)
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        node = operand
    return steps[::-1]


def _step(axes: tuple[Axis, ...], node: fx.Node) -> Step | None:
    numbers = {axis.name: i for i, axis in enumerate(axes)}
    if node.target is convert:
        return Step(numbers[str(node.args[1])], parse_type(str(node.args[3])), parse_type(str(node.args[4])), node)
    if node.target is share:
        return Step(numbers[str(node.args[1])], I, P, node)
    if node.target is microbatch:
        time = next(i for i, axis in enumerate(axes) if axis.role == "time")
        return Step(time, I, Shard(*map(int, node.args[2:])), node)  # type: ignore[arg-type]
    return None


def arrive(
    sharded: ShardedProgram, source: Value, steps: list[Step], *, grad: bool, user: fx.Node
) -> tuple[AxisType, ...]:
    """The sharding of ``source`` after ``steps``.

    Raises:
        CompileError: QN209 for a move that starts from another type than the value has, that makes slices terms,
            or that touches a dim of which an axis further in still holds slices.
    """
    state = [bare(kind, grad) for kind in sharded.produced(*source)]
    for step in steps:
        before, after = bare(step.before, grad), bare(step.after, grad)
        if state[step.axis] != before:
            raise _fail(f"{step.node.name} converts {before}, and {source[0].name} is {state[step.axis]} there", user)
        if isinstance(before, Shard) and after is P and not grad:
            raise _fail(f"{step.node.name} makes a term of a slice", user)
        dims = {kind.dim for kind in (before, after) if isinstance(kind, Shard)}
        for inner in range(step.axis + 1, len(state)):
            kind = state[inner]
            if isinstance(kind, Shard) and kind.dim in dims:
                raise _fail(f"{step.node.name} would permute the slices of {sharded.axes[inner].name}", user)
        state[step.axis] = after
    return tuple(state)


def _check_outputs(local: LocalProgram) -> None:
    """The loss, and what the end of the step reads, leave whole or as terms that the runtime adds up; other outputs
    whole, as terms of microbatches, or as slices that are joined."""
    sharded = local.staged.sharded
    leaving = sharded.strategies[sharded.program.graph.output_node()]
    ends = outputs(local.graph)
    for position, result in enumerate(outputs(sharded.program.graph)):
        wanted = tuple(s.inputs[position] for s in leaving)
        source, grad = origin(result), needs_grad(result)
        found = arrive(sharded, source, moves(local, ends[position], source), grad=grad, user=source[0])
        if [bare(kind, False) for kind in found] != [bare(kind, False) for kind in wanted]:
            raise _fail(f"output {position} leaves as {found} where the runtime takes {wanted}", source[0])
        for axis, kind in zip(sharded.axes, wanted, strict=True):
            summed = shape(result) == () or axis.role == "time" or position in sharded.program.ended
            if kind is P and not summed:
                raise _fail(f"output {position} leaves partial over {axis.name}", source[0])
            if kind is R and grad:
                raise _fail(f"the gradient of output {position} would count {axis.size} times", source[0])
