"""Program -> Program: new values of buffers that need sums over all rows are computed when the step is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from torch import fx

from ...core.annotations import is_getitem, leaf, origin
from ...ir.program import Program, StepEnd, outputs
from ...ops.rank_local import RANDOM
from ..strategies.rule_book import RuleBook
from .coupled_rows import couplings


@dataclass(frozen=True)
class SplitStepEnd:
    """Take what no microbatch can compute out of the program, where buffers alone depend on it.

    Before: %load = sum(%chosen, [0]);  %sign = sign(%load - mean(%load));  return %loss, %bias - 0.1 * %sign
    After:  return %loss, %gap of %load - mean(%load);  at the end of a step: %bias - 0.1 * sign(%gap)
    Ensures: each buffer gets the value that it had before, from whole values of the program's last results. The program
    is as it was where the module's own results need the same values, and where these are made of parameters. Rows and
    random numbers that the new values are made of become results of the program, too.

    (The balance of experts without an auxiliary loss, Wang et al. 2024, changes its biases like this.)
    """

    rules: RuleBook

    def __call__(self, program: Program, /) -> Program:
        buffers = {f.name for f in program.leaves.values() if f.kind == "buffer"} & set(program.captured.changed)
        if not buffers:
            return program
        results = outputs(program.graph)
        first = len(results) - len(program.last)
        whole = couplings(program.graph, self.rules.factors(program.graph)).keys() - _needed(results[:first])
        ends = dict(zip(program.last, results[first:], strict=True))
        fixed = _fixed(program.graph)
        moved = {
            name: inside
            for name, result in ends.items()
            if name in buffers and (inside := _inside(result, whole, fixed))
        }
        if not moved:
            return program
        return _split(program, {name: ends[name] for name in moved}, set().union(*moved.values()))


def _fixed(graph: fx.Graph) -> set[fx.Node]:
    """What is the same in every step: made of numbers alone, or of buffers and constants."""
    found = set[fx.Node]()
    for node in graph.nodes:
        if node.op == "call_function" and node.target not in RANDOM:
            given = [(leaf(n), n) for n in node.all_input_nodes]
            if all(n in found if kept is None else kept.kind in ("buffer", "constant") for kept, n in given):
                found.add(node)
    return found


def _needed(results: Iterable[fx.Node]) -> set[fx.Node]:
    """What results are computed of."""
    found, todo = set[fx.Node](), list(results)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _inside(result: fx.Node, whole: Set[fx.Node], fixed: Set[fx.Node]) -> set[fx.Node]:
    """The operators that ``result`` needs and that read the ``whole`` batch, with those of ``fixed`` values; empty
    where there are none of the first, or where they cannot run behind the step."""
    found, todo = set[fx.Node](), [result]
    while todo:
        node = todo.pop()
        if is_getitem(node):
            todo.append(origin(node)[0])
        elif (node in whole or node in fixed) and node not in found:
            found.add(node)
            todo += node.all_input_nodes
    leaves = {known.kind for node in found for n in node.all_input_nodes if (known := leaf(n)) is not None}
    there = leaves <= {"buffer", "constant"} and RANDOM.isdisjoint(node.target for node in found)
    return found if there and not found.isdisjoint(whole) else set()


def _split(program: Program, ends: Mapping[str, fx.Node], inside: set[fx.Node]) -> Program:
    """``ends``: the new values that leave the program, in order."""
    nodes = list(program.graph.nodes)
    inside |= {node for node in nodes if is_getitem(node) and origin(node)[0] in inside}
    read = (source for node in nodes if node in inside for source in node.all_input_nodes)
    given = dict.fromkeys(source for source in (*read, *ends.values()) if source not in inside)
    results = [node for node in given if leaf(node) is None]
    after = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in (*results, *(node for node in given if leaf(node) is not None)):
        new[node] = after.placeholder(node.name)
        new[node].meta = dict(node.meta)
    for node in nodes:
        if node in inside:
            new[node] = after.node_copy(node, new.__getitem__)
    after.output(tuple(new[node] for node in ends.values()))
    after.lint()
    reads = tuple(f"end of step {position}" for position in range(len(results)))
    whole = outputs(program.graph)
    first = len(whole) - len(program.last)
    kept = [node for name, node in zip(program.last, whole[first:], strict=True) if name not in ends]
    return replace(
        program,
        graph=_with_results(program.graph, (*whole[:first], *kept, *results)),
        end=StepEnd(after, reads, tuple(ends)),
    )


def _with_results(graph: fx.Graph, results: tuple[fx.Node, ...]) -> fx.Graph:
    new, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.op != "output":
            env[node] = new.node_copy(node, env.__getitem__)
    new.output(tuple(env[node] for node in results))
    for node in reversed(list(new.nodes)):
        if node.op not in ("output", "placeholder") and not node.users and not node.is_impure():
            new.erase_node(node)
    new.lint()
    return new
