"""DifferentiatedProgram -> DifferentiatedProgram: gradients of slices of one value are concatenated, not added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ...core.annotations import facts, shape
from ...ir.builder import GraphBuilder
from ...ir.program import DifferentiatedProgram
from ...ops.catalog import op_spec

aten = torch.ops.aten


@dataclass(frozen=True)
class JoinSlices:
    """On CUDA, replace a sum of gradients of slices that cover a value once by their concatenation.

    Before: %a = slice_backward(%u, [.., 128], 3, 0, 64);  %b = slice_backward(%v, [.., 128], 3, 64, 128);
            %g = add(add(%b, %a), %h)
    After:  %g = add(%h, cat([%u, %v], 3))
    Ensures: the slices do not overlap and leave nothing out; nothing else reads a partial sum. Each element of the sum
    had one term that is not zero. Rotary embeddings have two such sums in each layer: five kernels each become one.

    The concatenation comes last in a sum, so that the sum has the memory format of the other terms.
    """

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        results = {
            *program.gradients.values(),
            *program.cotangents.values(),
            *program.values.values(),
            *program.outputs,
        }
        results |= {*program.copies, *program.copies.values()}
        sums: dict[fx.Node, list[list[fx.Node]]] = {}
        gone: set[fx.Node] = set()
        for node in reversed(program.graph.nodes):
            if not op_spec(node).adds or node in gone:
                continue
            inner, terms = _terms(program, node, results)
            private = [term for term in terms if term not in results and _same_function(program, term, node)]
            if groups := _grouped([term for term in private if shape(term) == shape(node)]):
                joined = {term for group in groups for term in group}
                sums[node] = [*([term] for term in terms if term not in joined), *groups]
                gone |= inner | joined
        return _rewritten(program, sums, gone) if sums else program


def _terms(program: DifferentiatedProgram, total: fx.Node, results: set[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
    """Return the additions whose partial sums only ``total`` reads, and the terms of the sum, in order."""
    inner, terms, todo = set[fx.Node](), list[fx.Node](), [total]
    while todo:
        node = todo.pop()
        adds = op_spec(node).adds and len(node.args) == 2 and not node.kwargs
        private = len(node.users) == 1 and node not in results and _same_function(program, node, total)
        inside = adds and (node is total or private) and shape(node) == shape(total)
        if inside and all(isinstance(x, fx.Node) for x in node.args):
            inner.add(node)
            todo += reversed(node.args)  # type: ignore[arg-type]
        else:
            terms.append(node)
    return inner - {total}, terms


def _same_function(program: DifferentiatedProgram, a: fx.Node, b: fx.Node) -> bool:
    """Return whether one function computes both values, in one dtype."""
    same = program.stage.get(a) == program.stage.get(b) and (a in program.once) == (b in program.once)
    return same and facts(a).phase == facts(b).phase and facts(a).value.dtype == facts(b).value.dtype  # type: ignore[union-attr]


def _grouped(terms: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return groups of gradients whose slices cover a value once, in the order of the slices."""
    slices = [term for term in terms if op_spec(term).slice_gradient and len(term.users) == 1]
    groups = []
    for dim in dict.fromkeys(_dim(term) for term in slices):
        group = sorted((term for term in slices if _dim(term) == dim and term.args[5] == 1), key=lambda n: n.args[3])  # type: ignore[arg-type,return-value]
        ends = [0, *(term.args[4] for term in group)]
        if len(group) > 1 and [term.args[3] for term in group] == ends[:-1] and ends[-1] == shape(group[0])[dim]:
            groups.append(group)
    return groups


def _dim(term: fx.Node) -> int:
    dim = int(term.args[2])  # type: ignore[arg-type]
    return dim + len(shape(term)) if dim < 0 else dim


def _rewritten(
    program: DifferentiatedProgram, sums: dict[fx.Node, list[list[fx.Node]]], gone: set[fx.Node]
) -> DifferentiatedProgram:
    builder = GraphBuilder(program.local.mode)
    new: dict[fx.Node, fx.Node] = {}
    stage: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        if node in gone:
            continue
        first_new = len(builder.made)
        if node in sums:
            with builder.at(node, backward=facts(node).phase == "backward"):
                new[node] = _sum(builder, sums[node], new)
        else:
            new[node] = builder.graph.node_copy(node, lambda n: new[n])
        for new_node in (*builder.made[first_new:], new[node]):
            if node in program.stage:
                stage[new_node] = program.stage[node]
    builder.graph.lint()
    return program.moved(builder.graph, new, stage)


def _sum(builder: GraphBuilder, groups: Sequence[Sequence[fx.Node]], new: dict[fx.Node, fx.Node]) -> fx.Node:
    terms = []
    for group in groups:
        if len(group) == 1:
            terms.append(new[group[0]])
        else:
            parts = [new[term.all_input_nodes[0]] for term in group]
            terms.append(builder.call(aten.cat.default, parts, _dim(group[0])))
    total = terms[0]
    for term in terms[1:]:
        total = builder.call(aten.add.Tensor, total, term)
    return total
