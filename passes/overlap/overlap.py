"""DifferentiatedProgram -> DifferentiatedProgram: communication overlaps with computation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from ...core.annotations import ancestors, annotate, facts
from ...ir.program import DifferentiatedProgram
from ...ops.catalog import op_spec
from ...ops.collectives import STARTS, wait
from .items import Item, Seconds, Start
from .order import Order


@dataclass(frozen=True)
class Overlap:
    """Split collectives into a start and a wait where there is something to compute in between.

    Before: %a = mm(%g, %w);  %b = all_reduce(%a, tp);  %c = mm(%h, %x);  %d = mul(%b, %s)
    After:  %a = mm(%g, %w);  %s = start_all_reduce(%a, tp);  %c = mm(%h, %x);  %b = wait(%s);  %d = mul(%b, %s)
    Ensures: the same calls on the same values, in another order within each function of a stage (see
    :mod:`.order` for which, and for how much memory at most); all ranks of a stage have the same order.

    ``seconds``: of a collective, or of a product or attention. ``split``: the stages whose backward is cut in two.
    """

    seconds: Seconds
    split: frozenset[int] = frozenset()

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        orders = [Order(program, nodes, self.seconds).items() for nodes in _functions(program, self.split)]
        return _reordered(program, orders)


def _functions(program: DifferentiatedProgram, split: frozenset[int]) -> Iterator[list[fx.Node]]:
    """Yield the nodes of every stage's functions, in an order in which the functions can follow each other."""
    forward: dict[int, list[fx.Node]] = defaultdict(list)
    backward: dict[int, list[fx.Node]] = defaultdict(list)
    for node in program.graph.nodes:
        if _moves(program, node):
            (backward if facts(node).phase == "backward" else forward)[program.stage[node]].append(node)
    for _, nodes in sorted(forward.items()):
        yield nodes
    for stage, nodes in sorted(backward.items(), reverse=True):
        sent = {n for n in nodes if any(program.stage.get(user, stage) != stage for user in n.users)}
        first = ancestors(nodes, sent) if stage in split else set(nodes)
        yield [n for n in nodes if n in first]
        yield [n for n in nodes if n not in first]


def _moves(program: DifferentiatedProgram, node: fx.Node) -> bool:
    """Return whether a node may move; nodes that run once, or wherever they are needed, stay ahead of all others."""
    return (
        node.op == "call_function"
        and node in program.stage
        and node not in program.once
        and not op_spec(node).cuts_microbatch
    )


def _reordered(program: DifferentiatedProgram, orders: Sequence[Sequence[Item]]) -> DifferentiatedProgram:
    nodes = [node for node in program.graph.nodes if node.op != "output"]
    ordered: list[Item] = [node for node in nodes if not _moves(program, node)]
    ordered += [item for order in orders for item in order]
    if ordered == nodes:
        return program  # nothing starts early
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    stage: dict[fx.Node, int] = {}
    starts: dict[fx.Node, fx.Node] = {}

    def emit(item: Item) -> None:
        if isinstance(item, Start):
            node = item.node
            args = fx.map_arg(node.args, lambda n: new[n])
            target = STARTS[node.target]  # type: ignore[index]
            copy = starts[node] = graph.create_node("call_function", target, args, name=f"{node.name}_start")
            annotate(copy, facts(node))
        elif item in starts:
            node = item
            copy = new[node] = graph.create_node("call_function", wait, (starts[node],), name=node.name)
            annotate(copy, facts(node))
        else:
            node = item
            copy = new[node] = graph.node_copy(node, lambda n: new[n])
        if node in program.stage:
            stage[copy] = program.stage[node]

    for item in ordered:
        emit(item)
    graph.output(fx.map_arg(program.graph.output_node().args[0], lambda n: new[n]))
    graph.lint()
    return program.moved(graph, new, stage)
