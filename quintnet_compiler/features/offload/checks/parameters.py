"""Check of parameters that wait in host memory: they are read through copies, none of which outlives its function."""

from __future__ import annotations

from functools import partial

from torch import fx

from ....checks.failure import check_failure
from ....checks.rewrites.results import check_results
from ....compat.torch import schema_or_none
from ....core.annotations import facts, leaf, origin
from ....ir.program import DifferentiatedProgram
from ....ir.value_numbers import ValueNumbers
from ....ops.catalog import op_spec
from .activations import NumberedCopies

_fail = partial(check_failure, "check of parameters on the host")


def check_offload_parameters(old: DifferentiatedProgram, new: DifferentiatedProgram) -> None:
    """Check that each value is computed by the same operators from the same values, where a copy is what it copies.

    ``copy_in`` alone reads parameters, for a function of a microbatch, and what a backward reads of one was copied in
    there.

    Raises:
        CompileError: QN209 with the first value that is another one, or is on the device when it should not be.
    """
    numbers = ValueNumbers()
    _check_calls(NumberedCopies(old, numbers), NumberedCopies(new, numbers))
    for node in new.graph.nodes:
        if node.op == "placeholder" and _parameter(node):
            for reader in node.users:
                _check_copy(new, node, reader)
        elif node.op == "call_function" and facts(node).phase == "backward":
            for source in node.all_input_nodes:
                if kept := _copied(source):
                    raise _fail(f"{node.name} reads {kept.name} of the forward, though it can be copied again", node)


def _check_calls(old: NumberedCopies, new: NumberedCopies) -> None:
    check_results(old.program, new.program, old.of, new.of, _fail)
    old_calls, new_calls = ({(number, stage) for number, stage, _ in values.calls} for values in (old, new))
    for (number, stage, _), node in new.calls.items():
        if (number, stage) not in old_calls:
            raise _fail(f"{node.name} is another call than any there was", node)
    if missing := old_calls - new_calls:
        gone = next(node for (number, stage, _), node in old.calls.items() if (number, stage) in missing)
        raise _fail(f"{gone.name} is called no more", None)


def _check_copy(program: DifferentiatedProgram, parameter: fx.Node, reader: fx.Node) -> None:
    if not _comes_from_host(reader):
        raise _fail(f"{reader.name} reads {parameter.name}, which is on the host", reader)
    stage = program.stage.get(reader)
    if stage is None or reader in program.once:
        raise _fail(f"{reader.name} belongs to no function of a microbatch", reader)
    if not reader.users:
        raise _fail(f"nothing reads {reader.name}", reader)
    for user in reader.users:
        here = user.op == "output" or (program.stage.get(user), facts(user).phase) == (stage, facts(reader).phase)
        if not here:
            raise _fail(f"{user.name} reads {reader.name} of another function", user)


def _comes_from_host(node: fx.Node) -> bool:
    return op_spec(node).is_copy and op_spec(node).way == "from host"


def _copied(node: fx.Node) -> fx.Node | None:
    """Return the copy of a parameter in a forward in whose memory a value may lie."""
    while node.op == "call_function" and facts(node).phase == "forward":
        if _comes_from_host(node):
            return node if _parameter(node.all_input_nodes[0]) else None
        call = origin(node)[0]
        views = any(r.alias_info is not None for r in getattr(schema_or_none(call.target), "returns", ()))
        if not (views and call.all_input_nodes):
            return None
        node = call.all_input_nodes[0]
    return None


def _parameter(node: fx.Node) -> bool:
    node_leaf = leaf(node) if node.op == "placeholder" else None
    return node_leaf is not None and node_leaf.kind == "parameter"
