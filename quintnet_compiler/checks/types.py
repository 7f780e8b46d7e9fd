"""Type check of a whole layout.

Every operator runs as its rule allows, every move between two shardings is one that the types allow, and what enters an
operator is what its strategy asks for.

Together with the rules and conversions, which are proven by brute force, this is the proof that the forward computes
the unsplit program's values; and since a type determines the type of its gradient, that every gradient is partial
exactly where its type says so. It shares the rules with the passes that chose and inserted what is checked here, and
no code that decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import fx

from ..core.annotations import (
    Leaf,
    copied_from,
    is_getitem,
    leaf,
    needs_grad,
    origin,
    shape,
    tensor_inputs,
    value,
    values,
)
from ..core.sharding import AxisType, I, P, R, Shard, parse_type
from ..ir.program import Axis, LocalProgram, ShardedProgram, Strategy, outputs
from ..ops.catalog import op_spec
from ..ops.extensions import extension
from ..ops.rules.notation import Factors
from .expert_layers import check_expert_layer, expert_route
from .extensions import ExpertProductCheck, LayerError, LocalFormCheck
from .failure import check_failure
from .padding_nodes import peel, without_fill
from .strategies import Reading, Rules
from .tables import bare

_fail = partial(check_failure, "type check")
Value = tuple[fx.Node, int]


@dataclass(frozen=True)
class Step:
    """A move of a value on its way into an operator: on axis ``axis`` from one type to another."""

    axis: int
    before: AxisType
    after: AxisType
    node: fx.Node


def check_types(local: LocalProgram, rules: Rules) -> None:
    """Check every operator, leaf and output of ``local``.

    Raises:
        CompileError: QN209 with the operator and the types that do not fit.
    """
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
    for node, tensor in sharded.program.leaves.items():
        if tensor.kind == "parameter":
            _check_gathered(local, node)
            _check_start_of_step(local, node, tensor)
    _check_outputs(local)


# -- strategies


def _check_strategies(sharded: ShardedProgram, node: fx.Node, rule: Factors) -> frozenset[str]:
    """Check that the rule allows each axis' strategy, given what the axes before it left.

    Returns:
        The axes over which the operator itself communicates.
    """
    reading, own_axes = Reading(node, rule), set[str]()
    for axis, strategy in zip(sharded.axes, sharded.strategies[node], strict=True):
        error, split = reading.apply_strategy(strategy, axis.size)
        if error:
            raise _fail(f"no rule lets {node.name} run as {strategy.signature} over {axis.name}: {error}", node)
        exchanges = len(split) > 1
        if exchanges is not strategy.exchanges:
            message = f"its strategy has exchanges={strategy.exchanges}, its rule {exchanges}"
            raise _fail(f"{node.name} over {axis.name}: {message}", node)
        if exchanges and axis.role == "time":
            raise _fail(f"{node.name} would communicate between microbatches", node)
        if exchanges or _communicates(node, rule, axis, strategy, split):
            own_axes.add(axis.name)
    return frozenset(own_axes)


def _communicates(node: fx.Node, rule: Factors, axis: Axis, strategy: Strategy, split: frozenset[str]) -> bool:
    """Return whether an operator that exchanges nothing else gathers slices, settles sums or says that it does."""
    says_so = bool(split) and op_spec(node).exchanges and axis.role != "time"
    return says_so or strategy.inside is not None or bool(split & rule.settled)


# -- leaves


def _leaf_rule(node: fx.Node) -> Factors:
    """Return a rule in which each dim of a leaf is a factor of its own."""
    names = [f"dim{i}" for i in range(len(shape(node)))]
    return Factors((), (tuple((name,) for name in names),), dict(zip(names, shape(node), strict=True)))


def _check_leaf(sharded: ShardedProgram, node: fx.Node) -> None:
    """Check that no leaf is partial, and that gradients are terms of each microbatch, which are added up."""
    tensor = leaf(node)
    for axis, kind in zip(sharded.axes, sharded.produced(node), strict=True):
        if kind is P:
            raise _fail(f"{node.name} arrives partial over {axis.name}", node)
        if axis.role == "time" and isinstance(kind, Shard):
            raise _fail(f"{node.name} arrives split over {axis.name}", node)
        if tensor is not None and tensor.trainable and axis.role == "time" and kind is not R:
            raise _fail(f"the gradient of {tensor.name} would count once for each microbatch", node)


def _check_gathered(local: LocalProgram, node: fx.Node) -> None:
    """Check that a parameter that is stored in slices is gathered only over axes that split data alone."""
    sharded = local.staged.sharded
    gathered, stored = sharded.gathered.get(node), sharded.produced(node)
    for axis, kind, whole in zip(sharded.axes, stored, gathered.sharding if gathered else stored, strict=True):
        data_alone = isinstance(kind, Shard) and whole in (I, R) and axis.role in ("data", "context")
        if kind != whole and not data_alone:
            raise _fail(f"{node.name} is stored as {kind} over {axis.name}, and gathered to {whole}", node)


def _check_start_of_step(local: LocalProgram, node: fx.Node, tensor: Leaf) -> None:
    """Check what is done to a parameter once, at the start of a step.

    A parameter with more bits than operators read is copied, before anything else. Where the transpose of a copy or a
    gather is left to the end of the step, every user must read the copied or gathered parameter.
    """
    sharded = local.staged.sharded
    start, gathered = local.parts.get((node, 0)), sharded.gathered.get(node)
    if start is None:
        return
    copies = _checked_copies(local, node, tensor, start)
    deferred = gathered is not None and gathered.deferred
    once = set(copies)
    for end in _deferred_ends(local, start):
        steps = moves(local, end, (node, 0))
        once |= {step.node for step in steps}
        is_copy = end in copies
        whole = gathered.sharding if gathered is not None and not is_copy else sharded.produced(node)
        may_wait = deferred or is_copy
        if not (may_wait and once <= local.once and _gathers_directly(sharded, node, steps, whole)):
            raise _fail(f"{end.name} is not what {node.name} is gathered to at the start of a step", node)
    if deferred and not _gradient_readers(copies or {start}) <= once:
        raise _fail(f"an operator reads the slices of {node.name} whose gradient is scattered later", node)


def _deferred_ends(local: LocalProgram, start: fx.Node) -> list[fx.Node]:
    return [end for end, source in local.deferred.items() if source is start]


def _gradient_readers(nodes: set[fx.Node]) -> set[fx.Node]:
    return {user for node in nodes for user in node.users if needs_grad(user)}


def _gathers_directly(sharded: ShardedProgram, node: fx.Node, steps: list[Step], whole: tuple[AxisType, ...]) -> bool:
    """Return whether ``steps`` carry a parameter from its stored type to ``whole``, each straight to replicated."""
    stored = sharded.produced(node)
    direct = all(step.before == stored[step.axis] and step.after is R for step in steps)
    return direct and arrive(sharded, (node, 0), steps, grad=True, user=node) == whole


def _checked_copies(local: LocalProgram, node: fx.Node, tensor: Leaf, start: fx.Node) -> set[fx.Node]:
    copies = {user for user in start.users if copied_from(user)}
    for copy in copies:
        if copy not in local.once or value(copy).dtype is not value(node).dtype:
            raise _fail(f"{copy.name} is not what operators read of {node.name}", node)
    if copies and (not copies.issuperset(start.users) or value(start).dtype is not tensor.held):
        raise _fail(f"an operator reads {node.name} itself, and others a copy", node)
    return copies


# -- what operators read


def _check_inputs(local: LocalProgram, node: fx.Node, own_axes: frozenset[str]) -> None:
    """Check that moves carry each input to the type that the operator's strategies take."""
    sharded = local.staged.sharded
    reads = _local_inputs(local, node, own_axes)
    if reads is None:
        return
    for position, operand in enumerate(tensor_inputs(node)):
        source = origin(operand)
        grad = needs_grad(node) and needs_grad(operand)
        actual = arrive(sharded, source, moves(local, reads[position], source), grad=grad, user=node)
        expected = sharded.wanted(node, position)
        if actual != tuple(bare(kind, grad) for kind in expected):
            raise _fail(f"{node.name} reads {operand.name} as {actual} where its strategies take {expected}", node)


