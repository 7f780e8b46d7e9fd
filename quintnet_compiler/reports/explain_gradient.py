"""Why is the gradient of one parameter right? The types along one path from it to the loss, and what settles it."""

from __future__ import annotations

import difflib
import itertools
from collections import deque

from torch import fx

from ..checks.types import Step, moves
from ..core.annotations import facts, is_getitem, needs_grad, origin, shape, tensor_inputs
from ..core.errors import CompileError
from ..core.sharding import AxisType, P, R, Shard, Sharding, gradient, local_shape
from ..ir.distributed_program import DistributedProgram
from ..ir.program import LocalProgram, ShardedProgram, outputs
from ..ops.collectives import lower_conversion

Use = tuple[fx.Node, int]  # an operator and which of its inputs


def prove_gradients(program: DistributedProgram, name: str) -> str:
    """Return the proof that the gradient of the parameter ``name`` is that of the unsplit model, as text.

    Every line is a result of the type check or the backward check of this program; the rule of each operator and the
    transpose of each conversion are proven by brute force in the tests.

    Raises:
        CompileError: QN204 if the model has no such parameter, or it is not trained.
    """
    local = program.source.local
    sharded = local.staged.sharded
    named = {leaf.name: node for node, leaf in sharded.program.leaves.items() if leaf.trainable}
    if name not in named:
        close = difflib.get_close_matches(name, named, n=3, cutoff=0.3)
        raise CompileError("QN204", f"no trained parameter is called {name!r}", fix=f"did you mean {', '.join(close)}?")
    node = named[name]
    kinds = sharded.produced(node)
    lines = [f"Why the gradient of {name} is that of the unsplit model", ""]
    part = local_shape(shape(node), kinds, sharded.axis_sizes)
    lines.append(f"{name} is {list(shape(node))}, on each rank {list(part)}: {_types(sharded, kinds)}")
    lines += [f"  {line}" for line in _settling(program, name, kinds)]
    uses = [(user, i) for user in _users(node) for i, n in enumerate(tensor_inputs(user)) if origin(n)[0] is node]
    for use in uses:
        lines += ["", *_use(local, use)]
        path = _path(sharded, use[0])
        lines += ["  from there to the loss (its gradient comes back the same way):"]
        lines += [f"    {line}" for edge in itertools.pairwise(path) for line in _edge(local, *edge)]
    lines += ["", f"The gradient is the sum of {len(uses)} term{'s' if len(uses) > 1 else ''}, one per use."]
    return "\n".join(lines)


def _types(sharded: ShardedProgram, kinds: Sharding) -> str:
    return ", ".join(f"{a.name}: {k}" for a, k in zip(sharded.axes, kinds, strict=True)) or "one rank"


def _settling(program: DistributedProgram, name: str, kinds: Sharding) -> list[str]:
    lines = []
    for axis, kind, term in zip(program.axes, kinds, program.state[name].accumulated, strict=True):
        if term != kind:
            lines.append(
                f"{axis.name}: each of {axis.size} ranks has a term of all of it; one reduce-scatter at the end of the "
                "step, the transpose of the gather at its start, leaves each its slice"
            )
        elif kind is R and axis.role == "time":
            lines.append(f"{axis.name}: each of {axis.size} microbatches adds a term; they are added up as they come")
        elif kind is R:
            lines.append(f"{axis.name}: each of {axis.size} ranks has a term; one all-reduce at the end of the step")
        elif isinstance(kind, Shard):
            lines.append(f"{axis.name}: each of {axis.size} ranks has its slice of the gradient, complete")
        else:
            lines.append(f"{axis.name}: all {axis.size} ranks compute the same gradient, complete")
    stages = program.state[name].stages
    if len(stages) > 1:
        lines.append(f"pp: stages {', '.join(map(str, stages))} use it; their gradients are added up once, at the end")
    return lines


def _use(local: LocalProgram, use: Use) -> list[str]:
    node, position = use
    sharded = local.staged.sharded
    stage = local.staged.stage.get(node)
    lines = [f"used by {_named(node)}" + (f" in stage {stage}" if stage is not None else "")]
    for axis, strategy in zip(sharded.axes, sharded.strategies[node], strict=True):
        back = [str(gradient(k)) for k in strategy.outputs]
        term = gradient(strategy.inputs[position])
        lines.append(
            f"  {axis.name}: {strategy.label}: {strategy.signature}; a gradient {', '.join(back)} of the result gives "
            f"{term} here"
        )
    lines += [f"  {line}" for line in _moves(local, use)]
    return lines


def _edge(local: LocalProgram, source: fx.Node, target: fx.Node) -> list[str]:
    position = next(i for i, n in enumerate(tensor_inputs(target)) if origin(n)[0] is source)
    kinds = local.staged.sharded.produced(target)
    crossing = local.staged.stage.get(source, 0) != local.staged.stage.get(target, 0)
    lines = _moves(local, (target, position))
    lines += [f"to stage {local.staged.stage[target]}"] if crossing else []
    return [*lines, f"{_named(target)}: {_types(local.staged.sharded, kinds)}"]


def _moves(local: LocalProgram, use: Use) -> list[str]:
    """The conversions of an operator's input, with what each is forward and backward."""
    node, position = use
    source = origin(tensor_inputs(node)[position])
    if node not in local.reads or source not in local.parts:
        return []
    read = local.reads[node][position]
    return [_move(local, step) for step in moves(local, read, source)]


def _move(local: LocalProgram, step: Step) -> str:
    axis = local.staged.sharded.axes[step.axis]
    forward = _operator(step.before, step.after)
    backward = _operator(gradient(step.after), gradient(step.before))
    return f"converted over {axis.name}: {step.before} -> {step.after} ({forward}; its gradient: {backward})"


def _operator(current: AxisType, wanted: AxisType) -> str:
    op, _ = lower_conversion(current, wanted)
    if op is None:
        return "nothing moves"
    return "each keeps a share" if current is not P and wanted is P and "share" in str(op) else str(op).split(".")[1]


def _named(node: fx.Node) -> str:
    where = str(facts(node).where)
    return f"%{node.name} = {node.target}" + (f"  [{where}]" if where else "")


def _users(node: fx.Node) -> list[fx.Node]:
    direct = [u for u in node.users if u.op == "call_function"]
    through = [w for u in direct if is_getitem(u) for w in u.users]
    return [u for u in (*direct, *through) if u.op == "call_function" and not is_getitem(u) and needs_grad(u)]


def _path(sharded: ShardedProgram, start: fx.Node) -> list[fx.Node]:
    """Return a shortest path from an operator to the loss."""
    goal = origin(outputs(sharded.program.graph)[0])[0]
    came: dict[fx.Node, fx.Node | None] = {start: None}
    todo = deque([start])
    while todo:
        node = todo.popleft()
        if node is goal:
            break
        for user in _users(node):
            if user not in came:
                came[user] = node
                todo.append(user)
    path: list[fx.Node] = []
    step: fx.Node | None = goal if goal in came else None
    while step is not None:
        path.append(step)
        step = came[step]
    return path[::-1]
