"""Every legal way to run one operator on one axis.

On an axis, an operator does exactly one of: split a factor (or several at once, if it exchanges what ranks lack); run
replicated; pass a partial sum through (where it is linear). Axes nest: the next axis sees what this one leaves of a
factor.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from ..compat.torch import OpOverload
from ..core.annotations import facts, is_float, is_getitem, leaf, needs_grad, shape, tensor_inputs, values
from ..core.errors import CompileError
from ..core.sharding import AxisType, I, P, R, S, Shard, forward_type, gradient
from ..ir.program import Strategy
from ..ops.catalog import op_spec
from ..ops.functional_forms import name_for_users
from ..ops.rules.node_factors import argument, opaque
from ..ops.rules.notation import Dims, Factors, Rule, rule

aten = torch.ops.aten
# raise for some values; norms and cross products do not
_RAISING_OPS = re.compile(
    "linalg_(?!vector_norm|cross)|cholesky|lu_|ormqr|geqrf|ctc_loss|binary_cross_entropy|triangular"
)
_NORM_OPS = frozenset({aten.layer_norm.default, aten.group_norm.default, aten.instance_norm.default})
_INTEGER_DIVISION_OPS = frozenset(
    {aten.floor_divide.default, aten.remainder.Tensor, aten.fmod.Tensor, aten.div.Tensor_mode, aten.gcd.default}
)


class MissingRule(CompileError):
    """QN202: an operator has no rule.

    Attributes:
        row_rule: the rule that it has if it computes each row on its own, rows being dim 0 of its first result and of
            all tensors that are as long there; None if its first result has no dims.
    """

    def __init__(self, node: fx.Node) -> None:
        super().__init__("QN202", f"{name_for_users(node.target)} has no sharding rule", where=facts(node).where)
        self.row_rule = _row_rule(node)


@dataclass(frozen=True)
class RowRule:
    """A rule in notation; its text is how a user writes it."""

    target: object
    text: str
    whole: str

    @property
    def rule(self) -> Rule:
        return rule(self.target, self.text, whole=self.whole)

    def __str__(self) -> str:
        return str(self.rule)


def _row_rule(node: fx.Node) -> RowRule | None:
    results = [tuple(x.shape) for x in values(node) if x is not None]
    shapes = [*(shape(x) for x in tensor_inputs(node)), *results]
    rows = results[0][:1] if results else ()
    if not rows or not isinstance(node.target, OpOverload):
        return None
    whole: list[str] = []

    def tensor_text(number: int, sizes: tuple[int, ...]) -> str:
        names = ["b" if d == 0 and sizes[:1] == rows else f"t{number}d{d}" for d in range(len(sizes))]
        whole.extend(name for name in names if name != "b")
        return " ".join(names)

    sides = [tensor_text(i, sizes) for i, sizes in enumerate(shapes)]
    count = len(tensor_inputs(node))
    text = f"{', '.join(sides[:count])} -> {', '.join(sides[count:])}"
    return RowRule(node.target, text, " ".join(whole))


@dataclass(frozen=True)
class RuleBook:
    """The rules, and the factors that they give operators.

    Attributes:
        rules: by operator.
        unknown: ``"replicate"`` runs operators without a rule unsplit; ``"error"`` refuses them.
    """

    rules: Mapping[object, Rule]
    unknown: str = "error"

    def factors(self, graph: fx.Graph) -> dict[fx.Node, Factors]:
        """Return the factors of every operator; operators of the same shapes share theirs.

        Raises:
            CompileError: QN202 for an operator that has no rule.
        """
        factors: dict[fx.Node, Factors] = {}
        by_key: dict[Hashable, Factors] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                factors[node] = leaf_factors(node)
            elif node.op == "call_function" and not is_getitem(node):
                key = self._notation_key(node)
                factors[node] = by_key.get(key) or self.factors_of(node)
                if key is not None:
                    by_key[key] = factors[node]
        return factors

    def _notation_key(self, node: fx.Node) -> Hashable | None:
        """Return all that a rule in notation reads of an operator; None for rules that may read more."""
        op_rule = self.rules.get(node.target)
        if op_rule is None or not op_rule.text:
            return None
        operands = (x for source in tensor_inputs(node) for x in values(source))
        return node.target, tuple(tuple(x.shape) for x in operands), tuple(tuple(x.shape) for x in values(node))

    def factors_of(self, node: fx.Node) -> Factors:
        """Return the factors of one operator.

        Raises:
            CompileError: QN202 if it has no rule, or its rule does not fit.
        """
        op_rule = self.rules.get(node.target)
        if op_rule is None:
            if self.unknown == "replicate":
                return opaque(node)
            raise MissingRule(node)
        try:
            return op_rule.factors(node)
        except (ValueError, IndexError, TypeError, AssertionError) as error:
            raise CompileError(
                "QN202",
                f"the rule of {name_for_users(node.target)} does not fit here: {error}",
                where=facts(node).where,
            ) from error


def leaf_factors(node: fx.Node) -> Factors:
    """Return one factor for each dim of a leaf."""
    sizes = {f"d{i}": size for i, size in enumerate(values(node)[0].shape)}
    return Factors((), (tuple((name,) for name in sizes),), sizes)


def split_factor(factors: Factors, name: str, cut: int, ranks: int, unit: int = 1) -> Factors:
    """Return ``factors`` as the next axis sees them after ``ranks`` split factor ``name`` inside ``cut``.

    Ranks take whole runs of ``unit``.
    """
    outer, inner = f"{name}o", f"{name}i"
    sizes = dict(factors.sizes)
    size = sizes.pop(name)
    padded = Shard(0, cut, unit).padded(size, ranks)
    has_padding = padded != size
    if cut > 1:
        sizes[outer] = cut
    sizes[inner] = padded // cut // ranks
    new = (outer, inner) if cut > 1 else (inner,)

    def replace_name(dims: Dims) -> Dims:
        return tuple(tuple(g for f in dim for g in (new if f == name else (f,))) for dim in dims)

    def replace_in(names: frozenset[str]) -> frozenset[str]:
        return names - {name} | (set(new) if name in names else set())

    return replace(
        factors,
        inputs=tuple(replace_name(dims) for dims in factors.inputs),
        outputs=tuple(replace_name(dims) for dims in factors.outputs),
        sizes=sizes,
        whole=replace_in(factors.whole),
        contiguous=replace_in(factors.contiguous),
        even=replace_in(factors.even) | ({inner} if name in factors.contiguous else set()),
        settled=replace_in(factors.settled),
        padded=replace_in(factors.padded) | ({inner} if has_padding else set()),
        joint=_joint_after_split(factors, name, new, has_padding),
    )


def _joint_after_split(
    factors: Factors, name: str, new: tuple[str, ...], has_padding: bool
) -> frozenset[tuple[str, str]]:
    """Return the pairs of factors that may be split at once after ``name`` became the factors ``new``."""
    pairs = set[tuple[str, str]]()
    for first, second in factors.joint:
        lost = second in factors.whole or (has_padding and name in factors.contiguous)
        if name in (first, second) and lost:
            continue
        pairs |= set(itertools.product(new if first == name else (first,), new if second == name else (second,)))
    return frozenset(pairs)


def refine(factors: Factors, strategy: Strategy, ranks: int) -> Factors:
    """Return what is left of ``factors`` for the next axis when this one runs ``strategy``."""
    if not strategy.splits:
        return factors
    (first, unit), *joined = strategy.units
    split_once = [name for other, _ in joined if other in factors.whole for name in (first, other)]
    for other, runs in joined:  # an axis splits the outermost part of these
        factors = split_factor(factors, other, 1, ranks, runs or 1)
    factors = split_factor(factors, first, strategy.factor[1], ranks, unit or 1)
    if not split_once:
        return factors
    return replace(factors, whole=factors.whole | {f"{name}i" for name in split_once})


def factor_splits(
    factors: Factors, name: str, cuts: Mapping[str, Iterable[int]], ranks: int
) -> Iterator[tuple[int, int]]:
    """Yield how ``ranks`` may split a factor: inside which cut, and in which units (0 where it divides evenly).

    Even splits come first. A unit is what lies inside another cut (a head of a few features), or one index.
    """
    size = factors.sizes[name]
    allowed_cuts = sorted({1, *(() if name in factors.contiguous else cuts.get(name, ()))})
    for cut in allowed_cuts:
        if size % (cut * ranks) == 0:
            yield cut, 0
    if name in factors.even:
        return
    for cut in allowed_cuts:
        for inner_cut in [*allowed_cuts, size]:
            if inner_cut > cut and inner_cut % cut == 0 and (inner_cut // cut) % ranks:
                yield cut, size // inner_cut


def _joint_splits(
    factors: Factors, first: str, second: str, cuts: Mapping[str, Iterable[int]], ranks: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield how ``ranks`` may split two factors at once, of the second its outermost part.

    If the second is whole on its own, both are split evenly.
    """
    must_be_even = second in factors.whole
    for first_split in factor_splits(factors, first, {} if must_be_even else cuts, ranks):
        for second_split in factor_splits(factors, second, {}, ranks):
            if not must_be_even or not (first_split[1] or second_split[1]):
                yield first_split, second_split