def _local_inputs(local: LocalProgram, node: fx.Node, own_axes: frozenset[str]) -> tuple[fx.Node, ...] | None:
    """Return the local nodes that stand for the operator's inputs, in order; None where nothing of it is left.

    Some operators become several local ones: these together may read nothing else than what stands for the inputs, and
    communicate over no other axes than ``own_axes``.
    """
    results = [without_fill(local.parts[node, i]) for i in range(len(values(node))) if (node, i) in local.parts]
    if results and op_spec(node).by_expert and node not in local.reads:
        raise _fail(f"nothing stands for some inputs of {node.name}", node)
    if not results or node not in local.reads:
        return None
    reads = local.reads[node]
    form = extension(node.target, LocalFormCheck)
    if form is not None:
        _check_form(local, form, node, results[0], own_axes)
    if op_spec(node).by_expert:
        _check_experts(local, node, results[0], reads)
    _check_inside(node, results, reads, own_axes)
    return reads


def _check_inside(node: fx.Node, results: list[fx.Node], reads: Sequence[fx.Node], own_axes: frozenset[str]) -> None:
    """Check the local operators between ``reads`` and ``results``, which stand for ``node``."""
    todo, seen = list(results), set(reads)
    while todo:
        inner = todo.pop()
        if inner in seen:
            continue
        seen.add(inner)
        if inner.op == "placeholder":
            raise _fail(f"{node.name} reads {inner.name}, which is none of its inputs", node)
        if (op_spec(inner).communicates or op_spec(inner).converts) and inner.args[1] not in own_axes:
            raise _fail(f"{inner.name} communicates over {inner.args[1]} within {node.name}", node)
        if inner.target is node.target and tensor_inputs(inner)[: len(reads)] != list(reads):
            raise _fail(f"{node.name} reads {inner.all_input_nodes} where {list(reads)} stand for its inputs", node)
        todo += inner.all_input_nodes


