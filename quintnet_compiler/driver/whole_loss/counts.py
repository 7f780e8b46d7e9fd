"""Over how many items the reductions of losses average."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.torch import OpOverload, schema
from ...ops.catalog import op_spec

aten = torch.ops.aten
MEAN, SUM = 1, 2  # of the argument ``reduction``, as operators take it


@dataclass(frozen=True)
class Reduction:
    """The result of an operator that reduces rows: a sum, or the mean of ``count`` items (a size, or a new node)."""

    kind: str
    count: Any = None


def reduction_of(node: fx.Node, add: Callable[..., fx.Node]) -> Reduction | None:
    """Return what ``node``, which reduces rows, computes; None if that is neither a sum nor a mean.

    ``add(target, *args)`` adds a node to the graph, behind what it reads.
    """
    spec, arguments = op_spec(node), arguments_of(node)
    fixed_bins = spec.reduces == "bins" and arguments["min"] < arguments["max"]  # else bins are those of the batch
    if spec.reduces == "sum" or fixed_bins:
        return Reduction("sum")
    if spec.reduces == "mean":
        return Reduction("mean", _numel(arguments["self"]) // _numel(node))
    reduced = arguments.get("reduction", MEAN)
    if spec.averages is None or reduced not in (MEAN, SUM):
        return None
    return Reduction("sum") if reduced == SUM else Reduction("mean", _COUNTS[spec.averages](arguments, add))


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by name, defaults among them."""
    if not isinstance(node.target, OpOverload):
        return {}
    formal = schema(node.target).arguments
    actual = {argument.name: x for argument, x in zip(formal, node.args, strict=False)} | dict(node.kwargs)
    return {argument.name: argument.default_value for argument in formal if argument.has_default_value()} | actual


def _numel(node: fx.Node) -> Any:
    return prod(node.meta["val"].shape)


def _labels(arguments: Mapping[str, Any], add: Callable[..., fx.Node]) -> Any:
    """Labels that are not ignored, or the sum of their weights; for probabilities, the number of items."""
    target, weight = arguments["target"], arguments["weight"]
    value: Tensor = target.meta["val"]
    if value.is_floating_point():
        logits = arguments["self"].meta["val"]
        return prod(value.shape) // logits.shape[1 if logits.dim() > 1 else 0]
    counts = add(aten.ne.Scalar, target, arguments["ignore_index"])
    if weight is None:
        return add(aten.sum.default, counts)
    classes = add(aten.mul.Tensor, target, counts)  # 0 for those that are ignored
    column = add(aten.unsqueeze.default, weight, 1)
    weights = add(aten.squeeze.dim, add(aten.embedding.default, column, classes), -1)
    return add(aten.sum.default, add(aten.mul.Tensor, weights, counts))


def _elements(arguments: Mapping[str, Any], add: Callable[..., fx.Node]) -> Any:
    operands = [x.meta["val"] for x in arguments.values() if isinstance(x, fx.Node)]
    shape: torch.Size = torch.broadcast_shapes(*(x.shape for x in operands))  # type: ignore[no-untyped-call]
    return prod(shape)


def _rows(arguments: Mapping[str, Any], add: Callable[..., fx.Node]) -> Any:
    """Return the number of losses of operators that reduce the last dim themselves: of [N, D] it is N."""
    shapes = [x.meta["val"].shape for x in arguments.values() if isinstance(x, fx.Node)]
    dims = max(map(len, shapes))
    rows = [shape for shape in shapes if len(shape) == dims]  # the others are labels and weights of classes
    return prod(torch.broadcast_shapes(*rows)[:-1])  # type: ignore[no-untyped-call]


_COUNTS: Mapping[str, Callable[[Mapping[str, Any], Callable[..., fx.Node]], Any]] = {
    "labels": _labels,
    "elements": _elements,
    "rows": _rows,
}