def may_pad(node: fx.Node) -> bool:
    """Return whether an operator may read padding.

    Not if padding would be integers by which it divides, rows that it counts or by whose variance it divides, or
    values for which it raises (a singular matrix).
    """
    name, op = str(node.target).removeprefix("aten.").lstrip("_"), node.target
    if _RAISING_OPS.match(name) or op_spec(node).unpadded:
        return False
    if op in _NORM_OPS and not argument(node, "eps"):
        return False
    return op not in _INTEGER_DIVISION_OPS or any(map(is_float, values(node)))


def fraction_per_rank(factors: Factors, name: str, cut: int, unit: int, ranks: int) -> float:
    """Return the part of a factor that each rank holds: an equal share, or a full chunk."""
    if not unit:
        return 1 / ranks
    size = factors.sizes[name]
    return Shard(0, cut, unit).padded(size, ranks) / ranks / size


def _label(name: str, cut: int, unit: int) -> str:
    return f"split {name} {cut}" + (f" {unit}" if unit else "")


def shard_of(factors: Factors, dims: Dims, name: str, cut: int, unit: int) -> Shard | None:
    """Return the type of a tensor of which ranks split factor ``name``; None where ``dims`` lacks it."""
    offset = factors.offset(dims, name)
    if offset is None:
        return None
    dim, outside = offset
    inner_size = math.prod(factors.sizes[f] for f in dims[dim][dims[dim].index(name) + 1 :])
    return S(dim, outside * cut, unit * inner_size) if unit else S(dim, outside * cut)


