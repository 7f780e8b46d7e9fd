"""LocalProgram -> LocalProgram: RMS norms that a model writes out become the operator that GPUs have a kernel for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ...core.absent_gpu import CUDA
from ...core.annotations import shape, value
from ...ir.program import LocalProgram, outputs

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseNorms:
    """On CUDA, replace the steps of an RMS norm by one operator.

    Before: %y = _to_copy(%x, float32);  %s = sum(pow(%y, 2), [-1], True);  %r = rsqrt(add(div(%s, n), eps));
            %z = mul(%w, _to_copy(mul(%y, %r), bfloat16))
    After:  %z = rms_norm(%x, [n], %w, eps)
    Ensures: the dim that is normalized is whole on each rank; the steps are read by nothing else, and compute in no
    fewer bits than their input and their result have; what lies outside of the steps is as it was. In 16 bits the
    kernel rounds once where the steps round twice; otherwise both compute the same.

    A norm without weight is one as well, and so is one whose weight has another dtype than its input: then that factor
    stays an operator of its own.
    """

    def __call__(self, program: LocalProgram, /) -> LocalProgram:
        found: dict[fx.Node, _Norm] = {}
        for node in program.graph.nodes:
            if (norm := next((one for one in _norms(node) if _together(program, one)), None)) is not None:
                found[norm.end] = norm
        return _rewritten(program, found) if found else program


@dataclass(frozen=True)
class _Norm:
    """``steps`` compute ``end`` = x * (mean(x ** 2) + eps) ** -0.5 * weight."""

    end: fx.Node
    steps: frozenset[fx.Node]
    x: fx.Node
    eps: float
    weight: fx.Node | None = None


def _norms(node: fx.Node) -> Iterator[_Norm]:
    """The norm whose factor 1 / root mean square is ``node``: with all that can be one operator with it, then less."""
    if (inner := _norm(node)) is not None:
        narrowed = _narrowed(inner)
        yield from dict.fromkeys([_weighted(narrowed), narrowed, _weighted(inner), inner])


def _norm(node: fx.Node) -> _Norm | None:
    """From the square to the product with ``node``."""
    if node.target is not aten.rsqrt.default or value(node).device.type != CUDA.type:
        return None
    plus = _argument(node, aten.add.Scalar)
    mean = _argument(plus, aten.div.Scalar)
    total = _argument(mean, aten.sum.dim_IntList)
    square = _argument(total, aten.pow.Tensor_Scalar)
    if plus is None or mean is None or total is None or square is None or square.args[1] != 2:
        return None
    wide: Any = square.args[0]
    size, last = shape(wide)[-1], len(shape(wide)) - 1
    if total.args[1:] not in (([-1], True), ([last], True)) or total.kwargs or mean.args[1] != size:
        return None
    scaled = _sole_user(node)
    if scaled is None or scaled.target is not aten.mul.Tensor or not _reads(scaled, wide, node):
        return None
    steps = frozenset({square, total, mean, plus, node, scaled})
    if plus.kwargs or any(user not in steps for step in (square, total, mean, plus) for user in step.users):
        return None
    return _Norm(scaled, steps, wide, float(plus.args[1]))  # type: ignore[arg-type]


def _narrowed(norm: _Norm) -> _Norm:
    """With the casts before and behind, where these are to more bits and back."""
    before, after = norm.x, _sole_user(norm.end)
    if before.target is not aten._to_copy.default or after is None or after.target is not aten._to_copy.default:
        return norm
    (given,) = before.all_input_nodes
    narrow = value(given).dtype
    if not narrow.is_floating_point or narrow.itemsize >= value(before).dtype.itemsize:
        return norm
    if value(after).dtype is not narrow or value(before).dtype is not torch.float32:
        return norm
    return replace(norm, end=after, steps=norm.steps | {after}, x=given)


def _weighted(norm: _Norm) -> _Norm:
    """With a factor for each element of a row."""
    product = _sole_user(norm.end)
    if product is None or product.target is not aten.mul.Tensor:
        return norm
    for weight in product.all_input_nodes:
        one = shape(weight) == shape(norm.x)[-1:] and value(weight).dtype is value(norm.x).dtype
        if one and weight is not norm.end and _reads(product, norm.end, weight):
            return replace(norm, end=product, steps=norm.steps | {product}, weight=weight)
    return norm


def _argument(node: fx.Node | None, target: Any) -> fx.Node | None:
    """The first argument of ``node``, if ``target`` made it."""
    found = node.args[0] if node is not None and node.args else None
    return found if isinstance(found, fx.Node) and found.target is target else None


def _sole_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _reads(node: fx.Node, one: fx.Node, other: fx.Node) -> bool:
    return tuple(node.args) in ((one, other), (other, one)) and not node.kwargs


def _together(program: LocalProgram, norm: _Norm) -> bool:
    """Whether one function computes all of it, and nobody asks for what is inside."""
    places = {(program.stage.get(step), step in program.once) for step in norm.steps}
    inside = norm.steps - {norm.end}
    return len(places) == 1 and inside.isdisjoint(
        {*program.deferred, *program.deferred.values(), *outputs(program.graph)}
    )


def _rewritten(program: LocalProgram, found: Mapping[fx.Node, _Norm]) -> LocalProgram:
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    inside = {step for norm in found.values() for step in norm.steps} - found.keys()
    for node in program.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], lambda n: new[n]))
        elif (norm := found.get(node)) is not None:
            weight = None if norm.weight is None else new[norm.weight]
            args = (new[norm.x], [shape(norm.x)[-1]], weight, norm.eps)
            new[node] = graph.create_node("call_function", aten.rms_norm.default, args, name=node.name)
            new[node].meta = dict(node.meta)
        elif node not in inside:
            new[node] = graph.node_copy(node, lambda n: new[n])
    for gone in list(_unused(graph)):
        graph.erase_node(gone)
    graph.lint()
    kept = set(graph.nodes)
    return program.moved(graph, {old: made for old, made in new.items() if made in kept})


def _unused(graph: fx.Graph) -> Iterator[fx.Node]:
    """Casts that only steps read."""
    for node in graph.nodes:
        if node.target is aten._to_copy.default and not node.users:
            yield node