def _check_experts(local: LocalProgram, node: fx.Node, result: fx.Node, reads: Sequence[fx.Node]) -> None:
    axes, strategies = local.staged.sharded.axes, local.staged.sharded.strategies[node]
    route = expert_route(axes, strategies, experts=shape(tensor_inputs(node)[2])[0])
    product = extension(node.target, ExpertProductCheck)
    read = None if product is None else partial(product.read, node, reads[2:], axes, strategies)
    try:
        check_expert_layer(result, reads, route, bool(node.args[4]), read)
    except LayerError as error:
        raise _fail(f"{node.name}: {error}", node) from None


def _check_form(
    local: LocalProgram, form: LocalFormCheck, node: fx.Node, result: fx.Node, own_axes: frozenset[str]
) -> None:
    """Check an operator that runs as something else on a rank, in one microbatch."""
    axes = sorted(a.name for a in local.staged.sharded.axes if a.name in own_axes and a.role != "time")
    try:
        form.check(node, result, axes)
    except LayerError as error:
        raise _fail(str(error), node) from None


# -- moves


def moves(local: LocalProgram, node: fx.Node, source: Value) -> list[Step]:
    """Return the moves that carry ``source`` to the local ``node``, in order."""
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
    """Return the move that a local node is; None if it is none."""
    numbers = {axis.name: i for i, axis in enumerate(axes)}
    if op_spec(node).converts:
        return Step(numbers[str(node.args[1])], parse_type(str(node.args[3])), parse_type(str(node.args[4])), node)
    if op_spec(node).shares:
        return Step(numbers[str(node.args[1])], I, P, node)
    if op_spec(node).cuts_microbatch:
        time = next(i for i, axis in enumerate(axes) if axis.role == "time")
        return Step(time, I, Shard(*map(int, node.args[2:])), node)  # type: ignore[arg-type]
    return None


def arrive(
    sharded: ShardedProgram, source: Value, steps: list[Step], *, grad: bool, user: fx.Node
) -> tuple[AxisType, ...]:
    """Return the sharding of ``source`` after ``steps``.

    Raises:
        CompileError: QN209 for a move that starts from another type than the value has, that makes slices terms,
            or that touches a dim of which an axis further in still holds slices.
    """
    state = [bare(kind, grad) for kind in sharded.produced(*source)]
    for step in steps:
        current, target = bare(step.before, grad), bare(step.after, grad)
        if state[step.axis] != current:
            raise _fail(f"{step.node.name} converts {current}, and {source[0].name} is {state[step.axis]} there", user)
        if isinstance(current, Shard) and target is P and not grad:
            raise _fail(f"{step.node.name} makes a term of a slice", user)
        dims = {kind.dim for kind in (current, target) if isinstance(kind, Shard)}
        for inner in range(step.axis + 1, len(state)):
            kind = state[inner]
            if isinstance(kind, Shard) and kind.dim in dims:
                raise _fail(f"{step.node.name} would permute the slices of {sharded.axes[inner].name}", user)
        state[step.axis] = target
    return tuple(state)


# -- outputs


def _check_outputs(local: LocalProgram) -> None:
    """Check the types with which outputs leave.

    The loss, and what the end of the step reads, leave whole or as terms that the runtime adds up; other outputs whole,
    as terms of microbatches, or as slices that are joined.
    """
    sharded = local.staged.sharded
    strategies = sharded.strategies[sharded.program.graph.output_node()]
    ends = outputs(local.graph)
    for position, result in enumerate(outputs(sharded.program.graph)):
        expected = tuple(strategy.inputs[position] for strategy in strategies)
        source, grad = origin(result), needs_grad(result)
        actual = arrive(sharded, source, moves(local, ends[position], source), grad=grad, user=source[0])
        if [bare(kind, False) for kind in actual] != [bare(kind, False) for kind in expected]:
            raise _fail(f"output {position} leaves as {actual} where the runtime takes {expected}", source[0])
        for axis, kind in zip(sharded.axes, expected, strict=True):
            summed = shape(result) == () or axis.role == "time" or position in sharded.program.ended
            if kind is P and not summed:
                raise _fail(f"output {position} leaves partial over {axis.name}", source[0])
            if kind is R and grad:
                raise _fail(f"the gradient of output {position} would count {axis.size} times", source[0])
