"""Check of what is computed when a step is over: put behind the program again, it gives what the program gave."""

from __future__ import annotations

from functools import partial

from torch import fx

from ....core.annotations import leaf
from ....ir.distributed_program import DistributedProgram
from ....ir.program import Program, outputs
from ....ir.value_numbers import ValueNumbers
from ..failure import check_failure
from ..tables import spellings

_fail = partial(check_failure, "end of a step")


def check_step_end(before: Program, after: Program) -> None:
    """Each result of ``before`` is one of ``after``, or of its end of a step, which reads what it says.

    Raises:
        CompileError: QN209 with the result that is another one.
    """
    numbers = ValueNumbers()
    old, new = _numbered(before.graph, {}, numbers), _numbered(after.graph, {}, numbers)
    wanted = [old[n] for n in outputs(before.graph)]
    found = [new[n] for n in outputs(after.graph)]
    first, ended = len(found) - len(after.last), dict[str, int]()
    by_name = dict(zip(after.last, found[first:], strict=True))
    if (end := after.end) is not None:
        given = end.graph.find_nodes(op="placeholder")
        reads = {n: by_name[name] for n, name in zip(given, end.reads, strict=False)}
        inside = _numbered(end.graph, reads, numbers)
        ended = dict(zip(end.makes, (inside[n] for n in outputs(end.graph)), strict=True))
        unread = [n for n in given[len(end.reads) :] if (known := leaf(n)) is None or known.kind == "input"]
        if unread:
            raise _fail(f"the end of a step reads {unread[0].name}, which is not there then", unread[0])
    whole = {**by_name, **ended}
    made = [*found[:first], *(whole[name] for name in before.last)]
    for position, (left, right) in enumerate(zip(wanted, made, strict=True)):
        if left != right:
            raise _fail(f"result {position} is another one", outputs(before.graph)[position])


def _numbered(graph: fx.Graph, known: dict[fx.Node, int], numbers: ValueNumbers) -> dict[fx.Node, int]:
    found = dict(known)
    for node in graph.nodes:
        if node.op == "output" or node in found:
            continue
        if (kept := leaf(node)) is not None:
            found[node] = numbers.number("leaf", kept.kind, kept.name)
        else:
            found[node] = numbers.call(None, node.target, (node.args, node.kwargs), found.__getitem__)
    return found


def check_code_of_end(program: DistributedProgram) -> None:
    """The generated function is the graph that :func:`check_step_end` has seen, and its arguments have its names.

    Raises:
        CompileError: QN209 with the call that is another one.
    """
    whole, made = program.source.local.staged.sharded.program.end, program.end
    if (whole is None) != (made is None):
        raise _fail("the end of a step is lost", None)
    if whole is None or made is None:
        return
    nodes = {n.name: n for n in whole.graph.nodes}
    given = whole.graph.find_nodes(op="placeholder")
    many = len(whole.reads)
    names = dict(zip(given, whole.reads, strict=False))
    names |= {n: known.name for n in given[many:] if (known := leaf(n)) is not None}
    env = dict[fx.Node, fx.Node]()
    arguments = iter((*made.static, *made.dynamic))
    for position, node in enumerate(made.module.graph.nodes):
        if node.op == "output":
            if [env[n] for n in node.args[0]] != list(outputs(whole.graph)) or made.outputs != whole.makes:
                raise _fail("the end of a step makes other values", None)
        elif node.op == "placeholder":
            if position and names.get(nodes[node.name]) != next(arguments):
                raise _fail(f"the end of a step reads another value as {node.name}", nodes[node.name])
            if position:
                env[node] = nodes[node.name]
        else:
            source = nodes.get(node.name)
            args = fx.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
            if (
                source is None
                or node.target not in spellings(source.target)
                or repr(args) != repr((source.args, dict(source.kwargs)))
            ):
                raise _fail(f"{node.name} is another call at the end of a step", source)
            env[node] = source
