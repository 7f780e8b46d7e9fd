"""Products that need a collective, or that a collective needs, and that can become one with it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from ...core.annotations import facts, shape
from ...ir.program import DifferentiatedProgram
from ...ir.repeated_blocks import block_of
from ...ops.collectives import STARTS, all_gather, reduce_scatter, wait
from ...ops.rank_local import RANKED
from .items import stored_in

aten = torch.ops.aten
_BESIDE = frozenset({*STARTS.values(), wait})


@dataclass(frozen=True)
class Matmul:
    """``node`` = ``x`` times a weight, which is [out, in] where it is ``transposed``."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool


def matmul_of(node: fx.Node) -> Matmul | None:
    """What a node multiplies by a matrix, if that is what it does."""
    args: Any = node.args
    x, weight, bias = None, None, None
    if node.target in (aten.linear.default, aten.mm.default):
        x, weight, bias = (*args, None)[:3]
    elif node.target is aten.addmm.default:
        bias, x, weight = args
    if not (isinstance(x, fx.Node) and isinstance(weight, fx.Node)) or node.kwargs or x in (weight, bias):
        return None
    if len(shape(weight)) != 2 or (isinstance(bias, fx.Node) and len(shape(bias)) != 1):
        return None
    return Matmul(node, x, weight, bias, node.target is aten.linear.default)


@dataclass(frozen=True)
class Fused:
    """A ``collective``, the ``products`` that become one with it at the ``place`` of one of them, and the ``views`` and
    sums between them. ``kept``: of a gather and its views, those that something else reads."""

    place: fx.Node
    collective: fx.Node
    products: tuple[Matmul, ...]
    views: tuple[fx.Node, ...]
    kept: frozenset[fx.Node] = frozenset()

    @property
    def members(self) -> Iterator[fx.Node]:
        yield from (self.collective, *(product.node for product in self.products), *self.views)


class ChainFinder:
    def __init__(self, program: DifferentiatedProgram) -> None:
        self.program = program
        self.place = {node: i for i, node in enumerate(program.graph.nodes)}
        self.busy = list(accumulate((node.target in _BESIDE for node in program.graph.nodes), initial=0))
        self.settled = set(program.gradients.values())
        self.fixed = {*program.outputs, *self.settled}
        self.taken: set[fx.Node] = set()

    def found(self) -> list[Fused]:
        made = []
        for node in self.program.graph.nodes:
            find = {all_gather: self._gather, reduce_scatter: self._scatter}.get(node.target)
            if find is None or node not in self.program.stage or node in self.program.once or node in self.settled:
                continue
            fused = find(node)
            if fused is not None and not self.taken.intersection(fused.members):
                self.taken.update(fused.members)
                made.append(fused)
        return made

    def _gather(self, node: fx.Node) -> Fused | None:
        source = node.all_input_nodes[0]
        if node.args[3] == len(shape(node)) - 1 or stored_in(source) is not None:
            return None
        rows = [node]
        for row in rows:
            rows += [user for user in row.users if self._same_rows(user, row) and self._together(user, node)]
        read = [found for row in rows for user in row.users if (found := matmul_of(user)) and found.x is row]
        read.sort(key=lambda product: self.place[product.node])
        read = [product for product in read if product.node not in self.settled and self._together(product.node, node)]
        if not read:
            return None
        first = read[0].node
        products = [product for product in read if self._early(product, first, rows)]
        mine, kept = {product.node for product in products}, set[fx.Node]()
        for row in reversed(rows):
            others = [user for user in row.users if user not in mine and (user not in rows or user in kept)]
            if row in self.fixed or others:
                kept.add(row)
            if any(self.place[user] < self.place[first] for user in others if user not in rows):
                return None
        return Fused(first, node, tuple(products), tuple(rows[1:]), frozenset(kept))

    def _early(self, product: Matmul, first: fx.Node, rows: Sequence[fx.Node]) -> bool:
        """Whether a product can be computed with the first one that reads the same rows."""
        node, place = product.node, self.place[first]
        if block_of(node) != block_of(first) or not self._idle(first, node):
            return False
        todo = [n for n in (product.weight, product.bias) if n is not None]
        for n in todo:
            if self.place[n] > place:
                if n.target in RANKED or n.target is operator.getitem:
                    return False
                todo += n.all_input_nodes
        return not {first, *rows}.intersection(todo)

    def _scatter(self, node: fx.Node) -> Fused | None:
        summed = node.all_input_nodes[0]
        if node.args[3] == len(shape(summed)) - 1:
            return None
        between: list[fx.Node] = []
        products = self._terms(summed, node, between)
        return Fused(node, node, tuple(products), tuple(between)) if products else None

    def _terms(self, node: fx.Node, scatter: fx.Node, between: list[fx.Node]) -> list[Matmul]:
        """The products whose sum in this order ``node`` is, read by ``scatter`` alone; none if it is anything else."""
        if len(node.users) > 1 or node in self.fixed or not self._together(node, scatter):
            return []
        product = matmul_of(node)
        if product is not None:
            return [product] if self._idle(node, scatter) else []
        between.append(node)
        if self._same_rows(node, node.all_input_nodes[0] if node.all_input_nodes else node):
            return self._terms(node.all_input_nodes[0], scatter, between)
        if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
            return []
        if any(shape(n) != shape(node) for n in node.all_input_nodes):
            return []
        left, right = (self._terms(n, scatter, between) for n in node.all_input_nodes)
        if not left or not right or min(len(left), len(right)) > 1:  # another order of sums
            return []
        return left + right if len(right) == 1 else right + left

    def _same_rows(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether ``node`` has the rows of ``source``, under other indices."""
        return node.target is aten.reshape.default and shape(node)[-1:] == shape(source)[-1:]

    def _together(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether two nodes run in the same function."""
        stage, once = self.program.stage, self.program.once
        places = [(stage.get(n), facts(n).phase, n in once) for n in (node, other) if n.op == "call_function"]
        return len(places) == 2 and places[0] == places[1]

    def _idle(self, first: fx.Node, last: fx.Node) -> bool:
        """Whether no communication that was started is hidden by what moves from one place to the other."""
        return self.busy[self.place[first]] == self.busy[self.place[last]]
