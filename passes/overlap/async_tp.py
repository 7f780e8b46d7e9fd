"""DifferentiatedProgram -> DifferentiatedProgram: collectives and the products beside them, slice by slice."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ...core.annotations import annotate, facts, shape, value
from ...ir.program import DifferentiatedProgram
from ...ops.collectives import all_gather, all_gather_matmul, matmul_reduce_scatter
from .matmul_chains import ChainFinder, Fused, Matmul

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseCollectiveMatmuls:
    """A gather and the products of what it gathers become one node, and so do products and the scatter of their sum:
    while a slice travels, another is multiplied (Wang et al. 2023).

    Before: %a = all_gather(%x, tp, 1);  %q = linear(%a, %w);  ...;  %y = linear(%h, %v);  %s = reduce_scatter(%y, tp)
    After:  %p = all_gather_matmul(%x, tp, 1, [%w]);  %q = %p[0];  ...;  %s = matmul_reduce_scatter([%h], tp, [%v])
    Ensures: the same products, over other rows at a time, and sums over ranks in another order. Nothing more is kept:
    what was gathered comes out only where something else reads it.

    The dim that ranks split is never the one that is multiplied. What hides communication that was started already
    stays where it is, and parameters and their gradients, which belong to no operator, travel as before.
    """

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        fused = ChainFinder(program).found()
        return _rebuilt(program, fused) if fused else program


def _rebuilt(program: DifferentiatedProgram, fused: Sequence[Fused]) -> DifferentiatedProgram:
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    stage: dict[fx.Node, int] = {}
    at = {one.place: one for one in fused}
    members = {node for one in fused for node in one.members}

    def put(like: fx.Node, target: Any, args: tuple[Any, ...], name: str, made: Tensor | tuple[Tensor, ...]) -> fx.Node:
        node = graph.create_node("call_function", target, args, name=name)
        stage[node] = program.stage[like]
        return annotate(node, replace(facts(like), value=made))

    def reshaped(x: fx.Node, to: tuple[int, ...], like: fx.Node, name: str) -> fx.Node:
        with program.local.mode:
            return put(like, aten.reshape.default, (x, list(to)), name, value(x).reshape(to))

    def emit(node: fx.Node) -> None:
        if node in new:
            return
        for source in node.all_input_nodes:
            if source not in new:  # of a weight or a bias, where its product comes earlier than it did
                emit(source)
        new[node] = graph.node_copy(node, lambda n: new[n])
        if node in program.stage:
            stage[new[node]] = program.stage[node]

    def operands(products: Sequence[Matmul]) -> tuple[list[Any], ...]:
        for product in products:
            for node in (product.weight, product.bias):
                if node is not None:
                    emit(node)
        biases = [None if product.bias is None else new[product.bias] for product in products]
        return [new[product.weight] for product in products], biases, [product.transposed for product in products]

    def gather(one: Fused) -> None:
        node, keep = one.collective, bool(one.kept)
        given, whole = operands(one.products), shape(node)
        with program.local.mode:
            made = [value(p.node).reshape(*whole[:-1], shape(p.node)[-1]) for p in one.products]
        several = (*made, value(node)) if keep else tuple(made)
        x, *where = (new.get(a, a) if isinstance(a, fx.Node) else a for a in node.args)
        both = put(node, all_gather_matmul, (x, *where, *given, keep), f"{node.name}_matmul", several)
        for index, (product, result) in enumerate(zip(one.products, made, strict=True)):
            old = product.node
            same = tuple(result.shape) == shape(old)
            picked = put(old, operator.getitem, (both, index), old.name if same else f"{old.name}_rows", result)
            new[old] = picked if same else reshaped(picked, shape(old), old, old.name)
        if keep:
            new[node] = put(node, operator.getitem, (both, len(made)), node.name, value(node))
        for view in one.views:
            if view in one.kept:
                emit(view)

    def scatter(one: Fused) -> None:
        node = one.collective
        rows = shape(node.all_input_nodes[0])[:-1]
        xs = []
        for product in one.products:
            x, to = new[product.x], (*rows, shape(product.x)[-1])
            xs.append(x if shape(product.x) == to else reshaped(x, to, product.node, f"{product.node.name}_rows"))
        new[node] = put(
            node, matmul_reduce_scatter, (xs, *node.args[1:], *operands(one.products)), node.name, value(node)
        )

    for node in program.graph.nodes:
        if node in at:
            (gather if at[node].collective.target is all_gather else scatter)(at[node])
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], lambda n: new[n]))
        elif node not in members:
            emit(node)
    graph.lint()
    alive = replace(  # what is known of values that are no more goes with them
        program,
        values={key: node for key, node in program.values.items() if node in new},
        cotangents={key: node for key, node in program.cotangents.items() if node in new},
        copies={copy: node for copy, node in program.copies.items() if copy in new and node in new},
    )
    return alive.moved(graph, new, stage)
