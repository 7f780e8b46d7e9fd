"""Every legal way to run one operator on one axis.

On an axis, an operator does exactly one of: split a factor (or several at once, if it exchanges what ranks lack); run
replicated; pass a partial sum through (where it is linear). Axes nest: what an axis splits off a factor is gone for the
next one.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from ...compat.torch import OpOverload
from ...core.annotations import facts, is_float, is_getitem, leaf, needs_grad, origin, shape, tensor_inputs, values
from ...core.errors import CompileError
from ...core.sharding import AxisType, I, P, R, S, Shard, gradient, plain
from ...ir.program import Strategy
from ...ops.attention.paged import paged_attention
from ...ops.experts.scaled_groups import scaled_expert_linear
from ...ops.filled_rows import fill_rows
from ...ops.rules.node_factors import argument, opaque
from ...ops.rules.notation import Dims, Factors, Rule, rule
from ...ops.scaled_products import scaled_matmul

aten = torch.ops.aten
_EXACT = frozenset(
    {
        paged_attention, aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, fill_rows, scaled_matmul,
        scaled_expert_linear, aten.histc.default,
    }
)  # fmt: skip
# raise for some values; norms and cross products do not
_REFUSING = re.compile("linalg_(?!vector_norm|cross)|cholesky|lu_|ormqr|geqrf|ctc_loss|binary_cross_entropy|triangular")
_NORMS = frozenset({aten.layer_norm.default, aten.group_norm.default, aten.instance_norm.default})
_DIVISIONS = frozenset(
    {aten.floor_divide.default, aten.remainder.Tensor, aten.fmod.Tensor, aten.div.Tensor_mode, aten.gcd.default}
)

Value = tuple[fx.Node, int]  # an operator and which of its outputs
Cut = tuple[int, int]  # dim and k: a boundary inside a dim at which S(dim, k) may start
Place = tuple[str, int, int]  # a factor, its dim, and the product of the factors outside it in that dim


class MissingRule(CompileError):
    """QN202: an operator has no rule. ``row_rule``: the one that it has if it computes each row on its own, rows being
    dim 0 of its first result and of all tensors that are as long there; None if that is no dim."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__("QN202", f"{node.target} has no sharding rule", where=facts(node).where)
        self.row_rule = _row_rule(node)


@dataclass(frozen=True)
class RowRule:
    """A rule in notation, and how a user writes it."""

    target: object
    text: str
    whole: str

    @property
    def rule(self) -> Rule:
        return rule(self.target, self.text, whole=self.whole)

    def __str__(self) -> str:
        name = str(self.target).replace(".", "::", 1)
        return f'quintnet.rule("{name}", "{self.text}"' + (f', whole="{self.whole}")' if self.whole else ")")


def _row_rule(node: fx.Node) -> RowRule | None:
    made = [tuple(x.shape) for x in values(node) if x is not None]
    shapes = [*(shape(x) for x in tensor_inputs(node)), *made]
    rows = made[0][:1] if made else ()
    if not rows or not isinstance(node.target, OpOverload):
        return None
    whole: list[str] = []

    def tensor(number: int, sizes: tuple[int, ...]) -> str:
        names = ["b" if d == 0 and sizes[:1] == rows else f"t{number}d{d}" for d in range(len(sizes))]
        whole.extend(name for name in names if name != "b")
        return " ".join(names)

    sides = [tensor(i, sizes) for i, sizes in enumerate(shapes)]
    count = len(tensor_inputs(node))
    text = f"{', '.join(sides[:count])} -> {', '.join(sides[count:])}"
    return RowRule(node.target, text, " ".join(whole))


