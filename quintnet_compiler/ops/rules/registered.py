"""Sharding rules of operators that users registered with DTensor's ``register_sharding``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from ...compat.torch import pytree
from ...compat.torch_register_sharding import registered_shardings, spec_of_whole
from ...core.annotations import tensor_inputs, value
from .node_factors import opaque
from .notation import Dims, Factors, Rule
from .table import RULES

Placements = Sequence[Any]  # of DTensor; None for what is no tensor


def registered_rules() -> dict[Any, Rule]:
    """Return the rules of operators that have none in the table, by operator."""
    shardings = registered_shardings()
    return {op: Rule(op, partial(_factors, sharding)) for op, sharding in shardings.items() if op not in RULES}


def _factors(sharding: Callable[..., Any], node: fx.Node) -> Factors:
    """Return a factor for each sharding that splits dims which no sharding before it splits.

    Shardings with ``Partial`` inputs are left out, and dims that none splits are whole.

    Raises:
        ValueError: if there are placements for another number of arguments.
    """
    factors = opaque(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: spec_of_whole(value(source)))
    tensors, sizes, split = [*factors.inputs, *factors.outputs], dict(factors.sizes), set[str]()
    count = len(factors.inputs)
    for number, (out, into) in enumerate(sharding(*args, **kwargs)):
        placements = [*_of_tensors(node, into), *out]
        dims = _split_dims(placements, count, tensors)
        names = {tensors[place][dim][0] for place, dim in dims.items()}
        if names & split or len({sizes[name] for name in names}) != 1:
            continue
        name = f"s{number}"
        for place, dim in dims.items():
            sizes[name] = sizes.pop(tensors[place][dim][0])
            tensors[place] = (*tensors[place][:dim], (name,), *tensors[place][dim + 1 :])
        split.add(name)
    whole = frozenset(sizes) - split
    return Factors(tuple(tensors[:count]), tuple(tensors[count:]), sizes, whole, contiguous=frozenset(split))


def _of_tensors(node: fx.Node, placements: Placements) -> Placements:
    """Return the placements of a node's tensor arguments."""
    arguments = pytree.tree_leaves((node.args, node.kwargs))
    if len(placements) == len(arguments):
        return [placement for placement, x in zip(placements, arguments, strict=True) if isinstance(x, fx.Node)]
    if len(placements) != len(tensor_inputs(node)):
        raise ValueError(f"register_sharding gives {len(placements)} placements for {len(arguments)} arguments")
    return placements


def _split_dims(placements: Placements, num_inputs: int, tensors: Sequence[Dims]) -> dict[int, int]:
    """Return the dim of each tensor that a sharding splits; none where results are neither split nor sums of parts."""
    inputs, outputs = placements[:num_inputs], placements[num_inputs:]
    is_sum = [x.is_partial() and x.reduce_op == "sum" for x in outputs]
    followed = len(placements) == len(tensors) and not any(x.is_partial() for x in inputs)
    if not followed or not all(x.is_shard() or summed for x, summed in zip(outputs, is_sum, strict=True)):
        return {}
    dims = {place: x.dim % len(tensors[place]) for place, x in enumerate(placements) if x.is_shard()}
    return dims if any(place < num_inputs for place in dims) else {}
