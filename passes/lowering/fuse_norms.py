"""LocalProgram -> LocalProgram: RMS norms that a model writes out become one operator, for which GPUs have a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ...core.absent_gpu import CUDA
from ...core.annotations import shape, value
from ...ir.program import LocalProgram, outputs
from ...ops.catalog import op_spec

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
        norms: dict[fx.Node, _Norm] = {}
        for node in program.graph.nodes:
            norm = next((candidate for candidate in _candidates(node) if _is_private(program, candidate)), None)
            if norm is not None:
                norms[norm.end] = norm
        return _rewritten(program, norms) if norms else program


@dataclass(frozen=True)
class _Norm:
    """An RMS norm: ``steps`` compute ``end`` = x * (mean(x ** 2) + eps) ** -0.5 * weight."""

    end: fx.Node
    steps: frozenset[fx.Node]
    x: fx.Node
    eps: float
    weight: fx.Node | None = None


@dataclass(frozen=True)
class _MeanSquare:
    """Nodes that compute mean(x ** 2) + eps over the last dim."""

    square: fx.Node
    total: fx.Node
    mean: fx.Node
    plus_eps: fx.Node

    @property
    def x(self) -> fx.Node:
        return self.square.args[0]  # type: ignore[return-value]

    @property
    def chain(self) -> tuple[fx.Node, ...]:
        return self.square, self.total, self.mean, self.plus_eps

    @property
    def over_last_dim(self) -> bool:
        """Return whether squares are summed over the last dim alone, and divided by its size."""
        size, last = shape(self.x)[-1], len(shape(self.x)) - 1
        sums_last = self.total.args[1:] in (([-1], True), ([last], True)) and not self.total.kwargs
        return bool(self.square.args[1] == 2 and sums_last and self.mean.args[1] == size and not self.plus_eps.kwargs)


def _candidates(node: fx.Node) -> Iterator[_Norm]:
    """Yield norms whose factor 1 / root mean square is ``node``: those with more steps first."""
    inner = _norm(node)
    if inner is not None:
        narrowed = _with_casts(inner)
        yield from dict.fromkeys([_with_weight(narrowed), narrowed, _with_weight(inner), inner])


def _norm(node: fx.Node) -> _Norm | None:
    """Return the norm from the square to the product with ``node``."""
    if node.target is not aten.rsqrt.default or value(node).device.type != CUDA.type:
        return None
    mean_square = _mean_square(node)
    if mean_square is None or not mean_square.over_last_dim:
        return None
    scaled = _sole_user(node)
    if scaled is None or scaled.target is not aten.mul.Tensor or not _multiplies(scaled, mean_square.x, node):
        return None
    steps = frozenset({*mean_square.chain, node, scaled})
    if any(user not in steps for step in mean_square.chain for user in step.users):
        return None
    return _Norm(scaled, steps, mean_square.x, float(mean_square.plus_eps.args[1]))  # type: ignore[arg-type]


def _mean_square(node: fx.Node) -> _MeanSquare | None:
    """Return the chain pow, sum, div, add that ``node`` reads."""
    plus_eps = _argument(node, aten.add.Scalar)
    mean = _argument(plus_eps, aten.div.Scalar)
    total = _argument(mean, aten.sum.dim_IntList)
    square = _argument(total, aten.pow.Tensor_Scalar)
    if plus_eps is None or mean is None or total is None or square is None:
        return None
    return _MeanSquare(square, total, mean, plus_eps)


def _with_casts(norm: _Norm) -> _Norm:
    """Add the casts of the input to float32 and of the result back."""
    cast, cast_back = norm.x, _sole_user(norm.end)
    if not op_spec(cast).casts or cast_back is None or not op_spec(cast_back).casts:
        return norm
    (source,) = cast.all_input_nodes
    narrow = value(source).dtype
    if not narrow.is_floating_point or narrow.itemsize >= value(cast).dtype.itemsize:
        return norm
    if value(cast_back).dtype is not narrow or value(cast).dtype is not torch.float32:
        return norm
    return replace(norm, end=cast_back, steps=norm.steps | {cast_back}, x=source)


def _with_weight(norm: _Norm) -> _Norm:
    """Add the product with a weight for each element of a row."""
    product = _sole_user(norm.end)
    if product is None or product.target is not aten.mul.Tensor:
        return norm
    for weight in product.all_input_nodes:
        fits = shape(weight) == shape(norm.x)[-1:] and value(weight).dtype is value(norm.x).dtype
        if fits and weight is not norm.end and _multiplies(product, norm.end, weight):
            return replace(norm, end=product, steps=norm.steps | {product}, weight=weight)
    return norm


def _argument(node: fx.Node | None, target: Any) -> fx.Node | None:
    """Return the first argument of ``node``, if it is a call of ``target``."""
    source = node.args[0] if node is not None and node.args else None
    return source if isinstance(source, fx.Node) and source.target is target else None


def _sole_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _multiplies(product: fx.Node, a: fx.Node, b: fx.Node) -> bool:
    return tuple(product.args) in ((a, b), (b, a)) and not product.kwargs


def _is_private(program: LocalProgram, norm: _Norm) -> bool:
    """Return whether one function computes all steps, and nothing outside reads those before the end."""
    places = {(program.stage.get(step), step in program.once) for step in norm.steps}
    inside = norm.steps - {norm.end}
    return len(places) == 1 and inside.isdisjoint(
        {*program.deferred, *program.deferred.values(), *outputs(program.graph)}
    )


def _rewritten(program: LocalProgram, norms: Mapping[fx.Node, _Norm]) -> LocalProgram:
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    inside = {step for norm in norms.values() for step in norm.steps} - norms.keys()
    for node in program.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], lambda n: new[n]))
        elif (norm := norms.get(node)) is not None:
            weight = None if norm.weight is None else new[norm.weight]
            args = (new[norm.x], [shape(norm.x)[-1]], weight, norm.eps)
            new[node] = graph.create_node("call_function", aten.rms_norm.default, args, name=node.name)
            new[node].meta = dict(node.meta)
        elif node not in inside:
            new[node] = graph.node_copy(node, lambda n: new[n])
    for cast in list(_unused_casts(graph)):
        graph.erase_node(cast)
    graph.lint()
    nodes = set(graph.nodes)
    return program.moved(graph, {old: copy for old, copy in new.items() if copy in nodes})


def _unused_casts(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the casts that only steps have read."""
    for node in graph.nodes:
        if op_spec(node).casts and not node.users:
            yield node
