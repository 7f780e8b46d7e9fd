"""Faults in functions and tables that several passes use, and checks once used too: each is put in everywhere at once,
as one wrong edit of the source would be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from quintnet_compiler.core import sharding, slices
from quintnet_compiler.core.sharding import I, P, R, Shard
from quintnet_compiler.ir.program import Strategy
from quintnet_compiler.ops import collectives as comm_ops
from quintnet_compiler.ops.rules import notation as rule_notation
from quintnet_compiler.passes.autodiff import vector_jacobian
from quintnet_compiler.passes.codegen import generate_ranks
from quintnet_compiler.passes.codegen import python_ops as spelling
from quintnet_compiler.passes.sharding import batch_factors
from quintnet_compiler.strategies import emit_conversion, expert_axes, rule_book

aten = torch.ops.aten
Make = Callable[[Any], Any]


@dataclass(frozen=True)
class Fault:
    """``make`` gets what ``name`` of ``home`` (a module or a class) is, and returns what stands there instead."""

    home: Any
    name: str
    what: str
    make: Make

    def __post_init__(self) -> None:
        """Refuse a name that the home does not have: the fault would reach nothing."""
        getattr(self.home, self.name)

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


@contextmanager
def injected(fault: Fault) -> Iterator[None]:
    """Every module of the package, and every table of one, that has the original has the fault."""
    right = getattr(fault.home, fault.name)
    wrong = fault.make(right)
    package = [m for name, m in list(sys.modules.items()) if name.startswith("quintnet_compiler")]
    has = [m for m in package if vars(m).get(fault.name) is right]
    homes = [fault.home] if isinstance(fault.home, type) else has
    tables = [table for m in package for table in vars(m).values() if type(table) is dict]
    entries = [(table, key) for table in tables for key, x in table.items() if x is right]
    for home in homes:
        setattr(home, fault.name, wrong)
    for table, key in entries:
        table[key] = wrong
    try:
        yield
    finally:
        for home in homes:
            setattr(home, fault.name, right)
        for table, key in entries:
            table[key] = right


def _answer(wrong: Mapping[Any, Any]) -> Make:
    """A function of one type that is wrong for some."""
    return lambda right: lambda kind: wrong.get(kind, right(kind))


def _lowered(change: Callable[[Any, Any, Any], Any]) -> Make:
    def make(right: Any) -> Any:
        return lambda a, b, **how: change(a, b, right(a, b, **how))

    return make


def _instead(old: Any, new: Any, dims: Callable[[Any], Any] = lambda d: d) -> Make:
    return _lowered(lambda a, b, made: (new, dims(made[1])) if made[0] is old else made)


def _of_result(change: Callable[[Any], Any]) -> Make:
    return lambda right: lambda *args, **kwargs: change(right(*args, **kwargs))


def _sums_lost(right: Any) -> Any:
    """The transpose of a gather keeps a rank's own slice and does not add up."""

    def back(builder: Any, x: Any, node: Any, source: Any, target: Any, parameter: Any, precision: Any) -> Any:
        before, after = sharding.gradient(target), sharding.gradient(source)
        if comm_ops.lower_conversion(before, after)[0] is comm_ops.reduce_scatter:
            axis, size = node.args[1], node.args[2]
            return emit_conversion.emit_conversion(builder, x, axis, size, R, after, precision)
        return right(builder, x, node, source, target, parameter, precision)

    return back


def _transposed_wrongly(change: Callable[[Any, Any], tuple[Any, Any]]) -> Make:
    def make(right: Any) -> Any:
        def back(builder: Any, x: Any, node: Any, source: Any, target: Any, *rest: Any) -> Any:
            return right(builder, x, node, *change(source, target), *rest)

        return back

    return make


def _other_dim(kind: Any) -> Any:
    return Shard(0 if kind.dim else 1, kind.parts) if isinstance(kind, Shard) else kind


def _strategies(change: Callable[[Strategy], Strategy]) -> Make:
    def make(right: Any) -> Any:
        return lambda *args: tuple(dict.fromkeys(change(s) for s in right(*args)))

    return make


def _kinds(strategy: Strategy, old: Any, new: Any, where: str) -> Strategy:
    if not strategy.splits:
        return strategy
    kinds = tuple(new if kind is old else kind for kind in getattr(strategy, where))
    return replace(strategy, **{where: kinds})


def _fitted(**changes: Any) -> Make:
    """Notation as it is, without one of its words."""
    return lambda right: lambda self, given, made: replace(right(self, given, made), **changes)


def _from_the_left(right: Any) -> Any:
    def names(self: Any, tokens: Any, dims: Any) -> list[str]:
        found = right(self, tokens, dims)
        return [f"b{i}" if name[0] == "b" and name[1:].isdigit() else name for i, name in enumerate(found)]

    return names


def _spelled(op: Any, function: Any) -> Make:
    return lambda right: MappingProxyType({**right, op: function})


