"""The shardings of a program for other sizes of the same batch, where they are legal here too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from ...core.annotations import leaf
from ...core.sharding import AxisType
from ...ir.program import Axis, Program, ShardedProgram, Strategy
from ..strategies.rule_book import find_cuts
from .axis_view import AxisView


@dataclass(frozen=True)
class KnownSharding:
    """``nodes``: of the program that is known, for each node of the new one."""

    known: ShardedProgram
    nodes: Mapping[fx.Node, fx.Node]

    @classmethod
    def of(cls, program: Program, axes: tuple[Axis, ...], known: ShardedProgram | None) -> KnownSharding | None:
        """None where the programs differ in more than sizes behind the rows, or are for other axes."""
        if known is None or known.axes != axes or known.program.batch_size != program.batch_size:
            return None
        new, old = list(program.graph.nodes), list(known.program.graph.nodes)
        nodes = dict(zip(new, old, strict=False))
        same = len(new) == len(old) and all(
            a.op == b.op
            and (a.op != "call_function" or a.target == b.target)
            and (a.op != "placeholder" or leaf(a) == leaf(b))
            and [nodes[n] for n in a.all_input_nodes] == b.all_input_nodes
            for a, b in nodes.items()
        )
        return cls(known, nodes) if same else None

    def choice(self, view: AxisView) -> dict[fx.Node, Strategy] | None:
        """What each operator does on the axis of ``view``; None if one of them cannot do the same here."""
        cuts, position = find_cuts(view.program.graph, view.factors), len(view.before)
        found: dict[fx.Node, Strategy] = {}
        for node in view.factors:
            before, legal = self.nodes[node], view.legal(node, cuts[node])
            if leaf(node) is None:
                same = [s for s in legal if s == self.known.strategies[before][position]]
            else:
                same = [s for s in legal if s.outputs[0] == self._read(before, position)]
            if not same:
                return None
            found[node] = same[0]
        return found

    def _read(self, node: fx.Node, position: int) -> AxisType:
        """What operators read of a leaf."""
        gathered = self.known.gathered.get(node)
        return gathered.sharding[position] if gathered else self.known.strategies[node][position].outputs[0]
