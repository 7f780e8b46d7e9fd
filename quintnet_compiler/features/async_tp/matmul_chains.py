"""Matmuls that read a gathered value, or that a reduce-scatter sums, and that can be fused with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from ...core.annotations import facts, is_getitem, shape
from ...ir.program import DifferentiatedProgram
from ...ir.repeated_blocks import block_of
from ...ops.catalog import adds_two, op_spec
from ...ops.collectives import all_gather, reduce_scatter
from ...passes.overlap.items import stored_in

aten = torch.ops.aten


@dataclass(frozen=True)
class Matmul:
    """A matmul: ``node`` = ``x`` times a weight, which is [out, in] if it is ``transposed``, plus a bias."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool


def matmul_of(node: fx.Node) -> Matmul | None:
    """Return a node as a product with a matrix, or None if it is none."""
    product = op_spec(node).product
    if product is None or product.weight_dims != 2:
        return None
    x, weight, bias = product.operands(node.args)
    if not (isinstance(x, fx.Node) and isinstance(weight, fx.Node)) or node.kwargs or x in (weight, bias):
        return None
    if len(shape(weight)) != 2 or (isinstance(bias, fx.Node) and len(shape(bias)) != 1):
        return None
    return Matmul(node, x, weight, bias, product.transposed)


@dataclass(frozen=True)
class Fused:
    """A collective and the products to fuse with it.

    Attributes:
        place: the node in whose place the fused node comes.
        collective: the gather or scatter.
        products: the products.
        views: views and sums between them.
        kept: the gather and those of its views that something else reads.
    """

    place: fx.Node
    collective: fx.Node
    products: tuple[Matmul, ...]
    views: tuple[fx.Node, ...]
    kept: frozenset[fx.Node] = frozenset()

    @property
    def members(self) -> Iterator[fx.Node]:
        """Yield the nodes that one fused node replaces."""
        yield from (self.collective, *(product.node for product in self.products), *self.views)


class ChainFinder:
    """Finds gathers with products that read them, and scatters with products that they sum.

    Attributes:
        place: the position of each node.
        busy: for each position, the number of starts and waits of communication before it.
        gradients: the gradients of parameters.
        results: nodes that something outside of the graph reads.
        used: nodes of the chains so far.
    """

    def __init__(self, program: DifferentiatedProgram) -> None:
        self.program = program
        self.place = {node: i for i, node in enumerate(program.graph.nodes)}
        self.busy = list(
            accumulate((op_spec(node).under_way or op_spec(node).waits for node in program.graph.nodes), initial=0)
        )
        self.gradients = set(program.gradients.values())
        self.results = {*program.outputs, *self.gradients}
        self.used: set[fx.Node] = set()

    def chains(self) -> list[Fused]:
        """Return the chains of the program; they share no nodes."""
        chains = []
        finders = {all_gather: self._gather, reduce_scatter: self._scatter}
        for node in self.program.graph.nodes:
            find = finders.get(node.target)
            in_microbatch = node in self.program.stage and node not in self.program.once
            if find is None or not in_microbatch or node in self.gradients:
                continue
            chain = find(node)
            if chain is not None and not self.used.intersection(chain.members):
                self.used.update(chain.members)
                chains.append(chain)
        return chains

    def _gather(self, node: fx.Node) -> Fused | None:
        """Return a gather of activations with the products that read it."""
        source = node.all_input_nodes[0]
        if node.args[3] == len(shape(node)) - 1 or stored_in(source) is not None:
            return None
        rows = [node]  # the gathered value, and its views
        for row in rows:
            rows += [user for user in row.users if self._same_rows(user, row) and self._same_function(user, node)]
        readers = self._products_of(rows, node)
        if not readers:
            return None
        first = readers[0].node
        products = [product for product in readers if self._can_move_up(product, first, rows)]
        kept = self._kept(rows, {product.node for product in products}, first)
        return None if kept is None else Fused(first, node, tuple(products), tuple(rows[1:]), frozenset(kept))

    def _products_of(self, rows: Sequence[fx.Node], gather: fx.Node) -> list[Matmul]:
        """Return the products whose rows are gathered, in graph order."""
        users = [(row, matmul_of(user)) for row in rows for user in row.users]
        products = [product for row, product in users if product is not None and product.x is row]
        products.sort(key=lambda product: self.place[product.node])
        return [p for p in products if p.node not in self.gradients and self._same_function(p.node, gather)]

    def _kept(self, rows: Sequence[fx.Node], products: Set[fx.Node], first: fx.Node) -> set[fx.Node] | None:
        """Return the gathered value and views that other nodes read; None if one is read before ``first``."""
        kept = set[fx.Node]()
        for row in reversed(rows):
            others = [user for user in row.users if user not in products and (user not in rows or user in kept)]
            if row in self.results or others:
                kept.add(row)
            if any(self.place[user] < self.place[first] for user in others if user not in rows):
                return None
        return kept

    def _can_move_up(self, product: Matmul, first: fx.Node, rows: Sequence[fx.Node]) -> bool:
        """Return whether a product can be computed with the first one that reads the same rows."""
        node, place = product.node, self.place[first]
        if block_of(node) != block_of(first) or not self._hides_nothing(first, node):
            return False
        moved_up = [n for n in (product.weight, product.bias) if n is not None]
        for source in moved_up:
            if self.place[source] > place:
                if op_spec(source).on_rank or is_getitem(source):
                    return False
                moved_up += source.all_input_nodes
        return not {first, *rows}.intersection(moved_up)

    def _scatter(self, node: fx.Node) -> Fused | None:
        """Return a scatter with the products whose sum it scatters."""
        total = node.all_input_nodes[0]
        if node.args[3] == len(shape(total)) - 1:
            return None
        between: list[fx.Node] = []
        products = self._terms(total, node, between)
        return Fused(node, node, tuple(products), tuple(between)) if products else None

    def _terms(self, node: fx.Node, scatter: fx.Node, between: list[fx.Node]) -> list[Matmul]:
        """Return the products whose sum in this order ``node`` is, or none if it is anything else.

        Only ``scatter`` may read the sum. Additions and views are appended to ``between``.
        """
        if len(node.users) > 1 or node in self.results or not self._same_function(node, scatter):
            return []
        product = matmul_of(node)
        if product is not None:
            return [product] if self._hides_nothing(node, scatter) else []
        between.append(node)
        if self._same_rows(node, node.all_input_nodes[0] if node.all_input_nodes else node):
            return self._terms(node.all_input_nodes[0], scatter, between)
        if not adds_two(node):
            return []
        left, right = (self._terms(n, scatter, between) for n in node.all_input_nodes)
        if not left or not right or min(len(left), len(right)) > 1:  # another order of sums
            return []
        return left + right if len(right) == 1 else right + left

    def _same_rows(self, node: fx.Node, source: fx.Node) -> bool:
        """Return whether ``node`` has the rows of ``source``, under other indices."""
        return op_spec(node).reshapes and shape(node)[-1:] == shape(source)[-1:]

    def _same_function(self, node: fx.Node, other: fx.Node) -> bool:
        """Return whether two nodes run in the same function."""
        stage, once = self.program.stage, self.program.once
        functions = [(stage.get(n), facts(n).phase, n in once) for n in (node, other) if n.op == "call_function"]
        return len(functions) == 2 and functions[0] == functions[1]

    def _hides_nothing(self, first: fx.Node, last: fx.Node) -> bool:
        """Return whether no communication starts or ends between two nodes."""
        return self.busy[self.place[first]] == self.busy[self.place[last]]