@dataclass(frozen=True)
class RuleBook:
    """Factors of every operator of a graph, and the cuts that views put inside dims.

    ``unknown="replicate"`` runs operators without a rule unsplit instead of refusing them.
    """

    rules: Mapping[object, Rule]
    unknown: str = "error"

    def factors(self, graph: fx.Graph) -> dict[fx.Node, Factors]:
        """Operators of the same shapes share theirs. Raises: CompileError QN202 for an operator that has no rule."""
        found: dict[fx.Node, Factors] = {}
        known: dict[Hashable, Factors] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                found[node] = leaf_factors(node)
            elif node.op == "call_function" and not is_getitem(node):
                key = self._fitted(node)
                found[node] = known.get(key) or self.factors_of(node)
                if key is not None:
                    known[key] = found[node]
        return found

    def _fitted(self, node: fx.Node) -> Hashable | None:
        """All that a rule in notation reads of an operator; None for a rule that may read more."""
        known = self.rules.get(node.target)
        if known is None or not known.text:
            return None
        given = (x for source in tensor_inputs(node) for x in values(source))
        return node.target, tuple(tuple(x.shape) for x in given), tuple(tuple(x.shape) for x in values(node))

    def factors_of(self, node: fx.Node) -> Factors:
        """Of one operator. Raises: CompileError QN202 if it has no rule."""
        known = self.rules.get(node.target)
        if known is None:
            if self.unknown == "replicate":
                return opaque(node)
            raise MissingRule(node)
        try:
            return known.factors(node)
        except (ValueError, IndexError, TypeError, AssertionError) as error:
            raise CompileError(
                "QN202", f"the rule of {node.target} does not fit here: {error}", where=facts(node).where
            ) from error


def leaf_factors(node: fx.Node) -> Factors:
    """One factor for each dim."""
    sizes = {f"d{i}": size for i, size in enumerate(values(node)[0].shape)}
    return Factors((), (tuple((name,) for name in sizes),), sizes)


