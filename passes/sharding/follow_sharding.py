"""The sharding of a program for other sizes of the same batch, followed where it is legal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from ...core.annotations import leaf
from ...core.sharding import AxisType
from ...ir.program import Axis, Program, ShardedProgram, Strategy
from ...strategies.cuts import find_cuts
from .axis_view import AxisView


@dataclass(frozen=True)
class KnownSharding:
    """A sharded program, and its node for each node of a new program."""

    known: ShardedProgram
    nodes: Mapping[fx.Node, fx.Node]

    @classmethod
    def match(cls, program: Program, axes: tuple[Axis, ...], known: ShardedProgram | None) -> KnownSharding | None:
        """Return None where the programs differ in more than sizes of other dims than rows, or in axes."""
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
        """Return the known strategy of each operator on one axis; None if it is not legal for one of them."""
        cuts, position = find_cuts(view.program.graph, view.factors), len(view.outer)
        choices: dict[fx.Node, Strategy] = {}
        for node in view.factors:
            known_node, legal = self.nodes[node], view.legal(node, cuts[node])
            if leaf(node) is None:
                same = [s for s in legal if s == self.known.strategies[known_node][position]]
            else:
                same = [s for s in legal if s.outputs[0] == self._type_read(known_node, position)]
            if not same:
                return None
            choices[node] = same[0]
        return choices

    def _type_read(self, node: fx.Node, position: int) -> AxisType:
        """Return the type in which operators read a leaf."""
        gathered = self.known.gathered.get(node)
        return gathered.sharding[position] if gathered else self.known.strategies[node][position].outputs[0]