def _linear(change: Callable[[Any, Any, list[Any]], None]) -> Make:
    """The backward of a product with a weight, whose gradients are changed."""

    def make(right: Any) -> Any:
        def linear(self: Any, *args: Any, **kwargs: Any) -> Any:
            made, pullback = right(self, *args, **kwargs)

            def back(tangents: Any) -> Any:
                found = list(pullback(tangents))
                change(self.builder, args, found)
                return found

            return made, back

        return linear

    return make


def _scaled(position: int, factor: float) -> Callable[[Any, Any, list[Any]], None]:
    def change(builder: Any, args: Any, found: list[Any]) -> None:
        if len(found) > position and found[position] is not None:
            found[position] = builder.call(aten.mul.Scalar, found[position], factor)

    return change


def _dropped(right: Any) -> Any:
    """Templates of operators of two operands forget the second one's gradient, and give it the first one's."""

    def inline(self: Any, template: Any, tensors: Any) -> Any:
        made, pullback = right(self, template, tensors)

        def back(tangents: Any) -> Any:
            found = pullback(tangents)
            alike = (
                len(found) == 2 and None not in found and tensors[0].meta["val"].shape == tensors[1].meta["val"].shape
            )
            return [found[0], found[0]] if alike else found

        return made, back

    return inline


def _doubled(right: Any) -> Any:
    """Templates of softmax and norms give twice the gradient."""

    def inline(self: Any, template: Any, tensors: Any) -> Any:
        made, pullback = right(self, template, tensors)
        norm = any("layer_norm" in str(n.target) or "gelu" in str(n.target) for n in template.graph.nodes)

        def back(tangents: Any) -> Any:
            found = pullback(tangents)
            return [found[0] and self.builder.call(aten.mul.Scalar, found[0], 2.0), *found[1:]] if norm else found

        return made, back

    return inline


def _no_cut(right: Any) -> Any:
    return lambda factors, strategy, ranks: factors


def _rank(by: int) -> Make:
    """Slices of another rank."""

    def make(right: Any) -> Any:
        return lambda x, dim, parts, ranks, index: right(x, dim, parts, ranks, (index + by) % ranks)

    return make