def flows(node: fx.Node) -> tuple[list[bool], list[bool]]:
    """Return for each tensor input and output of a node whether gradients flow along it."""
    differentiated = needs_grad(node)
    ins = [differentiated and facts(n).needs_grad for n in tensor_inputs(node)]
    outs = [differentiated and is_float(v) for v in values(node)]
    return ins, outs


def strategies(node: fx.Node, factors: Factors, cuts: Mapping[str, Iterable[int]], ranks: int) -> tuple[Strategy, ...]:
    """Return all strategies of an operator on an axis of ``ranks``. The first is always "replicated"."""
    operator = _Operator(node, factors, ranks)
    options = [*operator.replicated(), *operator.split_one(cuts), *operator.split_two(cuts), *operator.linear()]
    unique: dict[tuple[object, object], Strategy] = {}
    for option in options:
        unique.setdefault((option.inputs, option.outputs), option)
    return tuple(unique.values())


class _Operator:
    """The ways to run one operator on an axis."""

    def __init__(self, node: fx.Node, factors: Factors, ranks: int) -> None:
        self.node, self.factors, self.ranks = node, factors, ranks
        self.grads_in, self.grads_out = flows(node)

    def replicated(self) -> Iterator[Strategy]:
        count_in, count_out = len(self.grads_in), len(self.grads_out)
        yield self._strategy("replicated", [I] * count_in, [I] * count_out)
        if any(self.grads_out) and not self.factors.whole_gradients:
            yield self._strategy("replicated R", [R] * count_in, [R] * count_out)
        elif self.factors.dual:  # a gradient of which each rank has a term
            yield self._strategy("terms", [R] * count_in, [R] * count_out)

    def split_one(self, cuts: Mapping[str, Iterable[int]]) -> Iterator[Strategy]:
        """Yield the strategies that split one factor."""
        factors = self.factors
        for name in factors.names:
            if name in factors.whole or name in factors.padded & factors.contiguous:
                continue
            for cut, unit in factor_splits(factors, name, cuts, self.ranks):
                if not unit or may_pad(self.node):
                    yield self._split_factor(name, cut, unit)

    def _split_factor(self, name: str, cut: int, unit: int) -> Strategy:
        factors = self.factors
        missing = I if name in factors.settled else P
        outs: list[AxisType] = [shard_of(factors, dims, name, cut, unit) or missing for dims in factors.outputs]
        ins: list[AxisType] = []
        for position, dims in enumerate(factors.inputs):
            unsplit = P if position in factors.additive and P in outs else R
            ins.append(shard_of(factors, dims, name, cut, unit) or unsplit)
        return self._strategy(
            _label(name, cut, unit), ins, outs, fraction_per_rank(factors, name, cut, unit, self.ranks)
        )

    def split_two(self, cuts: Mapping[str, Iterable[int]]) -> Iterator[Strategy]:
        """Yield the strategies that split two factors at once."""
        for first, second in sorted(self.factors.joint):
            for (cut, unit), (_, second_unit) in _joint_splits(self.factors, first, second, cuts, self.ranks):
                yield self._split_pair((first, second), cut, (unit, second_unit))

    def _split_pair(self, names: tuple[str, str], cut: int, units: tuple[int, int]) -> Strategy:
        factors, (first, second) = self.factors, names

        def shard(dims: Dims) -> Shard | None:
            return shard_of(factors, dims, first, cut, units[0]) or shard_of(factors, dims, second, 1, units[1])

        ins: list[AxisType] = [shard(dims) or R for dims in factors.inputs]
        outs: list[AxisType] = [shard(dims) or P for dims in factors.outputs]
        first_part = fraction_per_rank(factors, first, cut, units[0], self.ranks)
        second_part = fraction_per_rank(factors, second, 1, units[1], self.ranks)
        label = f"split {first}+{second} {cut}" + (f" {units[0]}+{units[1]}" if any(units) else "")
        return self._strategy(label, ins, outs, max(first_part, second_part))

    def linear(self) -> Iterator[Strategy]:
        """Yield the strategies that read and write terms of sums."""
        for group in self.factors.linear:
            ins: list[AxisType] = [P if i in group else R for i in range(len(self.grads_in))]
            yield self._strategy(f"linear {group}", ins, [P] * len(self.grads_out))

    def _strategy(self, label: str, ins: list[AxisType], outs: list[AxisType], part: float = 1.0) -> Strategy:
        types = [*ins, *outs]
        for position, grad_position in self.factors.dual:
            types[grad_position] = gradient(types[position])
        grads = [*self.grads_in, *self.grads_out]
        types = [kind if grad else forward_type(kind) for kind, grad in zip(types, grads, strict=True)]
        return Strategy(tuple(types[: len(ins)]), tuple(types[len(ins) :]), label, part)


def leaf_strategies(
    node: fx.Node, factors: Factors, cuts: Mapping[str, Iterable[int]], ranks: int
) -> tuple[Strategy, ...]:
    """Return every type that a leaf may have: replicated or a shard; R where it has a gradient.

    Where a size does not divide, only shards with all padding at the end, that is those of one part, since DTensors
    have no others. Nor do these have a dim that ends in padding and is split again, as rows of the batch are.
    """
    info = leaf(node)
    assert info is not None
    options = [Strategy((), (I,), "replicated")]
    if info.trainable:
        options.append(Strategy((), (R,), "replicated R"))
    for name in factors.names:
        dim = next(names for names in factors.outputs[0] if name in names)
        if factors.sizes[name] < 2 or (info.kind != "input" and factors.padded.intersection(dim)):
            continue
        for cut, unit in factor_splits(factors, name, cuts, ranks):
            kind = shard_of(factors, factors.outputs[0], name, cut, unit)
            assert kind is not None
            if not unit or kind.parts == 1:
                part = fraction_per_rank(factors, name, cut, unit, ranks)
                options.append(Strategy((), (kind,), _label(name, cut, unit), part))
    return tuple(options)
