"""Rules of reductions and norms."""

from __future__ import annotations

from torch import fx

from ...core.annotations import shape, tensor_inputs, values
from .node_factors import aligned, argument, chosen_dims, leading, name_dims, opaque
from .notation import Dims, Factors, SpecFn


def reduction(*, sums: bool = False, linear: bool = False) -> SpecFn:
    """Return a rule for operators that reduce ``dim``, or all dims: whole, unless partial results add up (``sums``)."""

    def factors(node: fx.Node) -> Factors:
        dims, sizes = name_dims(shape(tensor_inputs(node)[0]))
        gone = chosen_dims(argument(node, "dim"), len(dims))
        keep = bool(argument(node, "keepdim"))
        out = tuple(() if d in gone else f for d, f in enumerate(dims) if keep or d not in gone)
        whole = frozenset() if sums else frozenset(f"d{d}" for d in gone)
        return Factors((tuple(dims),), (out,) * len(values(node)), sizes, whole, linear=((0,),) if linear else ())

    return factors


def norm_last(node: fx.Node) -> Factors:
    """layer_norm, rms_norm: the normalized dims are whole; weight, bias and statistics lack the others, or them."""
    dims, sizes = name_dims(shape(tensor_inputs(node)[0]))
    count = len(argument(node, "normalized_shape"))
    whole = frozenset(f"d{d}" for d in range(len(dims) - count, len(dims)))
    weights = (tuple(dims[-count:]),) * (len(tensor_inputs(node)) - 1)
    statistics: Dims = (*dims[:-count], *(((),) * count))
    outs = (tuple(dims), *((statistics,) * (len(values(node)) - 1)))
    return Factors((tuple(dims), *weights), outs, sizes, whole)


def instance_norm(node: fx.Node) -> Factors:
    """Each sample on its own, unless running statistics are kept."""
    return leading(1)(node) if argument(node, "running_mean") is None else opaque(node)


def batch_norm(node: fx.Node) -> Factors:
    """Channels; with frozen statistics every dim. The other inputs and outputs are per channel (or empty)."""
    x, *others = tensor_inputs(node)
    dims, sizes = name_dims(shape(x))
    frozen = "no_training" in str(node.target)
    whole = set() if frozen else {name for name in sizes if name != "d1"}
    outs: list[Dims] = [tuple(dims)]
    for k, v in enumerate(values(node)[1:]):
        if tuple(v.shape) == shape(x)[1:2]:
            outs.append((dims[1],))
        else:
            sizes[f"o{k}"] = v.shape[0]
            whole.add(f"o{k}")
            outs.append(((f"o{k}",),))
    return Factors((tuple(dims), *(((dims[1],),) * len(others))), tuple(outs), sizes, frozenset(whole))


def weight_norm(node: fx.Node) -> Factors:
    """Each row along ``dim`` has a norm of its own; the other dims are whole."""
    (v, g), dim = tensor_inputs(node), argument(node, "dim")
    dims, sizes = name_dims(shape(v))
    if dim == -1:
        return opaque(node)
    rows = aligned(dims, sizes, shape(g))
    return Factors((tuple(dims), rows), (tuple(dims),), sizes, frozenset(name for name in sizes if name != f"d{dim}"))


def prelu(node: fx.Node) -> Factors:
    """One slope for all, or one per channel."""
    x, weight = tensor_inputs(node)
    dims, sizes = name_dims(shape(x))
    slope: Dims = (dims[1],) if len(dims) > 1 and shape(weight) == shape(x)[1:2] else ((),) * len(shape(weight))
    return Factors((tuple(dims), slope), (tuple(dims),), sizes)


def renorm(node: fx.Node) -> Factors:
    """Return factors where each place of ``dim`` has a norm of its own; the other dims are whole."""
    (x,) = tensor_inputs(node)
    kept = chosen_dims(argument(node, "dim"), len(shape(x)))
    dims, sizes = name_dims(shape(x))
    return Factors((tuple(dims),), (tuple(dims),), sizes, frozenset(f"d{d}" for d in range(len(dims)) if d not in kept))
