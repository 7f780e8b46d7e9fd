"""Canonical forms of random operators: numbers of a standard distribution, and arithmetic on them.

``noise`` is the same on every layout, as it is a function of positions. The same arithmetic is written down a second
time, for the model itself, in ``equivalence/random_functions.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ...compat.torch import OpOverload, schema
from ...core.absent_gpu import CPU
from ...core.annotations import shape, value
from ...guards.seeded_generators import own_generator
from ...ir.builder import GraphBuilder
from ...ops.catalog import op_spec
from ...ops.rank_local import noise

aten = torch.ops.aten

Rewrite = Callable[[GraphBuilder, fx.Node, list[Any], dict[str, Any]], Any]


@dataclass(frozen=True)
class _Drawn:
    """The size, dtype and device of random numbers."""

    size: Sequence[int]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_node(cls, node: fx.Node, arguments: Mapping[str, Any]) -> _Drawn:
        """Return those that an operator draws."""
        dtype = node.meta["val"].dtype
        if "size" in arguments or "n" in arguments:
            return cls(
                arguments["size"] if "size" in arguments else [arguments["n"]], dtype, arguments["device"] or CPU
            )
        operands = [arguments[name] for name in ("self", "mean", "std") if isinstance(arguments.get(name), fx.Node)]
        broadcast = torch.broadcast_shapes(*map(shape, operands))  # type: ignore[no-untyped-call]
        return cls(list(broadcast), dtype, value(operands[0]).device)


Spelling = Callable[[GraphBuilder, _Drawn, Mapping[str, Any]], fx.Node]  # with its arguments by name


def random_calls(builder: GraphBuilder) -> int:
    """Return the number of random operators so far, which are in the order of the model's calls."""
    drawn = (node for node in builder.graph.nodes if op_spec(node).random)
    return len({node.kwargs["op"] if op_spec(node).random == "mask" else node.args[2] for node in drawn})


