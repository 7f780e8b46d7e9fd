"""Check of what is computed at the end of a step: after the rest of the program, it gives the same results."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import fx

from ...core.annotations import leaf
from ...ir.distributed_program import DistributedProgram
from ...ir.program import Program, StepEnd, outputs
from ...ir.value_numbers import ValueNumbers
from ..failure import check_failure
from ..tables import spellings

_fail = partial(check_failure, "end of a step")


def check_step_end(original: Program, rewritten: Program) -> None:
    """Check that each result of ``original`` is one of ``rewritten``, or of its end of a step, with what that reads.

    Raises:
        CompileError: QN209 with the result that is another one.
    """
    numbers = ValueNumbers()
    old, new = _numbered(original.graph, {}, numbers), _numbered(rewritten.graph, {}, numbers)
    expected = [old[node] for node in outputs(original.graph)]
    results = [new[node] for node in outputs(rewritten.graph)]
    num_first = len(results) - len(rewritten.last)
    by_name = dict(zip(rewritten.last, results[num_first:], strict=True))
    if rewritten.end is not None:
        by_name |= _numbers_of_end(rewritten.end, by_name, numbers)
    actual = [*results[:num_first], *(by_name[name] for name in original.last)]
    for position, (left, right) in enumerate(zip(expected, actual, strict=True)):
        if left != right:
            raise _fail(f"result {position} is another one", outputs(original.graph)[position])


def _numbers_of_end(end: StepEnd, by_name: Mapping[str, int], numbers: ValueNumbers) -> dict[str, int]:
    """Return the numbers of the values that the end of a step makes, by name."""
    placeholders = end.graph.find_nodes(op="placeholder")
    reads = {node: by_name[name] for node, name in zip(placeholders, end.reads, strict=False)}
    for node in placeholders[len(end.reads) :]:
        node_leaf = leaf(node)
        if node_leaf is None or node_leaf.kind == "input":
            raise _fail(f"the end of a step reads {node.name}, which it cannot have", node)
    numbered = _numbered(end.graph, reads, numbers)
    return dict(zip(end.makes, (numbered[node] for node in outputs(end.graph)), strict=True))


def _numbered(graph: fx.Graph, reads: Mapping[fx.Node, int], numbers: ValueNumbers) -> dict[fx.Node, int]:
    number_of = dict(reads)
    for node in graph.nodes:
        if node.op == "output" or node in number_of:
            continue
        node_leaf = leaf(node)
        if node_leaf is not None:
            number_of[node] = numbers.number("leaf", node_leaf.kind, node_leaf.name)
        else:
            number_of[node] = numbers.call(None, node.target, (node.args, node.kwargs), number_of.__getitem__)
    return number_of


def check_code_of_end(program: DistributedProgram) -> None:
    """Check that the generated function is the graph of the end of a step, and its arguments have the graph's names.

    Raises:
        CompileError: QN209 with the call that is another one.
    """
    end, function = program.source.local.staged.sharded.program.end, program.end
    if (end is None) != (function is None):
        raise _fail("the end of a step is lost")
    if end is None or function is None:
        return
    nodes = {node.name: node for node in end.graph.nodes}
    names = _names_of_reads(end)
    graph_nodes = dict[fx.Node, fx.Node]()  # of nodes of the function
    arguments = iter((*function.static, *function.dynamic))
    for position, node in enumerate(function.module.graph.nodes):
        if node.op == "output":
            if [graph_nodes[n] for n in node.args[0]] != list(outputs(end.graph)) or function.outputs != end.makes:
                raise _fail("the end of a step makes other values")
        elif node.op != "placeholder":
            graph_nodes[node] = _check_call(node, nodes.get(node.name), graph_nodes)
        elif position:
            if names.get(nodes[node.name]) != next(arguments):
                raise _fail(f"the end of a step reads another value as {node.name}", nodes[node.name])
            graph_nodes[node] = nodes[node.name]


def _names_of_reads(end: StepEnd) -> dict[fx.Node, str]:
    """Return the names of what the graph reads: values first, then parameters and buffers."""
    placeholders = end.graph.find_nodes(op="placeholder")
    names = dict(zip(placeholders, end.reads, strict=False))
    for node in placeholders[len(end.reads) :]:
        node_leaf = leaf(node)
        if node_leaf is not None:
            names[node] = node_leaf.name
    return names


def _check_call(node: fx.Node, source: fx.Node | None, graph_nodes: Mapping[fx.Node, fx.Node]) -> fx.Node:
    arguments = repr(fx.map_arg((node.args, dict(node.kwargs)), graph_nodes.__getitem__))
    if source is None or node.target not in spellings(source.target):
        raise _fail(f"{node.name} is another call at the end of a step", source)
    if arguments != repr((source.args, dict(source.kwargs))):
        raise _fail(f"{node.name} has other arguments at the end of a step", source)
    return source