def split_factor(factors: Factors, name: str, cut: int, ranks: int, unit: int = 1) -> Factors:
    """``factors`` as the next axis sees them after ``ranks`` took their part of factor ``name`` behind ``cut``, in
    whole runs of ``unit``."""
    outer, inner = f"{name}o", f"{name}i"
    sizes = dict(factors.sizes)
    size = sizes.pop(name)
    padded = Shard(0, cut, unit).padded(size, ranks)
    sizes |= {outer: cut, inner: padded // cut // ranks}
    new = (outer, inner) if cut > 1 else (inner,)
    if cut == 1:
        del sizes[outer]

    def swap(dims: Dims) -> Dims:
        return tuple(tuple(g for f in dim for g in (new if f == name else (f,))) for dim in dims)

    def spread(names: frozenset[str]) -> frozenset[str]:
        return names - {name} | (set(new) if name in names else set())

    return replace(
        factors,
        inputs=tuple(swap(d) for d in factors.inputs),
        outputs=tuple(swap(d) for d in factors.outputs),
        sizes=sizes,
        whole=spread(factors.whole),
        contiguous=spread(factors.contiguous),
        even=spread(factors.even) | ({inner} if name in factors.contiguous else set()),
        settled=spread(factors.settled),
        padded=spread(factors.padded) | ({inner} if padded != size else set()),
        joint=frozenset(
            pair
            for a, b in factors.joint
            if name not in (a, b) or not (b in factors.whole or (padded != size and name in factors.contiguous))
            for pair in itertools.product(new if a == name else (a,), new if b == name else (b,))
        ),
    )


def refine(factors: Factors, strategy: Strategy, ranks: int) -> Factors:
    """What is left of ``factors`` for the next axis when this one runs ``strategy``."""
    if not strategy.splits:
        return factors
    (first, unit), *second = strategy.units
    once = [one for other, _ in second if other in factors.whole for one in (first, other)]
    for other, runs in second:  # of which an axis takes the outermost part
        factors = split_factor(factors, other, 1, ranks, runs or 1)
    factors = split_factor(factors, first, strategy.factor[1], ranks, unit or 1)
    if not once:
        return factors
    return replace(factors, whole=factors.whole | {f"{one}i" for one in once})


def find_cuts(graph: fx.Graph, factors: Mapping[fx.Node, Factors]) -> dict[fx.Node, dict[str, set[int]]]:
    """Boundaries inside factors: where a neighbour views a dim as several, all the way through the graph.

    A fused QKV weight gets the cut 3 from the split behind its linear; a flattened [B*S] gets the cut B.
    """
    at: dict[Value, set[Cut]] = defaultdict(set)
    inside: dict[fx.Node, dict[str, set[int]]] = {node: defaultdict(set) for node in factors}
    places: dict[fx.Node, list[tuple[Value, list[Place]]]] = {}
    users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, spec in factors.items():
        sources = [origin(n) for n in tensor_inputs(node)]
        own = [(node, k) for k in range(len(spec.outputs))]
        places[node] = [
            (value, _places(spec, dims))
            for value, dims in zip([*sources, *own], [*spec.inputs, *spec.outputs], strict=True)
        ]
        for source, _ in sources:
            users[source].append(node)
    pending = OrderedDict.fromkeys(factors)
    while pending:
        node, _ = pending.popitem(last=False)
        spec = factors[node]
        for value, found_in in places[node]:
            for dim, k in at[value]:
                for name, place, start in found_in:
                    size = spec.sizes[name]
                    if place == dim and start < k < start * size and k % start == 0 and size % (k // start) == 0:
                        inside[node][name].add(k // start)
        touched: set[fx.Node] = set()
        for value, found_in in places[node]:
            for name, dim, start in found_in:
                blocked = name in spec.whole or name in spec.contiguous
                cuts = {1} | (set() if blocked else inside[node][name])
                for cut in cuts:
                    found = (dim, start * cut)
                    if found[1] > 1 and found not in at[value]:
                        at[value].add(found)
                        touched |= {value[0], *users[value[0]]}
        pending.update(dict.fromkeys(n for n in touched if n in factors))
        # a node's own new cuts may reach its other tensors
    return inside


def _places(spec: Factors, dims: Dims) -> list[Place]:
    found: list[Place] = []
    for dim, names in enumerate(dims):
        start = 1
        for name in names:
            found.append((name, dim, start))
            start *= spec.sizes[name]
    return found


def ways(factors: Factors, name: str, cuts: Mapping[str, Iterable[int]], ranks: int) -> Iterator[tuple[int, int]]:
    """How ``ranks`` may split a factor: behind which cut, and in units of what, which is 0 where all get as much. First
    the ways in which it divides. A unit is what is behind another cut (a head of a few features), or one index."""
    size = factors.sizes[name]
    inside = sorted({1, *(() if name in factors.contiguous else cuts.get(name, ()))})
    yield from ((cut, 0) for cut in inside if size % (cut * ranks) == 0)
    for cut in () if name in factors.even else inside:
        for many in [*inside, size]:
            if many > cut and many % cut == 0 and (many // cut) % ranks:
                yield cut, size // many


def _joint_ways(
    factors: Factors, first: str, second: str, cuts: Mapping[str, Iterable[int]], ranks: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """How ``ranks`` may split two factors at once, of the second its outermost part. One that is whole on its own is
    split evenly, and so is what goes with it."""
    together = second in factors.whole
    for one in ways(factors, first, {} if together else cuts, ranks):
        for other in ways(factors, second, {}, ranks):
            if not together or not (one[1] or other[1]):
                yield one, other


def may_pad(node: fx.Node) -> bool:
    """Return whether an operator may see what is no part of the model's tensors: not whole numbers that it divides by,
    nor rows that it counts or whose variance it divides by, nor values that it raises for (a singular matrix)."""
    name = str(node.target).removeprefix("aten.").lstrip("_")
    if _REFUSING.match(name) or node.target in _EXACT or (node.target in _NORMS and not argument(node, "eps")):
        return False
    return node.target not in _DIVISIONS or any(map(is_float, values(node)))


def part_of(factors: Factors, name: str, cut: int, unit: int, ranks: int) -> float:
    """Of a factor that ranks split, what each holds: its own share, or a full chunk."""
    if not unit:
        return 1 / ranks
    size = factors.sizes[name]
    return Shard(0, cut, unit).padded(size, ranks) / ranks / size


def _label(name: str, cut: int, unit: int) -> str:
    return f"split {name} {cut}" + (f" {unit}" if unit else "")


def shard_of(factors: Factors, dims: Dims, name: str, cut: int, unit: int) -> Shard | None:
    """The type of a tensor of which ranks split factor ``name``; None where ``dims`` lacks it."""
    found = factors.offset(dims, name)
    if found is None:
        return None
    dim, outside = found
    behind = math.prod(factors.sizes[f] for f in dims[dim][dims[dim].index(name) + 1 :])
    return S(dim, outside * cut, unit * behind) if unit else S(dim, outside * cut)


def flows(node: fx.Node) -> tuple[list[bool], list[bool]]:
    """For each tensor input and output of a node: whether gradients flow along it."""
    wants = needs_grad(node)
    ins = [wants and facts(n).needs_grad for n in tensor_inputs(node)]
    outs = [wants and is_float(v) for v in values(node)]
    return ins, outs


def strategies(node: fx.Node, factors: Factors, cuts: Mapping[str, Iterable[int]], ranks: int) -> tuple[Strategy, ...]:
    """All strategies of an operator on an axis of ``ranks``. The first is always "replicated"."""
    grads_in, grads_out = flows(node)

    def made(label: str, ins: list[AxisType], outs: list[AxisType], part: float = 1.0) -> Strategy:
        both = [*ins, *outs]
        for known, grad in factors.dual:
            both[grad] = gradient(both[known])
        ins, outs = both[: len(ins)], both[len(ins) :]
        return Strategy(
            tuple(t if g else plain(t) for t, g in zip(ins, grads_in, strict=True)),
            tuple(t if g else plain(t) for t, g in zip(outs, grads_out, strict=True)),
            label,
            part,
        )

    def place(dims: Dims, name: str, cut: int, unit: int = 0) -> Shard | None:
        return shard_of(factors, dims, name, cut, unit)

    count_in, count_out = len(grads_in), len(grads_out)
    options = [made("replicated", [I] * count_in, [I] * count_out)]
    if any(grads_out) and not factors.whole_gradients:
        options.append(made("replicated R", [R] * count_in, [R] * count_out))
    elif factors.dual:  # a gradient of which each rank has a term
        options.append(made("terms", [R] * count_in, [R] * count_out))
    for name in factors.names:
        if name in factors.whole or name in factors.padded & factors.contiguous:
            continue
        for cut, unit in ways(factors, name, cuts, ranks):
            if unit and not may_pad(node):
                continue
            missing = I if name in factors.settled else P
            outs: list[AxisType] = [place(d, name, cut, unit) or missing for d in factors.outputs]
            ins: list[AxisType] = []
            for position, dims in enumerate(factors.inputs):
                term = P if position in factors.additive and P in outs else R
                ins.append(place(dims, name, cut, unit) or term)
            options.append(made(_label(name, cut, unit), ins, outs, part_of(factors, name, cut, unit, ranks)))
    for first, second in sorted(factors.joint):
        for (cut, unit), (_, other) in _joint_ways(factors, first, second, cuts, ranks):
            ins = [place(d, first, cut, unit) or place(d, second, 1, other) or R for d in factors.inputs]
            outs = [place(d, first, cut, unit) or place(d, second, 1, other) or P for d in factors.outputs]
            part = max(part_of(factors, first, cut, unit, ranks), part_of(factors, second, 1, other, ranks))
            units = f" {unit}+{other}" if unit or other else ""
            options.append(made(f"split {first}+{second} {cut}{units}", ins, outs, part))
    for group in factors.linear:
        ins = [P if i in group else R for i in range(count_in)]
        options.append(made(f"linear {group}", ins, [P] * count_out))
    unique: dict[tuple[object, object], Strategy] = {}
    for option in options:
        unique.setdefault((option.inputs, option.outputs), option)
    return tuple(unique.values())


def leaf_strategies(
    node: fx.Node, factors: Factors, cuts: Mapping[str, Iterable[int]], ranks: int
) -> tuple[Strategy, ...]:
    """Every type that a leaf may have: replicated or a shard; R where it has a gradient. Where a size does not divide,
    the shards whose padding is at the end, which DTensors do not have: those of one part. Nor do these know a dim that
    ends in padding and is split again, as rows of the batch are."""
    found = leaf(node)
    assert found is not None
    options = [Strategy((), (I,), "replicated")]
    if found.trainable:
        options.append(Strategy((), (R,), "replicated R"))
    for name in factors.names:
        dim = next(names for names in factors.outputs[0] if name in names)
        if factors.sizes[name] < 2 or (found.kind != "input" and factors.padded.intersection(dim)):
            continue
        for cut, unit in ways(factors, name, cuts, ranks):
            kind = shard_of(factors, factors.outputs[0], name, cut, unit)
            assert kind is not None
            if not unit or kind.parts == 1:
                part = part_of(factors, name, cut, unit, ranks)
                options.append(Strategy((), (kind,), _label(name, cut, unit), part))
    return tuple(options)
