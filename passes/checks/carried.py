"""Check of steps that consist of several batches: what each reads of the whole batch, and what it hands to the next.

That the loss of such a step is the mean of those of the module, and its buffers are those of the module called with one
batch after the other, is what ``verify`` proves with the module itself.
"""

from __future__ import annotations

from torch import fx

from ...core.annotations import facts, leaf
from ...core.errors import REPORT, CompileError
from ...core.sharding import I
from ...ir.program import DistributedProgram, StageProgram
from ...ops.rank_local import DRAWS, microbatch
from ...schedules.schedule import Op


def check_carried(program: DistributedProgram) -> None:
    """Raises: CompileError QN209 with the value that is read, handed on, or drawn otherwise."""
    if program.batches == 1:
        return
    graph, made = program.source.graph, program.source.local.staged.sharded.program
    carried = {name: program.source.outputs[position].name for name, position in made.carried.items()}
    leaves = {node: found for node in graph.nodes if node.op == "placeholder" and (found := leaf(node)) is not None}
    for node, found in leaves.items():
        for user in node.users if found.kind == "input" and found.batched else ():
            if user.target is not microbatch or user.args[1:] != (program.batches, 0, 1):
                raise _fail(f"{user.name} reads the rows of all batches of {node.name}", user)
    names = {node.name: found.name for node, found in leaves.items() if found.name in carried}
    for spec in program.results[len(program.results) - len(carried) :]:
        if any(kind is not I for kind in spec.sharding):
            raise _fail(f"{spec.path} is not whole where the next batch reads it")
    for stage in program.stages:
        _check_stage(stage, names, carried)
    once = {n for n in program.source.once if n.op == "call_function"}
    for node in graph.nodes:
        if node in once and (node.target in DRAWS or any(n.name in names for n in node.all_input_nodes)):
            raise _fail(f"{node.name} is another one for each batch, and runs once", node)
    for row in program.schedule.actions:
        order: dict[int, int] = {}
        for action in row:
            if action.op is Op.FORWARD and order.setdefault(action.stage, 0) != action.microbatch:
                raise _fail(f"stage {action.stage} computes microbatch {action.microbatch} out of order")
            order[action.stage] = order.get(action.stage, 0) + (action.op is Op.FORWARD)


def _check_stage(stage: StageProgram, names: dict[str, str], carried: dict[str, str]) -> None:
    for label, piece in stage.pieces.items():
        for name in piece.static:
            if name in names:
                raise _fail(f"the {label} of stage {stage.index} reads {names[name]} as it was before the step")
    read = {name for piece in stage.pieces.values() for name in piece.dynamic if name in names}
    kept = {name for piece in (stage.backward, stage.weight) if piece for name in piece.dynamic if name in names}
    if not kept <= set(stage.saved):
        raise _fail(f"stage {stage.index} does not keep what its backward reads of {names[min(kept)]}")
    for name in read | stage.carried.keys():
        if stage.carried.get(name) != carried[names[name]]:
            raise _fail(f"{names[name]} becomes {stage.carried.get(name)} in stage {stage.index}")


def _fail(what: str, node: fx.Node | None = None) -> CompileError:
    where = facts(node).where if node is not None else None
    return CompileError("QN209", f"batches check: {what}", where=where, fix=REPORT)
