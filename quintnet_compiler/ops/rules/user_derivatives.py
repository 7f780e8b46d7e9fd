"""Rules of :mod:`...ops.derivatives.user_derivatives`: a value and its gradient have types that fit each other."""

from __future__ import annotations

from torch import fx

from ...core.annotations import shape, tensor_inputs
from .node_factors import name_dims
from .notation import Factors


def with_tangent(node: fx.Node) -> Factors:
    dims, sizes = name_dims(shape(tensor_inputs(node)[0]))
    d = tuple(dims)
    return Factors((d,), (d, d), sizes, linear=((0,),), dual=((1, 2),))


def declare_gradient(node: fx.Node) -> Factors:
    dims, sizes = name_dims(shape(tensor_inputs(node)[0]))
    d = tuple(dims)
    return Factors((d, d), ((),), sizes, settled=frozenset(sizes), dual=((0, 1),))


def after_gradients(node: fx.Node) -> Factors:
    first, *done = tensor_inputs(node)
    dims, sizes = name_dims(shape(first))
    d = tuple(dims)
    return Factors((d, *(() for _ in done)), (d,), sizes, linear=((0,),))
