"""How :mod:`.normalize` spells random operators: numbers of a standard distribution, and arithmetic on them.

``noise`` is the same on every layout, as it is a function of positions. What is made of it here is written down a
second time, for the model itself, in ``equivalence/random_functions.py``.
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
from ...core.errors import CompileError
from ...ir.builder import GraphBuilder
from ...ops.rank_local import RANDOM, dropout, noise

aten = torch.ops.aten

Rewrite = Callable[[GraphBuilder, fx.Node, list[Any], dict[str, Any]], Any]


@dataclass(frozen=True)
class _Drawn:
    """What a random operator makes."""

    size: Sequence[int]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, node: fx.Node, given: Mapping[str, Any]) -> _Drawn:
        dtype = node.meta["val"].dtype
        if "size" in given or "n" in given:
            return cls(given["size"] if "size" in given else [given["n"]], dtype, given["device"] or CPU)
        operands = [given[name] for name in ("self", "mean", "std") if isinstance(given.get(name), fx.Node)]
        size = torch.broadcast_shapes(*map(shape, operands))  # type: ignore[no-untyped-call]
        return cls(list(size), dtype, value(operands[0]).device)


Spelling = Callable[[GraphBuilder, _Drawn, Mapping[str, Any]], fx.Node]  # with its arguments by name


def random_calls(builder: GraphBuilder) -> int:
    """How many random operators there are so far: their order is that of the model's own calls."""
    drawn = (node for node in builder.graph.nodes if node.target in RANDOM)
    return len({node.kwargs["op"] if node.target is dropout else node.args[2] for node in drawn})