FAULTS = [
    # conversions and their transposes
    Fault(emit_conversion, "emit_conversion_backward", "forgets to add up the ranks' terms", _sums_lost),
    Fault(emit_conversion, "emit_conversion_backward", "the value's types instead of the gradient's",
          _transposed_wrongly(lambda a, b: (I if a is R else a, b))),
    Fault(emit_conversion, "emit_conversion_backward", "a partial value for a replicated one",
          _transposed_wrongly(lambda a, b: (a, R if b is P else b))),
    Fault(emit_conversion, "emit_conversion_backward", "along another dim",
          _transposed_wrongly(lambda a, b: (_other_dim(a), _other_dim(b)))),
    Fault(emit_conversion, "loss_seed", "twice the loss", lambda right: lambda builder, loss, precision: builder.call(
        aten.mul.Scalar, right(builder, loss, precision), 2.0)),
    Fault(emit_conversion, "parameter_conversions", "no conversion is a parameter's", lambda right: lambda local: {}),
    Fault(sharding, "gradient", "a replicated value's is replicated", _answer({R: I})),
    Fault(sharding, "gradient", "a partial value's is partial", _answer({P: P})),
    Fault(sharding, "gradient", "an invariant value's is partial", _answer({I: P})),
    Fault(comm_ops, "lower_conversion", "nothing is added up", _instead(comm_ops.all_reduce, None)),
    Fault(comm_ops, "lower_conversion", "a share instead of a sum", _instead(comm_ops.all_reduce, comm_ops.share)),
    Fault(comm_ops, "lower_conversion", "a slice instead of a sum of slices",
          _instead(comm_ops.reduce_scatter, comm_ops.shard_slice)),
    Fault(comm_ops, "lower_conversion", "padding instead of a gather",
          _instead(comm_ops.all_gather, comm_ops.shard_pad)),
    Fault(comm_ops, "lower_conversion", "the value itself instead of a share", _instead(comm_ops.share, None)),
    Fault(comm_ops, "lower_conversion", "parts are lost",
          _lowered(lambda a, b, made: (made[0], tuple(1 if i % 2 else n for i, n in enumerate(made[1]))))),
    Fault(comm_ops, "lower_conversion", "all-to-all in the other direction",
          _instead(comm_ops.all_to_all, comm_ops.all_to_all, lambda d: (*d[2:], *d[:2]))),
    # strategies and rules
    Fault(rule_book, "strategies", "a sum that ranks hold terms of is whole",
          _strategies(lambda s: _kinds(s, P, R, "outputs"))),
    Fault(rule_book, "strategies", "a sum that ranks hold terms of is invariant",
          _strategies(lambda s: _kinds(s, P, I, "outputs"))),
    Fault(rule_book, "strategies", "what lacks the factor is invariant",
          _strategies(lambda s: _kinds(s, R, I, "inputs"))),
    Fault(rule_book, "strategies", "slices of another dim",
          _strategies(lambda s: replace(s, outputs=tuple(map(_other_dim, s.outputs))) if s.splits else s)),
    Fault(rule_book, "leaf_strategies", "parts are lost", _strategies(
        lambda s: replace(s, outputs=tuple(Shard(k.dim) if isinstance(k, Shard) else k for k in s.outputs)))),
    Fault(rule_book, "leaf_strategies", "trained weights are invariant",
          _strategies(lambda s: replace(s, outputs=tuple(I if k is R else k for k in s.outputs)))),
    Fault(rule_book, "refine", "nothing is gone", _no_cut),
    Fault(rule_book, "flows", "no gradient flows", _of_result(lambda r: tuple([False] * len(x) for x in r))),
    Fault(rule_notation.Factors, "offset", "the factors outside are not counted",
          _of_result(lambda found: found and (found[0], 1))),
    # experts
    Fault(expert_axes, "hops", "rows stay", _of_result(lambda found: [])),
    Fault(expert_axes, "hops", "another number of experts before", _of_result(lambda f: [(a, n * 2) for a, n in f])),
    Fault(expert_axes, "hops", "in the other order", _of_result(lambda found: found[::-1])),
    # derivatives of operators
    Fault(vector_jacobian.VectorJacobian, "_linear", "twice the weight's gradient", _linear(_scaled(1, 2.0))),
    Fault(vector_jacobian.VectorJacobian, "_linear", "half the bias' gradient", _linear(_scaled(2, 0.5))),
    Fault(vector_jacobian.VectorJacobian, "_linear", "the negative gradient", _linear(_scaled(0, -1.0))),
    Fault(vector_jacobian.VectorJacobian, "_grouped_linear", "twice the rows' gradient",
          _linear(_scaled(0, 2.0))),
    Fault(vector_jacobian.VectorJacobian, "_inline", "one operand gets the other's gradient", _dropped),
    Fault(vector_jacobian.VectorJacobian, "_inline", "twice the gradient of norms", _doubled),
    # generated code and state
    Fault(spelling, "SPELLING", "add is sub", _spelled(aten.add.Tensor, torch.sub)),
    Fault(spelling, "SPELLING", "gelu's tanh is a sigmoid", _spelled(aten.tanh.default, torch.sigmoid)),
    Fault(spelling, "SPELLING", "mul is div", _spelled(aten.mul.Tensor, torch.div)),
    Fault(spelling, "SPELLING", "sum is mean", _spelled(aten.sum.dim_IntList, torch.mean)),
    Fault(generate_ranks, "dtypes_of_step", "gradients are added up in bfloat16",
          _of_result(lambda found: (*found[:2], torch.bfloat16))),
    Fault(generate_ranks, "during_step", "slices are read as they are stored",
          _of_result(lambda found: (found[1], found[0]))),
    Fault(batch_factors, "batch_dependent", "nothing is", _of_result(lambda found: frozenset())),
    # shapes and slices
    Fault(sharding, "local_shape", "axes divide nothing", lambda right: lambda shape, kinds, ranks: tuple(shape)),
    Fault(sharding, "shard_shape", "another dim is divided",
          lambda right: lambda shape, kind, ranks: right(shape, _other_dim(kind) if len(shape) > 1 else kind, ranks)),
    Fault(sharding, "conversion_path", "inner slices stay where they are", lambda right: lambda a, b, same: [
        (i, kind) for i, kind in enumerate(b) if a[i] != kind]),
    Fault(slices, "slice_of_rank", "another rank's slice", _rank(1)),
    Fault(slices, "join", "parts are lost", lambda right: lambda shards, dim, parts: right(shards, dim, 1)),
    Fault(slices, "join", "slices in the other order", lambda right: lambda shards, dim, parts: right(
        list(shards)[::-1], dim, parts)),
    Fault(slices, "stack", "parts are lost", lambda right: lambda x, dim, parts, ranks: right(x, dim, 1, ranks)),
    Fault(slices, "unstack", "parts are lost", lambda right: lambda x, dim, parts: right(x, dim, 1)),
    Fault(slices, "pad", "not padded with zeros", lambda right: lambda x, dim, parts, ranks, index: slices.join(
        [x] * ranks, dim, parts)),
    # what a rule in notation says; that it is true of the operator is shown by tests/test_sharding_rules.py alone
    Fault(rule_notation.Notation, "fit", "a bias is added by every rank", _fitted(additive=frozenset())),
    Fault(rule_notation.Notation, "fit", "what is whole may be split", _fitted(whole=frozenset())),
    Fault(rule_notation.Notation, "fit", "what is not linear is", _fitted(linear=((0,),))),
    Fault(rule_notation.Notation, "fit", "nothing is linear", _fitted(linear=())),
    Fault(rule_notation.Notation, "_names", "leading dims count from the left", _from_the_left),
]  # fmt: skip
OF_RULES = [fault for fault in FAULTS if fault.home is rule_notation.Notation]
