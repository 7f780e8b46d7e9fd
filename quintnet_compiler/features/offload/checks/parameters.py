"""Check of parameters that wait in host memory: they are read through copies, none of which outlives its function."""

from __future__ import annotations

from functools import partial

from torch import fx

from ....compat.torch import schema_or_none
from ....core.annotations import facts, leaf, origin
from ....ir.program import DifferentiatedProgram
from ....ir.value_numbers import ValueNumbers
from ....ops.catalog import op_spec
from ....passes.checks.failure import check_failure
from ....passes.checks.rewrites.results import check_results
from .activations import NumberedCopies

_fail = partial(check_failure, "check of parameters on the host")


def check_offload_parameters(before: DifferentiatedProgram, after: DifferentiatedProgram) -> None:
    """Every value is computed by the same operators from the same values, where a copy is what it is a copy of.
    ``copy_in`` alone reads parameters, for a function of a microbatch, and what a backward reads of one was copied in
    there.

    Raises:
        CompileError: QN209 with the first value that is another one, or is on the device when it should not be.
    """
    numbers = ValueNumbers()
    old, new = NumberedCopies(before, numbers), NumberedCopies(after, numbers)
    check_results(before, after, old.of, new.of, _fail)
    known, found = ({(number, stage) for number, stage, _ in one.calls} for one in (old, new))
    for (number, stage, _), node in new.calls.items():
        if (number, stage) not in known:
            raise _fail(f"{node.name} is another call than any there was", node)
    if missing := known - found:
        gone = next(node for (number, stage, _), node in old.calls.items() if (number, stage) in missing)
        raise _fail(f"{gone.name} is called no more", None)
    for node in after.graph.nodes:
        if node.op == "placeholder" and _parameter(node):
            for reader in node.users:
                _check_copy(after, node, reader)
        elif node.op == "call_function" and facts(node).phase == "backward":
            for source in node.all_input_nodes:
                if kept := _copied(source):
                    raise _fail(f"{node.name} reads {kept.name} of the forward, though it can be copied again", node)


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
    """The copy of a parameter in a forward in whose memory a value may lie."""
    while node.op == "call_function" and facts(node).phase == "forward":
        if _comes_from_host(node):
            return node if _parameter(node.all_input_nodes[0]) else None
        made = origin(node)[0]
        views = any(r.alias_info is not None for r in getattr(schema_or_none(made.target), "returns", ()))
        if not (views and made.all_input_nodes):
            return None
        node = made.all_input_nodes[0]
    return None


def _parameter(node: fx.Node) -> bool:
    found = leaf(node) if node.op == "placeholder" else None
    return found is not None and found.kind == "parameter"