def _rewrite(spell: Spelling) -> Rewrite:
    def rewrite(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        known = schema(node.target).arguments
        given = {one.name: one.default_value for one in known}
        given |= dict(zip((one.name for one in known), args, strict=False)) | kwargs
        if given.get("generator") is not None:
            raise CompileError(
                "QN105",
                f"{node.target} draws from a generator of its own, whose numbers would differ between layouts",
                where=builder.where,
                fix="generator=None: numbers are a function of the plan's seed, the step and the position",
            )
        return spell(builder, _Drawn.of(node, given), given)

    return rewrite


def _noise(builder: GraphBuilder, kind: str, like: _Drawn) -> fx.Node:
    size, op = [int(n) for n in like.size], random_calls(builder)
    return builder.call(noise, size, kind, op, dtype=like.dtype, device=like.device)


def _scaled(builder: GraphBuilder, x: fx.Node, factor: float, shift: float) -> fx.Node:
    x = builder.call(aten.mul.Scalar, x, factor) if factor != 1 else x
    return builder.call(aten.add.Scalar, x, shift) if shift != 0 else x


def _uniform(builder: GraphBuilder, like: _Drawn, given: Mapping[str, Any]) -> fx.Node:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return _scaled(builder, _noise(builder, "uniform", like), high - low, low)


def _normal(builder: GraphBuilder, like: _Drawn, given: Mapping[str, Any]) -> fx.Node:
    """``mean`` and ``std`` are numbers, or tensors through which PyTorch sends no gradient."""
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    x = _noise(builder, "normal", like)
    for target, number, operand in ((aten.mul, 1.0, std), (aten.add, 0.0, mean)):
        if isinstance(operand, fx.Node):
            x = builder.call(target.Tensor, x, builder.call(aten.detach.default, operand))
        elif operand != number:
            x = builder.call(target.Scalar, x, operand)
    return x


def _bernoulli(builder: GraphBuilder, like: _Drawn, given: Mapping[str, Any]) -> fx.Node:
    """True with a probability that is a number, or that each element of ``p`` (or of the operand) says."""
    p = given.get("p", given["self"])
    if isinstance(p, fx.Node):
        drawn = _noise(builder, "uniform", replace(like, dtype=value(p).dtype))
        seen = builder.call(aten.lt.Tensor, drawn, builder.call(aten.detach.default, p))
    else:
        drawn = _noise(builder, "bits", replace(like, dtype=torch.int32))
        bound = int(p * 2**32) - 2**31  # for p = 1 it would be no int32
        seen = builder.call(aten.lt.Scalar, drawn, bound) if p < 1 else builder.call(aten.ge.Scalar, drawn, -(2**31))
    return builder.call(aten._to_copy.default, seen, dtype=like.dtype)


def _exponential(builder: GraphBuilder, like: _Drawn, given: Mapping[str, Any]) -> fx.Node:
    return _scaled(builder, _noise(builder, "exponential", like), 1 / given["lambd"], 0.0)


def _integers(builder: GraphBuilder, like: _Drawn, given: Mapping[str, Any]) -> fx.Node:
    """Of [low, high): by default, all numbers that the dtype can hold."""
    low = given.get("low", given.get("from", 0))
    high = given.get("high", given.get("to"))
    if high is None:
        exact = like.dtype.is_floating_point
        high = 2 ** (1 - round(math.log2(torch.finfo(like.dtype).eps))) if exact else torch.iinfo(like.dtype).max + 1
    drawn = _noise(builder, "uniform", replace(like, dtype=torch.float64))
    drawn = builder.call(aten.floor.default, builder.call(aten.mul.Scalar, drawn, high - low))
    return builder.call(aten._to_copy.default, _scaled(builder, drawn, 1.0, low), dtype=like.dtype)


def _permutation(builder: GraphBuilder, like: _Drawn, given: Mapping[str, Any]) -> fx.Node:
    """The order of as many random numbers."""
    drawn = _noise(builder, "uniform", replace(like, dtype=torch.float64))
    order = builder.getitem(builder.call(aten.sort.default, drawn), 1)
    return order if value(order).dtype == like.dtype else builder.call(aten._to_copy.default, order, dtype=like.dtype)


def _multinomial(builder: GraphBuilder, like: _Drawn, given: Mapping[str, Any]) -> fx.Node:
    """Who comes first of exponential numbers with these rates, and who next; with replacement, one race for each."""
    call = builder.call
    rates = call(aten.detach.default, given["self"])
    count, sizes = given["num_samples"], list(shape(rates))
    races = replace(like, dtype=value(rates).dtype)
    if given["replacement"] and count > 1:
        races = replace(races, size=[*sizes[:-1], count, sizes[-1]])
        rates = builder.reshape(rates, [*sizes[:-1], 1, sizes[-1]])
        return call(aten.argmax.default, call(aten.div.Tensor, rates, _noise(builder, "exponential", races)), -1)
    race = call(aten.div.Tensor, rates, _noise(builder, "exponential", races))
    return builder.getitem(call(aten.topk.default, race, count, -1), 1)


def _leaky(builder: GraphBuilder, like: _Drawn, given: Mapping[str, Any]) -> fx.Node:
    """rrelu: where an element is not positive, a slope of its own."""
    call, x, low, high = builder.call, given["self"], given["lower"], given["upper"]
    if not given["training"]:
        return call(aten.leaky_relu.default, x, (low + high) / 2)
    slope = _scaled(builder, _noise(builder, "uniform", like), high - low, low)
    return call(aten.where.self, call(aten.le.Scalar, x, 0), call(aten.mul.Tensor, x, slope), x)


def _log_normal(builder: GraphBuilder, like: _Drawn, given: Mapping[str, Any]) -> fx.Node:
    return builder.call(aten.exp.default, _normal(builder, like, given))


def _cauchy(builder: GraphBuilder, like: _Drawn, given: Mapping[str, Any]) -> fx.Node:
    angle = _scaled(builder, _noise(builder, "uniform", like), math.pi, -math.pi / 2)
    return _scaled(builder, builder.call(aten.tan.default, angle), given["sigma"], given["median"])


def _geometric(builder: GraphBuilder, like: _Drawn, given: Mapping[str, Any]) -> fx.Node:
    """How many trials until the first success: an exponential number, rounded up."""
    drawn = _noise(builder, "exponential", replace(like, dtype=torch.float64))
    trials = builder.call(aten.ceil.default, _scaled(builder, drawn, -1 / math.log1p(-given["p"]), 0.0))
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
    """Those that return what they draw, and whose bounds are numbers."""
    for overload in (getattr(getattr(aten, name), one) for one in getattr(aten, name).overloads()):
        known = schema(overload)
        bounds = [one for one in known.arguments if one.name in ("high", "size") and str(one.type) == "Tensor"]
        named = any(one.name == "names" for one in known.arguments)
        if not (known.is_mutable or bounds or named):
            yield overload


RANDOM_REWRITES: Mapping[OpOverload, Rewrite] = MappingProxyType(
    {target: _rewrite(spell) for spell, names in _SPELLINGS.items() for name in names for target in _overloads(name)}
)
