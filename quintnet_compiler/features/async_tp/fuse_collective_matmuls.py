"""DifferentiatedProgram -> DifferentiatedProgram: collectives are fused with matmuls, slice by slice."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ...core.annotations import annotate, facts, shape, value
from ...ir.program import DifferentiatedProgram
from ...ops.catalog import op_spec
from .matmul_chains import ChainFinder, Fused, Matmul
from .ops import all_gather_matmul, matmul_reduce_scatter

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseCollectiveMatmuls:
    """Fuse gathers with the matmuls that read them, and matmuls with the reduce-scatter of their sum.

    While one slice travels, another is multiplied (Wang et al. 2023).

    Before: %a = all_gather(%x, tp, 1);  %q = linear(%a, %w);  ...;  %y = linear(%h, %v);  %s = reduce_scatter(%y, tp)
    After:  %p = all_gather_matmul(%x, tp, 1, [%w]);  %q = %p[0];  ...;  %s = matmul_reduce_scatter([%h], tp, [%v])
    Ensures: the same products, over other rows at a time, and sums over ranks in another order. No more values are
    saved: the gathered value is a result only if something else reads it.

    The dim that ranks split is never the one that is multiplied. Computation that hides communication which has been
    started stays in its place. Parameters and their gradients, which belong to no operator, travel as before.
    """

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        """Return the program with fused nodes, or the same one if nothing can be fused."""
        fused = ChainFinder(program).chains()
        return _Fusing(program, fused).fused_program() if fused else program


class _Fusing:
    """A copy of a program with fused collectives and matmuls. ``new``: the copy of each node."""

    def __init__(self, program: DifferentiatedProgram, fused: Sequence[Fused]) -> None:
        self.program = program
        self.graph, self.new = fx.Graph(), dict[fx.Node, fx.Node]()
        self.stage: dict[fx.Node, int] = {}
        self.fused_at = {chain.place: chain for chain in fused}
        self.members = {node for chain in fused for node in chain.members}

    def fused_program(self) -> DifferentiatedProgram:
        """Return the copy, complete."""
        for node in self.program.graph.nodes:
            if node in self.fused_at:
                chain = self.fused_at[node]
                emit = self._gather if op_spec(chain.collective).gathers else self._scatter
                emit(chain)
            elif node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], lambda n: self.new[n]))
            elif node not in self.members:
                self._emit(node)
        self.graph.lint()
        return self._without_removed().moved(self.graph, self.new, self.stage)

    def _without_removed(self) -> DifferentiatedProgram:
        """Return the program without what it says of nodes that have no copy."""
        program, new = self.program, self.new
        return replace(
            program,
            values={key: node for key, node in program.values.items() if node in new},
            cotangents={key: node for key, node in program.cotangents.items() if node in new},
            copies={copy: node for copy, node in program.copies.items() if copy in new and node in new},
        )

    def _emit(self, node: fx.Node) -> None:
        """Copy a node after the inputs that have no copy yet: weights, if their product has moved up."""
        if node in self.new:
            return
        for source in node.all_input_nodes:
            if source not in self.new:
                self._emit(source)
        self.new[node] = self.graph.node_copy(node, lambda n: self.new[n])
        if node in self.program.stage:
            self.stage[self.new[node]] = self.program.stage[node]

    def _gather(self, chain: Fused) -> None:
        """Emit a gather with the products that read it, and take its results apart."""
        node, keep = chain.collective, bool(chain.kept)
        operands, whole = self._operands(chain.products), shape(node)
        with self.program.local.mode:
            products = [value(p.node).reshape(*whole[:-1], shape(p.node)[-1]) for p in chain.products]
        results = (*products, value(node)) if keep else tuple(products)
        x, *options = (self.new.get(a, a) if isinstance(a, fx.Node) else a for a in node.args)
        args = (x, *options, *operands, keep)
        fused = self._create(node, all_gather_matmul, args, f"{node.name}_matmul", results)
        for index, (product, result) in enumerate(zip(chain.products, products, strict=True)):
            self.new[product.node] = self._product(product.node, fused, index, result)
        if keep:
            self.new[node] = self._create(node, operator.getitem, (fused, len(products)), node.name, value(node))
        for view in chain.views:
            if view in chain.kept:
                self._emit(view)

    def _product(self, old: fx.Node, fused: fx.Node, index: int, result: Tensor) -> fx.Node:
        """Return a product among the results of a fused gather, in its own shape."""
        if tuple(result.shape) == shape(old):
            return self._create(old, operator.getitem, (fused, index), old.name, result)
        rows = self._create(old, operator.getitem, (fused, index), f"{old.name}_rows", result)
        return self._reshape(rows, shape(old), old, old.name)

    def _scatter(self, chain: Fused) -> None:
        """Emit products with the reduce-scatter of their sum."""
        node = chain.collective
        rows = shape(node.all_input_nodes[0])[:-1]
        xs = []
        for product in chain.products:
            x, size = self.new[product.x], (*rows, shape(product.x)[-1])
            if shape(product.x) != size:
                x = self._reshape(x, size, product.node, f"{product.node.name}_rows")
            xs.append(x)
        args = (xs, *node.args[1:], *self._operands(chain.products))
        self.new[node] = self._create(node, matmul_reduce_scatter, args, node.name, value(node))

    def _operands(self, products: Sequence[Matmul]) -> tuple[list[Any], ...]:
        """Return weights, biases, and which weights are transposed."""
        for product in products:
            for node in (product.weight, product.bias):
                if node is not None:
                    self._emit(node)
        weights = [self.new[product.weight] for product in products]
        biases = [None if product.bias is None else self.new[product.bias] for product in products]
        return weights, biases, [product.transposed for product in products]

    def _reshape(self, x: fx.Node, size: tuple[int, ...], like: fx.Node, name: str) -> fx.Node:
        with self.program.local.mode:
            return self._create(like, aten.reshape.default, (x, list(size)), name, value(x).reshape(size))

    def _create(
        self, like: fx.Node, target: Any, args: tuple[Any, ...], name: str, result: Tensor | tuple[Tensor, ...]
    ) -> fx.Node:
        """Return a new node in the stage of ``like``."""
        node = self.graph.create_node("call_function", target, args, name=name)
        self.stage[node] = self.program.stage[like]
        return annotate(node, replace(facts(like), value=result))