def _rewrite(spell: Spelling) -> Rewrite:
    def rewrite(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        parameters = schema(node.target).arguments
        arguments = {parameter.name: parameter.default_value for parameter in parameters}
        arguments |= dict(zip((parameter.name for parameter in parameters), args, strict=False)) | kwargs
        if arguments.get("generator") is not None:
            raise own_generator(builder.where)
        return spell(builder, _Drawn.from_node(node, arguments), arguments)

    return rewrite


def _noise(builder: GraphBuilder, kind: str, like: _Drawn) -> fx.Node:
    size, op = [int(n) for n in like.size], random_calls(builder)
    return builder.call(noise, size, kind, op, dtype=like.dtype, device=like.device)


def _scaled(builder: GraphBuilder, x: fx.Node, factor: float, shift: float) -> fx.Node:
    x = builder.call(aten.mul.Scalar, x, factor) if factor != 1 else x
    return builder.call(aten.add.Scalar, x, shift) if shift != 0 else x


def _uniform(builder: GraphBuilder, like: _Drawn, arguments: Mapping[str, Any]) -> fx.Node:
    low, high = arguments.get("from", 0.0), arguments.get("to", 1.0)
    return _scaled(builder, _noise(builder, "uniform", like), high - low, low)


def _normal(builder: GraphBuilder, like: _Drawn, arguments: Mapping[str, Any]) -> fx.Node:
    """Emit normal numbers; ``mean`` and ``std`` are numbers, or tensors that get no gradient."""
    mean, std = arguments.get("mean", 0.0), arguments.get("std", 1.0)
    x = _noise(builder, "normal", like)
    for target, number, operand in ((aten.mul, 1.0, std), (aten.add, 0.0, mean)):
        if isinstance(operand, fx.Node):
            x = builder.call(target.Tensor, x, builder.call(aten.detach.default, operand))
        elif operand != number:
            x = builder.call(target.Scalar, x, operand)
    return x


def _bernoulli(builder: GraphBuilder, like: _Drawn, arguments: Mapping[str, Any]) -> fx.Node:
    """Emit 1 with a probability, a number or an element of ``p`` (or of the operand), else 0."""
    p = arguments.get("p", arguments["self"])
    if isinstance(p, fx.Node):
        drawn = _noise(builder, "uniform", replace(like, dtype=value(p).dtype))
        successes = builder.call(aten.lt.Tensor, drawn, builder.call(aten.detach.default, p))
    else:
        drawn = _noise(builder, "bits", replace(like, dtype=torch.int32))
        bound = int(p * 2**32) - 2**31  # for p = 1 it would be no int32
        successes = (
            builder.call(aten.lt.Scalar, drawn, bound) if p < 1 else builder.call(aten.ge.Scalar, drawn, -(2**31))
        )
    return builder.call(aten._to_copy.default, successes, dtype=like.dtype)


def _exponential(builder: GraphBuilder, like: _Drawn, arguments: Mapping[str, Any]) -> fx.Node:
    return _scaled(builder, _noise(builder, "exponential", like), 1 / arguments["lambd"], 0.0)


def _integers(builder: GraphBuilder, like: _Drawn, arguments: Mapping[str, Any]) -> fx.Node:
    """Emit integers in [low, high); by default, all numbers that the dtype can hold."""
    low = arguments.get("low", arguments.get("from", 0))
    high = arguments.get("high", arguments.get("to"))
    if high is None:
        exact = like.dtype.is_floating_point
        high = 2 ** (1 - round(math.log2(torch.finfo(like.dtype).eps))) if exact else torch.iinfo(like.dtype).max + 1
    drawn = _noise(builder, "uniform", replace(like, dtype=torch.float64))
    drawn = builder.call(aten.floor.default, builder.call(aten.mul.Scalar, drawn, high - low))
    return builder.call(aten._to_copy.default, _scaled(builder, drawn, 1.0, low), dtype=like.dtype)


def _permutation(builder: GraphBuilder, like: _Drawn, arguments: Mapping[str, Any]) -> fx.Node:
    """Emit the order of random numbers."""
    drawn = _noise(builder, "uniform", replace(like, dtype=torch.float64))
    order = builder.getitem(builder.call(aten.sort.default, drawn), 1)
    return order if value(order).dtype == like.dtype else builder.call(aten._to_copy.default, order, dtype=like.dtype)


def _multinomial(builder: GraphBuilder, like: _Drawn, arguments: Mapping[str, Any]) -> fx.Node:
    """Emit the order of exponential times with these rates; with replacement, the first of one race per sample."""
    call = builder.call
    rates = call(aten.detach.default, arguments["self"])
    count, sizes = arguments["num_samples"], list(shape(rates))
    races = replace(like, dtype=value(rates).dtype)
    if arguments["replacement"] and count > 1:
        races = replace(races, size=[*sizes[:-1], count, sizes[-1]])
        rates = builder.reshape(rates, [*sizes[:-1], 1, sizes[-1]])
        return call(aten.argmax.default, call(aten.div.Tensor, rates, _noise(builder, "exponential", races)), -1)
    race = call(aten.div.Tensor, rates, _noise(builder, "exponential", races))
    return builder.getitem(call(aten.topk.default, race, count, -1), 1)


def _leaky(builder: GraphBuilder, like: _Drawn, arguments: Mapping[str, Any]) -> fx.Node:
    """Emit rrelu: elements that are not positive have a random slope each."""
    call, x, low, high = builder.call, arguments["self"], arguments["lower"], arguments["upper"]
    if not arguments["training"]:
        return call(aten.leaky_relu.default, x, (low + high) / 2)
    slope = _scaled(builder, _noise(builder, "uniform", like), high - low, low)
    return call(aten.where.self, call(aten.le.Scalar, x, 0), call(aten.mul.Tensor, x, slope), x)


def _log_normal(builder: GraphBuilder, like: _Drawn, arguments: Mapping[str, Any]) -> fx.Node:
    return builder.call(aten.exp.default, _normal(builder, like, arguments))


def _cauchy(builder: GraphBuilder, like: _Drawn, arguments: Mapping[str, Any]) -> fx.Node:
    angle = _scaled(builder, _noise(builder, "uniform", like), math.pi, -math.pi / 2)
    return _scaled(builder, builder.call(aten.tan.default, angle), arguments["sigma"], arguments["median"])


def _geometric(builder: GraphBuilder, like: _Drawn, arguments: Mapping[str, Any]) -> fx.Node:
    """Emit the number of trials until the first success: an exponential number, rounded up."""
    drawn = _noise(builder, "exponential", replace(like, dtype=torch.float64))
    trials = builder.call(aten.ceil.default, _scaled(builder, drawn, -1 / math.log1p(-arguments["p"]), 0.0))
    return builder.call(aten._to_copy.default, trials, dtype=like.dtype)


_SPELLINGS: Mapping[Spelling, tuple[str, ...]] = MappingProxyType(
    {
        _uniform: ("rand", "rand_like", "uniform"),
        _normal: ("randn", "randn_like", "normal", "normal_functional"),
        _bernoulli: ("bernoulli",),
        _exponential: ("exponential",),
        _integers: ("randint", "randint_like", "random"),
        _permutation: ("randperm",),
        _multinomial: ("multinomial",),
        _leaky: ("rrelu",),
        _log_normal: ("log_normal",),
        _cauchy: ("cauchy",),
        _geometric: ("geometric",),
    }
)


def _overloads(name: str) -> Iterator[OpOverload]:
    """Yield the overloads that return new numbers, and whose bounds are numbers."""
    for overload in (getattr(getattr(aten, name), suffix) for suffix in getattr(aten, name).overloads()):
        parameters = schema(overload).arguments
        tensor_bounds = [x for x in parameters if x.name in ("high", "size") and str(x.type) == "Tensor"]
        has_names = any(x.name == "names" for x in parameters)
        if not (schema(overload).is_mutable or tensor_bounds or has_names):
            yield overload


RANDOM_REWRITES: Mapping[OpOverload, Rewrite] = MappingProxyType(
    {target: _rewrite(spell) for spell, names in _SPELLINGS.items() for name in names for target in _overloads(name)}
)
