"""Whether a rule lets an operator run as it was told to: a direct reading of the notation, from types to factors.

What chooses shardings goes from factors to types: it makes every strategy that a rule allows. Here each type says
which factor it splits, and the operands must agree. What an axis splits off a factor is gone for the next one, in the
same order everywhere, so of a factor only its local size has to be known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import fx

from ...core.annotations import facts, leaf, needs_grad, shape, tensor_inputs, values
from ...core.sharding import AxisType, I, P, R, S, Shard
from ...ir.program import Strategy
from ...ops.derivatives.user_derivatives import declare_gradient, with_tangent
from ...ops.experts.scaled_groups import EXPERT_LAYERS
from ...ops.rules.notation import Dims, Factors
from .tables import bare

# How ranks share a factor: how many runs of it there are of which each takes its part, and, where these do not divide,
# of how many indices the units are that stay together (else 0).
Way = tuple[int, int]


class Rules(Protocol):
    """What says which factors the dims of operators have."""

    def factors(self, graph: fx.Graph) -> Mapping[fx.Node, Factors]: ...


@dataclass
class Reading:
    """A node and what the axes so far left of its factors. :meth:`axis` takes the axes from the outermost inwards."""

    node: fx.Node
    rule: Factors
    sizes: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    touched: set[str] = field(default_factory=set)
    padded: set[str] = field(default_factory=set)  # factors of which some ranks have padding
    travels: bool = False  # whether an axis so far brings rows and weights together

    def __post_init__(self) -> None:
        self.sizes, self.whole = dict(self.rule.sizes), set(self.rule.whole)

    def axis(self, chosen: Strategy, ranks: int) -> tuple[str, frozenset[str]]:
        """What is wrong with ``chosen`` over an axis of ``ranks`` (empty: nothing), and the factors that it splits."""
        if chosen.inside is not None:
            if why := self._slices(chosen, ranks):
                return why, frozenset()
            read, made = chosen.inside
            chosen = replace(chosen, inputs=(read, *chosen.inputs[1:]), outputs=(made,), inside=None)
        kinds = (*chosen.inputs, *chosen.outputs)
        dims = (*self.rule.inputs, *self.rule.outputs)
        if len(chosen.inputs) != len(self.rule.inputs) or len(chosen.outputs) != len(self.rule.outputs):
            return "it has other operands", frozenset()
        splits: dict[str, Way] = {}
        for kind, place in zip(kinds, dims, strict=True):
            if isinstance(kind, Shard):
                found = self._split(place, kind, ranks)
                if found is None:
                    return f"{kind} is no part of one factor", frozenset()
                if splits.setdefault(*found) != found[1]:
                    return f"{found[0]} is split in two ways", frozenset()
        if leaf(self.node) is not None:
            why = self._leaf(chosen)
        else:
            why = self._types(chosen, splits) or self._together(chosen, splits)
        self.travels |= len(splits) > 1
        return why or self._take(splits, ranks), frozenset(splits)

    def _slices(self, chosen: Strategy, ranks: int) -> str:
        """Of rows that travel to their experts and are the same on all ranks of this axis, each may send a slice of the
        features, which are gathered there; and of terms of results that return, each may get a slice of the sum."""
        assert chosen.inside is not None
        if self.node.target not in EXPERT_LAYERS or not self.travels:
            return "its rows do not travel"
        if isinstance(weights := chosen.inputs[2], Shard) and weights.dim == 0:
            return "each rank orders rows by experts of its own"
        rows = tensor_inputs(self.node)[0]
        for kind, there, whole, x in (
            (chosen.inputs[0], chosen.inside[0], (I, R), rows), (chosen.outputs[0], chosen.inside[1], (P,), self.node),
        ):  # fmt: skip
            if kind != there and (kind != S(1) or there not in whole or shape(x)[1] % ranks):
                return f"{there} does not travel as {kind}"
        return ""

    def _split(self, place: Dims, kind: Shard, ranks: int) -> tuple[str, Way] | None:
        """The factor of which ``kind`` takes a part: the factors outside it are its runs' repetitions, and those inside
        it belong to each of its indices."""
        outside = 1
        names = place[kind.dim] if kind.dim < len(place) else ()
        for position, name in enumerate(names):
            size = self.sizes[name]
            runs, odd = kind.parts // outside, kind.parts % outside
            within = math.prod(self.sizes[inner] for inner in names[position + 1 :])
            unit, torn = kind.unit // within, kind.unit % within
            if not odd and runs and kind.unit == 1 and not size % (runs * ranks):
                return name, (runs, 0)
            if not odd and runs and unit and not torn and not size % (runs * unit):
                units = size // (runs * unit)
                if units > 1 and units % ranks:
                    return name, (runs, unit)
            outside *= size
        return None

    def _leaf(self, chosen: Strategy) -> str:
        """A leaf may be anything but partial; it is replicated only if a gradient is wanted."""
        found, (kind,) = leaf(self.node), chosen.outputs
        assert found is not None
        return f"a leaf is {kind}" if kind is P or (kind is R and not found.trainable) else ""

    @property
    def _stored(self) -> bool:
        found = leaf(self.node)
        return found is not None and found.kind != "input"

    def _types(self, chosen: Strategy, splits: Mapping[str, Way]) -> str:
        if self.node.target in (with_tangent, declare_gradient):
            return self._derivative(chosen)
        wants = needs_grad(self.node)
        into = [wants and facts(n).needs_grad for n in tensor_inputs(self.node)]
        out = [wants and (v.is_floating_point() or v.is_complex()) for v in values(self.node)]
        if not splits:
            return self._unsplit(chosen, into, out)
        made = [self._of_output(place, splits) for place in self.rule.outputs]
        sums = P in made
        read = [
            self._of_input(place, splits, term=sums and len(splits) == 1 and i in self.rule.additive)
            for i, place in enumerate(self.rule.inputs)
        ]
        for given, kinds, flags, what in (
            (chosen.inputs, read, into, "takes"),
            (chosen.outputs, made, out, "makes"),
        ):
            for position, (has, kind, grad) in enumerate(zip(given, kinds, flags, strict=True)):
                fits = isinstance(has, Shard) if kind is None else has == bare(kind, grad)
                if not fits:
                    return f"with {' and '.join(splits)} split it {what} no {has} at {position}"
        return ""

    def _derivative(self, chosen: Strategy) -> str:
        """A derivative that the user wrote: a value, and its gradient in the type that follows from the value's."""
        if self.node.target is with_tangent:
            (given,), (kind, grad), flows = chosen.inputs, chosen.outputs, True
            if given is not bare(kind, False) and given != kind:
                return f"it makes {kind} of {given}"
        else:
            (kind, grad), (done,) = chosen.inputs, chosen.outputs
            flows = needs_grad(tensor_inputs(self.node)[0])
            if done is not I:
                return f"what it says is {done}"
        wanted = kind if isinstance(kind, Shard) else {I: I, R: P, P: I}[kind]
        return "" if grad == wanted or not flows else f"the gradient of {kind} is {grad}"

    def _of_output(self, place: Dims, splits: Mapping[str, Way]) -> AxisType | None:
        """None: a slice. A sum over what is split is a term, or settled by the operator itself."""
        if _has(place, splits):
            return None
        return I if splits.keys() <= self.rule.settled else P

    def _of_input(self, place: Dims, splits: Mapping[str, Way], *, term: bool) -> AxisType | None:
        return None if _has(place, splits) else P if term else R

    def _unsplit(self, chosen: Strategy, into: list[bool], out: list[bool]) -> str:
        """All the same on all ranks; or linear: terms in, terms out, and what they are multiplied with replicated."""
        terms = any(out) and not self.rule.whole_gradients  # of the gradient of what is replicated
        whole = [(I, I), (R, R)] if terms else [(I, I)]
        options: list[tuple[list[AxisType], AxisType]] = [([kind] * len(into), made) for kind, made in whole]
        for group in self.rule.linear:
            options.append(([P if i in group else R for i in range(len(into))], P))
        for read, made in options:
            takes = tuple(bare(kind, grad) for kind, grad in zip(read, into, strict=True))
            makes = tuple(bare(made, grad) for grad in out)
            if (takes, makes) == (chosen.inputs, chosen.outputs):
                return ""
        return "it is neither whole nor linear in its terms"

    def _together(self, chosen: Strategy, splits: Mapping[str, Way]) -> str:
        """Two factors may be split at once where the operator itself brings together what belongs together."""
        if len(splits) < 2:
            return ""
        pairs = [pair for pair in self.rule.joint if set(pair) == splits.keys()]
        if not pairs:
            return f"{', '.join(splits)} do not belong together"
        first, second = pairs[0]
        once = second in self.rule.whole
        if splits[second][0] != 1 or (once and (splits[first][0] != 1 or self.touched & splits.keys())):
            return f"{first} and {second} can be split together once, from the outside"
        if once and (splits[first][1] or splits[second][1]):
            return f"{first} or {second} does not divide"
        both = [place for place in (*self.rule.inputs, *self.rule.outputs) if _has(place, [first])]
        if any(_has(place, [second]) for place in both):
            return f"an operand has {first} and {second}"
        if once:
            self.whole |= {first, second}
        return ""

    def _take(self, splits: Mapping[str, Way], ranks: int) -> str:
        """Leave the next axis what remains."""
        for name, (runs, unit) in splits.items():
            if len(splits) == 1 and name in self.whole:
                return f"{name} is whole"
            if name in self.rule.contiguous and runs != 1:
                return f"a rank has no run of {name}"
            uneven = name in self.padded or (unit and name in self.touched)
            if uneven and name in self.rule.contiguous:
                return f"ranks have runs of {name} of other lengths"
            if name in self.padded and self._stored:
                return f"{name} is padding on some ranks already"
            if unit:
                self.sizes[name] = runs * unit * -(-self.sizes[name] // (runs * unit * ranks))
                self.padded.add(name)
            else:
                self.sizes[name] //= ranks
            self.touched.add(name)
        return ""


def _has(place: Dims, names: Iterable[str]) -> bool:
    return any(name in dim for dim in place for name in names)
