"""LocalProgram -> LocalProgram: remove combine and dispatch between consecutive expert layers of the same routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from ...core.annotations import is_getitem, shape, tensor_inputs, values
from ...ir.program import LocalProgram
from ...ops.catalog import op_spec
from ...ops.rules.notation import Factors, Rule


@dataclass(frozen=True)
class FuseTokenDispatch:
    """Cancel ``dispatch(f(combine(x)))`` to ``f(x)`` where ``f`` computes each row alone.

    The same goes for ``group_rows(f(ungroup_rows(x)))``.

    Before: %y = combine(%x, plan);  %h = silu(%y);  %z = dispatch(%h, plan)
    After:  %h = silu(%x), whose rows are in the order of ``plan``
    Ensures: the same rows meet the same experts; a value in another order is read by nothing else, and no operator
    among ``f`` holds a number of rows (which is known only when the program runs).
    """

    rules: Mapping[Any, Rule]

    def __call__(self, program: LocalProgram, /) -> LocalProgram:
        while inside := self._inside(program):  # once for each axis on the way, and for the experts of a rank
            program = _rewritten(program, inside)
        return program

    def _inside(self, program: LocalProgram) -> dict[fx.Node, fx.Node]:
        """Return the operators between a ``combine`` and a ``dispatch`` of one plan, each with that ``dispatch``."""
        ends = [node for node in program.graph.nodes if op_spec(node).reorders_rows and len(shape(node)) > 1]
        return {node: end for end in ends for node in self._between(end) or ()}

    def _between(self, end: fx.Node) -> set[fx.Node] | None:
        """Return the operators from ``combine`` up to ``end``, or None if they do not compute each row alone."""
        nodes: set[fx.Node] = set()
        todo, starts = [end.all_input_nodes[0]], 0
        while todo:
            node = todo.pop()
            if _undoes(node, end):
                starts += 1
            elif node not in nodes:
                if not self._by_rows(node):
                    return None
                nodes.add(node)
                todo += node.all_input_nodes
        with_end = nodes | {end}
        return with_end if starts and all(user in with_end for node in nodes for user in node.users) else None

    def _by_rows(self, node: fx.Node) -> bool:
        """Return whether an operator computes each row from the same row of its inputs, for any number of rows."""
        if is_getitem(node):
            return True
        if node.op != "call_function" or op_spec(node).on_rank or op_spec(node).is_typed_move:
            return False
        rule = self.rules.get(node.target)
        if rule is None or not all(len(shape(n)) == 2 for n in tensor_inputs(node)):
            return False
        if op_spec(node).splits == "sizes":
            dim = node.args[2] if len(node.args) > 2 else 0
            used = {user.args[1] for user in node.users}
            # the gradient of an unused part would be zeros of a fixed size
            return dim in (1, -1) and len(used) == len(values(node))
        return rule.shape_arg is None and _pointwise(rule.factors(node))


def _undoes(node: fx.Node, end: fx.Node) -> bool:
    return node.target is op_spec(end).transpose and node.args[1:] == end.args[1:]


def _pointwise(factors: Factors) -> bool:
    return all(dims == factors.outputs[0] for dims in (*factors.inputs, *factors.outputs))


def _rewritten(program: LocalProgram, inside: Mapping[fx.Node, fx.Node]) -> LocalProgram:
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()

    def new_source(user: fx.Node, source: fx.Node) -> fx.Node:
        """Return what ``user`` reads: inside, the input of ``combine`` instead of its result."""
        cancelled = user in inside and _undoes(source, inside[user])
        return new[source.args[0]] if cancelled else new[source]  # type: ignore[index]

    for node in program.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], lambda n: new[n]))
        elif node in inside and inside[node] is node:
            new[node] = new_source(node, node.all_input_nodes[0])
        else:
            new[node] = graph.node_copy(node, lambda n, user=node: new_source(user, n))  # type: ignore[misc]
    for node in reversed(list(graph.nodes)):
        if op_spec(node).restores_rows and not node.users:
            graph.erase_node(node)
    graph.lint()
    nodes = set(graph.nodes)
    copies = {old: copy for old, copy in new.items() if copy in nodes and inside.get(old) is not old}
    return program.moved(graph, copies, {old: copy for old, copy in copies.items() if old not in inside})
