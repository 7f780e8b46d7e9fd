"""Check that a rule allows a strategy: a direct reading of the notation, from types to factors.

The passes that choose shardings go from factors to types: they enumerate the strategies that a rule allows. Here each
type says which factor it splits, and the operands must agree. What an axis splits off a factor is gone for the next
axis, in the same order everywhere, so only the local size of each factor matters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from torch import fx

from ..core.annotations import facts, leaf, needs_grad, shape, tensor_inputs, values
from ..core.sharding import AxisType, I, P, R, S, Shard
from ..ir.program import Strategy
from ..ops.catalog import op_spec
from ..ops.rules.notation import Dims, Factors
from .tables import bare


class Cut(NamedTuple):
    """The split of a factor among ranks.

    Attributes:
        runs: the number of runs of which each rank takes its part.
        unit: where runs do not divide, the number of indices that stay together, else 0.
    """

    runs: int
    unit: int


class Rules(Protocol):
    """A source of the factors that the dims of operators have."""

    def factors(self, graph: fx.Graph) -> Mapping[fx.Node, Factors]: ...


@dataclass
class Reading:
    """A node, and what the axes so far left of its factors. Axes are applied from the outermost inwards.

    Attributes:
        node: the operator.
        rule: its factors.
        sizes: the local size of each factor.
        whole: factors that may not be split.
        touched: factors that an axis has split.
        padded: factors of which some ranks have padding.
        travels: whether an axis so far brings rows and weights together.
    """

    node: fx.Node
    rule: Factors
    sizes: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    touched: set[str] = field(default_factory=set)
    padded: set[str] = field(default_factory=set)
    travels: bool = False

    def __post_init__(self) -> None:
        self.sizes, self.whole = dict(self.rule.sizes), set(self.rule.whole)

    def apply_strategy(self, strategy: Strategy, ranks: int) -> tuple[str, frozenset[str]]:
        """Return what is wrong with ``strategy`` over ``ranks`` (or ""), and the factors that it splits."""
        if strategy.inside is not None:
            if error := self._check_slices_of_rows(strategy, ranks):
                return error, frozenset()
            rows, result = strategy.inside
            strategy = replace(strategy, inputs=(rows, *strategy.inputs[1:]), outputs=(result,), inside=None)
        if len(strategy.inputs) != len(self.rule.inputs) or len(strategy.outputs) != len(self.rule.outputs):
            return "it has other operands", frozenset()
        cuts: dict[str, Cut] = {}
        if error := self._find_cuts(strategy, ranks, cuts):
            return error, frozenset()
        if leaf(self.node) is not None:
            error = self._check_leaf(strategy)
        else:
            error = self._check_types(strategy, cuts) or self._check_joint(cuts)
        self.travels |= len(cuts) > 1
        return error or self._split(cuts, ranks), frozenset(cuts)

    def _check_slices_of_rows(self, strategy: Strategy, ranks: int) -> str:
        """Check an axis over which rows travel to their experts as slices of the features.

        Rows that are the same on all ranks of this axis may be sent as slices, which are gathered where they arrive; of
        terms of results that return, each rank may get a slice of the sum.
        """
        assert strategy.inside is not None
        if not op_spec(self.node).by_expert or not self.travels:
            return "its rows do not travel"
        if isinstance(weights := strategy.inputs[2], Shard) and weights.dim == 0:
            return "each rank orders rows by experts of its own"
        rows = tensor_inputs(self.node)[0]
        for outside, inside, whole, x in (
            (strategy.inputs[0], strategy.inside[0], (I, R), rows),
            (strategy.outputs[0], strategy.inside[1], (P,), self.node),
        ):
            sliced = outside == S(1) and inside in whole and not shape(x)[1] % ranks
            if outside != inside and not sliced:
                return f"{inside} does not travel as {outside}"
        return ""

    def _find_cuts(self, strategy: Strategy, ranks: int, cuts: dict[str, Cut]) -> str:
        """Add the factors that ``strategy`` splits to ``cuts``."""
        kinds = (*strategy.inputs, *strategy.outputs)
        for kind, dims in zip(kinds, (*self.rule.inputs, *self.rule.outputs), strict=True):
            if not isinstance(kind, Shard):
                continue
            name, cut = self._factor_of(dims[kind.dim] if kind.dim < len(dims) else (), kind, ranks)
            if cut is None:
                return f"{kind} is no part of one factor"
            if cuts.setdefault(name, cut) != cut:
                return f"{name} is split in two ways"
        return ""

    def _factor_of(self, names: tuple[str, ...], kind: Shard, ranks: int) -> tuple[str, Cut | None]:
        """Return the factor of a dim that ``kind`` splits, and how.

        Factors outside of it repeat its runs, and those inside of it belong to each of its indices.
        """
        outside = 1
        for position, name in enumerate(names):
            size = self.sizes[name]
            inside = math.prod(self.sizes[inner] for inner in names[position + 1 :])
            runs = kind.parts // outside if kind.parts % outside == 0 else 0
            unit = kind.unit // inside if kind.unit % inside == 0 else 0
            if runs and (cut := _cut(size, runs, unit, ranks, even=kind.unit == 1)):
                return name, cut
            outside *= size
        return "", None

    def _check_leaf(self, strategy: Strategy) -> str:
        """Check that a leaf is not partial, and replicated only if a gradient is wanted."""
        tensor, (kind,) = leaf(self.node), strategy.outputs
        assert tensor is not None
        return f"a leaf is {kind}" if kind is P or (kind is R and not tensor.trainable) else ""

    @property
    def _stored(self) -> bool:
        tensor = leaf(self.node)
        return tensor is not None and tensor.kind != "input"

    def _check_types(self, strategy: Strategy, cuts: Mapping[str, Cut]) -> str:
        if op_spec(self.node).user_derivative in ("tangent", "declaration"):
            return self._check_derivative(strategy)
        differentiable = needs_grad(self.node)
        input_grads = [differentiable and facts(n).needs_grad for n in tensor_inputs(self.node)]
        output_grads = [differentiable and (v.is_floating_point() or v.is_complex()) for v in values(self.node)]
        if not cuts:
            return self._check_unsplit(strategy, input_grads, output_grads)
        outputs = [self._type_of_output(dims, cuts) for dims in self.rule.outputs]
        terms = self.rule.additive if P in outputs and len(cuts) == 1 else ()
        inputs = [self._type_of_input(position, cuts, terms) for position in range(len(self.rule.inputs))]
        wrong = _first_difference(strategy.inputs, inputs, input_grads, "takes")
        wrong = wrong or _first_difference(strategy.outputs, outputs, output_grads, "makes")
        return f"with {' and '.join(cuts)} split it {wrong}" if wrong else ""

    def _check_derivative(self, strategy: Strategy) -> str:
        """Check a derivative that the user wrote: the type of a gradient follows from that of its value."""
        if op_spec(self.node).user_derivative == "tangent":
            (source,), (kind, grad), flows = strategy.inputs, strategy.outputs, True
            if source is not bare(kind, False) and source != kind:
                return f"it makes {kind} of {source}"
        else:
            (kind, grad), (result,) = strategy.inputs, strategy.outputs
            flows = needs_grad(tensor_inputs(self.node)[0])
            if result is not I:
                return f"its result is {result}"
        expected = kind if isinstance(kind, Shard) else {I: I, R: P, P: I}[kind]
        return "" if grad == expected or not flows else f"the gradient of {kind} is {grad}"

    def _type_of_output(self, dims: Dims, cuts: Mapping[str, Cut]) -> AxisType | None:
        """Return None for a slice. A sum over what is split is a term, or settled by the operator itself."""
        if _has(dims, cuts):
            return None
        return I if cuts.keys() <= self.rule.settled else P

    def _type_of_input(self, position: int, cuts: Mapping[str, Cut], terms: Collection[int]) -> AxisType | None:
        """Return None for a slice. Only one rank adds a bias (an input in ``terms``) to a sum."""
        if _has(self.rule.inputs[position], cuts):
            return None
        return P if position in terms else R

    def _check_unsplit(self, strategy: Strategy, input_grads: list[bool], output_grads: list[bool]) -> str:
        """Check that all ranks do the same, or that the operator is linear in its terms and the others replicated."""
        options: list[tuple[list[AxisType], AxisType]] = [([I] * len(input_grads), I)]
        if any(output_grads) and not self.rule.whole_gradients:
            options.append(([R] * len(input_grads), R))
        for group in self.rule.linear:
            options.append(([P if i in group else R for i in range(len(input_grads))], P))
        for input_kinds, output_kind in options:
            inputs = tuple(bare(kind, grad) for kind, grad in zip(input_kinds, input_grads, strict=True))
            outputs = tuple(bare(output_kind, grad) for grad in output_grads)
            if (inputs, outputs) == (strategy.inputs, strategy.outputs):
                return ""
        return "it is neither whole nor linear in its terms"

    def _check_joint(self, cuts: Mapping[str, Cut]) -> str:
        """Check that two factors are split at once only where the operator itself exchanges what belongs together."""
        if len(cuts) < 2:
            return ""
        pairs = [pair for pair in self.rule.joint if set(pair) == cuts.keys()]
        if not pairs:
            return f"{', '.join(cuts)} do not belong together"
        first, second = pairs[0]
        once = second in self.rule.whole
        if cuts[second].runs != 1 or (once and (cuts[first].runs != 1 or self.touched & cuts.keys())):
            return f"{first} and {second} can be split together once, from the outside"
        if once and any(cut.unit for cut in cuts.values()):
            return f"{first} or {second} does not divide"
        if self._in_one_tensor(first, second):
            return f"an operand has {first} and {second}"
        if once:
            self.whole |= {first, second}
        return ""

    def _in_one_tensor(self, first: str, second: str) -> bool:
        tensors = (*self.rule.inputs, *self.rule.outputs)
        return any(_has(dims, [first]) and _has(dims, [second]) for dims in tensors)

    def _split(self, cuts: Mapping[str, Cut], ranks: int) -> str:
        """Leave the next axis what remains of each factor."""
        for name, cut in cuts.items():
            if error := self._error_of_cut(name, cut, alone=len(cuts) == 1):
                return error
            if cut.unit:
                indices = cut.runs * cut.unit
                self.sizes[name] = indices * -(-self.sizes[name] // (indices * ranks))
                self.padded.add(name)
            else:
                self.sizes[name] //= ranks
            self.touched.add(name)
        return ""

    def _error_of_cut(self, name: str, cut: Cut, *, alone: bool) -> str:
        contiguous = name in self.rule.contiguous
        if alone and name in self.whole:
            return f"{name} is whole"
        if contiguous and cut.runs != 1:
            return f"a rank has no run of {name}"
        if contiguous and (name in self.padded or (cut.unit and name in self.touched)):
            return f"ranks have runs of {name} of other lengths"
        if name in self.padded and self._stored:
            return f"{name} is padding on some ranks already"
        return ""


def _cut(size: int, runs: int, unit: int, ranks: int, *, even: bool) -> Cut | None:
    """Return how ranks share a factor of ``size`` of which each run is split; None if they cannot."""
    if even and size % (runs * ranks) == 0:
        return Cut(runs, 0)
    if unit and size % (runs * unit) == 0:
        units = size // (runs * unit)
        if units > 1 and units % ranks:
            return Cut(runs, unit)
    return None


def _first_difference(
    actual: Iterable[AxisType], expected: Iterable[AxisType | None], grads: Iterable[bool], verb: str
) -> str:
    """Return the first type that is not as expected (None: any slice)."""
    for position, (kind, wanted, grad) in enumerate(zip(actual, expected, grads, strict=True)):
        fits = isinstance(kind, Shard) if wanted is None else kind == bare(wanted, grad)
        if not fits:
            return f"{verb} no {kind} at {position}"
    return ""


def _has(dims: Dims, names: Iterable[str]) -> bool:
    return any(name in dim for dim in dims for name in names)
