"""Program -> Program: compute new values of buffers that need sums over all rows at the end of the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from torch import fx

from ...core.annotations import is_getitem, leaf, origin
from ...ir.program import Program, StepEnd, outputs
from ...ops.catalog import op_spec
from ...strategies.rule_book import RuleBook
from .coupled_rows import couplings


@dataclass(frozen=True)
class SplitStepEnd:
    """Move operators that no microbatch can compute out of the program, where only buffers depend on them.

    Before: %load = sum(%chosen, [0]);  %sign = sign(%load - mean(%load));  return %loss, %bias - 0.1 * %sign
    After:  return %loss, %gap of %load - mean(%load);  at the end of a step: %bias - 0.1 * sign(%gap)
    Ensures: each buffer gets the value that it had before, from whole values of the program's last results. The program
    does not change where the module's own results need the same values, or where these depend on parameters. Rows and
    random numbers from which new values are computed become results of the program, too.

    (The balance of experts without an auxiliary loss, Wang et al. 2024, changes its biases like this.)
    """

    rules: RuleBook

    def __call__(self, program: Program, /) -> Program:
        buffers = {info.name for info in program.leaves.values() if info.kind == "buffer"}
        changed_buffers = buffers & set(program.captured.changed)
        if not changed_buffers:
            return program
        results = outputs(program.graph)
        first = len(results) - len(program.last)
        coupled = couplings(program.graph, self.rules.factors(program.graph)).keys() - _ancestors(results[:first])
        constant = _constant_nodes(program.graph)
        ends: dict[str, fx.Node] = {}
        moved = set[fx.Node]()
        for name, result in zip(program.last, results[first:], strict=True):
            nodes = _movable_nodes(result, coupled, constant) if name in changed_buffers else set()
            if nodes:
                ends[name] = result
                moved |= nodes
        return _split(program, ends, moved) if ends else program


def _constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return operators that compute the same in every microbatch of a step: of numbers, buffers and constants."""
    constant = set[fx.Node]()
    for node in graph.nodes:
        if node.op == "call_function" and not op_spec(node).random:
            sources = node.all_input_nodes
            constant |= {node} if all(source in constant or _is_state(source) for source in sources) else set()
    return constant


def _is_state(node: fx.Node) -> bool:
    info = leaf(node)
    return info is not None and info.kind in ("buffer", "constant")


def _ancestors(results: Iterable[fx.Node]) -> set[fx.Node]:
    """Return results and all nodes from which they are computed."""
    nodes, todo = set[fx.Node](), list(results)
    while todo:
        node = todo.pop()
        if node not in nodes:
            nodes.add(node)
            todo += node.all_input_nodes
    return nodes


def _movable_nodes(result: fx.Node, coupled: Set[fx.Node], constant: Set[fx.Node]) -> set[fx.Node]:
    """Return the ``coupled`` and ``constant`` operators from which ``result`` is computed.

    Empty where none is coupled, or where they cannot run after the step.
    """
    nodes, todo = set[fx.Node](), [result]
    while todo:
        node = todo.pop()
        if is_getitem(node):
            todo.append(origin(node)[0])
        elif (node in coupled or node in constant) and node not in nodes:
            nodes.add(node)
            todo += node.all_input_nodes
    sources = {source for node in nodes for source in node.all_input_nodes}
    if any(leaf(source) is not None and not _is_state(source) for source in sources):
        return set()
    if any(op_spec(node).random for node in nodes) or nodes.isdisjoint(coupled):
        return set()
    return nodes


def _split(program: Program, ends: Mapping[str, fx.Node], moved: set[fx.Node]) -> Program:
    """Move nodes to the end of the step, with the new values ``ends``."""
    nodes = list(program.graph.nodes)
    moved |= {node for node in nodes if is_getitem(node) and origin(node)[0] in moved}
    read = (source for node in nodes if node in moved for source in node.all_input_nodes)
    sources = dict.fromkeys(source for source in (*read, *ends.values()) if source not in moved)
    results = [node for node in sources if leaf(node) is None]
    end_graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in (*results, *(node for node in sources if leaf(node) is not None)):
        new[node] = end_graph.placeholder(node.name)
        new[node].meta = dict(node.meta)
    for node in nodes:
        if node in moved:
            new[node] = end_graph.node_copy(node, new.__getitem__)
    end_graph.output(tuple(new[node] for node in ends.values()))
    end_graph.lint()
    reads = tuple(f"end of step {position}" for position in range(len(results)))
    old_results = outputs(program.graph)
    first = len(old_results) - len(program.last)
    remaining = [node for name, node in zip(program.last, old_results[first:], strict=True) if name not in ends]
    return replace(
        program,
        graph=_with_results(program.graph, (*old_results[:first], *remaining, *results)),
        end=StepEnd(end_graph, reads, tuple(ends)),
    )


def _with_results(graph: fx.Graph, results: tuple[fx.Node, ...]) -> fx.Graph:
    new, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.op != "output":
            copied[node] = new.node_copy(node, copied.__getitem__)
    new.output(tuple(copied[node] for node in results))
    for node in reversed(list(new.nodes)):
        if node.op not in ("output", "placeholder") and not node.users and not node.is_impure():
            new.erase_node(node)
    new.lint()
    return new
