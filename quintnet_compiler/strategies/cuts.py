"""Cuts: boundaries inside factors, which views put there, propagated through a graph."""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Mapping

from torch import fx

from ..core.annotations import origin, tensor_inputs
from ..ops.rules.notation import Dims, Factors

Value = tuple[fx.Node, int]  # an operator and which of its outputs
Cut = tuple[int, int]  # dim and k: a boundary inside a dim at which S(dim, k) may start
FactorPosition = tuple[str, int, int]  # a factor, its dim, and the product of the factors outside it in that dim


def find_cuts(graph: fx.Graph, factors: Mapping[fx.Node, Factors]) -> dict[fx.Node, dict[str, set[int]]]:
    """Return the boundaries inside factors: where a neighbour views a dim as several, all through the graph.

    A fused QKV weight gets the cut 3 from the split after its linear; a flattened [B*S] gets the cut B.
    """
    return _GraphCutSearch(factors).propagate()


class _GraphCutSearch:
    """Propagates cuts between operators and values until there is no new one.

    Attributes:
        of_value: the cuts of each value.
        of_factor: the cuts of each operator's factors.
        positions: the values that an operator reads and writes, with the positions of its factors in them.
        users: the operators that read a value's producer.
    """

    def __init__(self, factors: Mapping[fx.Node, Factors]) -> None:
        self.factors = factors
        self.of_value: dict[Value, set[Cut]] = defaultdict(set)
        self.of_factor: dict[fx.Node, dict[str, set[int]]] = {node: defaultdict(set) for node in factors}
        self.positions: dict[fx.Node, list[tuple[Value, list[FactorPosition]]]] = {}
        self.users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, node_factors in factors.items():
            sources = [origin(n) for n in tensor_inputs(node)]
            results = [(node, k) for k in range(len(node_factors.outputs))]
            dims = [*node_factors.inputs, *node_factors.outputs]
            self.positions[node] = [
                (value, _positions(node_factors, value_dims))
                for value, value_dims in zip([*sources, *results], dims, strict=True)
            ]
            for source, _ in sources:
                self.users[source].append(node)

    def propagate(self) -> dict[fx.Node, dict[str, set[int]]]:
        pending = OrderedDict.fromkeys(self.factors)
        while pending:
            node, _ = pending.popitem(last=False)
            self._read_cuts(node)
            touched = self._write_cuts(node)  # the node too: new cuts may reach its other tensors
            pending.update(dict.fromkeys(n for n in touched if n in self.factors))
        return self.of_factor

    def _read_cuts(self, node: fx.Node) -> None:
        """Cut a node's factors where its values have cuts."""
        sizes = self.factors[node].sizes
        for value, positions in self.positions[node]:
            for (dim, k), (name, factor_dim, start) in itertools.product(self.of_value[value], positions):
                inside = dim == factor_dim and start < k < start * sizes[name] and k % start == 0
                if inside and sizes[name] % (k // start) == 0:
                    self.of_factor[node][name].add(k // start)

    def _write_cuts(self, node: fx.Node) -> set[fx.Node]:
        """Cut a node's values where its factors have cuts, and return the nodes that read or write such values."""
        node_factors, touched = self.factors[node], set[fx.Node]()
        unsplit = node_factors.whole | node_factors.contiguous
        for value, positions in self.positions[node]:
            for name, dim, start in positions:
                cuts = {1} if name in unsplit else {1, *self.of_factor[node][name]}
                new = {(dim, start * cut) for cut in cuts if start * cut > 1} - self.of_value[value]
                if new:
                    self.of_value[value] |= new
                    touched |= {value[0], *self.users[value[0]]}
        return touched


def _positions(factors: Factors, dims: Dims) -> list[FactorPosition]:
    positions: list[FactorPosition] = []
    for dim, names in enumerate(dims):
        start = 1
        for name in names:
            positions.append((name, dim, start))
            start *= factors.sizes[name]
    return positions
