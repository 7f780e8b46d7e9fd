"""Sharding rules in factor notation: ``"m k, k n -> m n"``.

A rule names the *factors* of an operator's dims. Everything follows from where a factor stands: an input that has
it is sharded, an input that lacks it is replicated, an output that lacks it is a partial sum. ``...`` stands for
leading dims that broadcast, ``(h d)`` for a dim that has several factors, a number for a dim of that size. The search
for shardings needs no more than this. (After einops' notation and Shardy's factors.)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from ...compat.torch import OpOverload
from ...core.annotations import shape, tensor_inputs, values
from .targets import operator_of

# "matmul": a product, whose size follows from the factors; "attention"; "view": moves nothing; "memory": bound by the
# bytes that it reads and writes
Work = Literal["matmul", "attention", "view", "memory"]
Dims = tuple[tuple[str, ...], ...]  # for each dim its factors, outermost first; () for a broadcast dim of size 1


@dataclass(frozen=True)
class Factors:
    """What a rule says of one node.

    ``sizes``: the size of each factor. ``whole``: factors that must not be split. ``linear``: groups of inputs in
    which the operator is linear, the others held fixed. ``additive``: inputs that are added to a contraction (a
    bias): they enter a partial sum as partial. ``contiguous``: factors that may be split only from the outside
    (a rank must hold a run of indices). ``settled``: sum factors over which the operator itself adds up (or takes the
    largest of) what ranks have, so that its outputs are whole. ``joint``: pairs that one axis may split at once,
    because the operator brings together what belongs together; where the second is ``whole`` on its own, only once,
    from the outside, and before anything else splits one of them. ``dual``: pairs of positions (of inputs, then of
    outputs) where the second is the gradient of the first, so that its type is the gradient's. ``even``: factors of
    which a further axis must give all ranks as much (a run of what an axis before it has split). ``padded``: factors of
    which an axis before left padding at the end, on some ranks. ``whole_gradients``: whether the backward rounds the
    gradient that arrives, which must not be a term of a sum.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    linear: tuple[tuple[int, ...], ...] = ()
    additive: frozenset[int] = frozenset()
    contiguous: frozenset[str] = frozenset()
    settled: frozenset[str] = frozenset()
    joint: frozenset[tuple[str, str]] = frozenset()
    dual: tuple[tuple[int, int], ...] = ()
    even: frozenset[str] = frozenset()
    padded: frozenset[str] = frozenset()
    whole_gradients: bool = False

    def __post_init__(self) -> None:
        for dims in (*self.inputs, *self.outputs):
            for dim in dims:
                for factor in dim:
                    assert factor in self.sizes, f"factor {factor} has no size"

    @property
    def names(self) -> tuple[str, ...]:
        """Every factor once, outputs first."""
        found = (f for dims in (*self.outputs, *self.inputs) for dim in dims for f in dim)
        return tuple(dict.fromkeys(found))

    @property
    def product(self) -> tuple[int, int, int, int] | None:
        """(batch, rows, columns, depth) of a product that sums over the factors that two inputs share and no output
        has; None where there are none. The first of these inputs has the rows, the last the columns."""
        made = _names(self.outputs)
        inputs = [_names([dims]) for i, dims in enumerate(self.inputs) if i not in self.additive]
        shared = {f for i, one in enumerate(inputs) for other in inputs[i + 1 :] for f in one & other}
        summed = shared - made
        if not summed:
            return None
        first, *_, last = (one for one in inputs if one & summed)
        batch, rows = made & first & last, (made & first) - last
        groups = (batch, rows, made - batch - rows, summed)
        return tuple(math.prod(self.sizes[f] for f in group) for group in groups)  # type: ignore[return-value]

    def offset(self, dims: Dims, factor: str) -> tuple[int, int] | None:
        """(dim, product of the factors outside it in that dim) of ``factor``; None where ``dims`` lacks it."""
        for position, dim in enumerate(dims):
            if factor in dim:
                return position, math.prod(self.sizes[f] for f in dim[: dim.index(factor)])
        return None


def _names(tensors: Iterable[Dims]) -> set[str]:
    return {factor for dims in tensors for dim in dims for factor in dim}


SpecFn = Callable[[fx.Node], Factors]


@dataclass(frozen=True)
class Notation:
    """A parsed rule, to be fitted to the shapes of a call.

    >>> Notation.parse("m k, k n -> m n", whole="k").fit([(4, 6), (6, 2)], [(4, 2)]).sizes
    {'m': 4, 'k': 6, 'n': 2}
    """

    text: str
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    whole: frozenset[str] = frozenset()
    linear: tuple[tuple[int, ...], ...] = ()
    additive: frozenset[int] = frozenset()
    contiguous: frozenset[str] = frozenset()

    @staticmethod
    def parse(
        text: str,
        *,
        whole: str = "",
        linear: Sequence[Sequence[int]] = (),
        additive: Sequence[int] = (),
        contiguous: str = "",
    ) -> Notation:
        """Read a rule; see :func:`rule`."""
        sides = text.replace("[", "").replace("]", "").split("->")
        if len(sides) != 2:
            raise ValueError(f"rule {text!r}: write inputs -> outputs, with one '->'")
        inputs, outputs = (tuple(tuple(_DIM.findall(part)) for part in side.split(",")) for side in sides)
        named = {part for tensor in (*inputs, *outputs) for token in tensor for part in _parts(token)}
        for tensor in (*inputs, *outputs):
            _check_tensor(text, tensor, leading="..." in named)
        for factor in (*whole.split(), *contiguous.split()):
            if factor not in named:
                raise ValueError(f"rule {text!r}: {factor!r} is not a factor of it")
        for position in (*additive, *(i for group in linear for i in group)):
            if not 0 <= position < len(inputs):
                raise ValueError(f"rule {text!r}: there is no input {position}")
        groups = tuple(tuple(group) for group in linear)
        fixed = {*whole.split(), *(name for name in named if name.isdigit())}
        return Notation(
            text, inputs, outputs, frozenset(fixed), groups, frozenset(additive), frozenset(contiguous.split())
        )

    @property
    def work(self) -> Work | None:
        """A product, where it sums over factors that two inputs share and is linear in each of them, or adds a bias.
        Else a pass over memory; but what an operator does with a dim that it needs whole, a rule does not say: None."""
        made, last = {f for dims in self.outputs for token in dims for f in _parts(token)}, len(self.inputs)
        alone = {group[0] for group in self.linear if len(group) == 1}
        factors = set(range(last)) - self.additive if self.additive else alone
        times = Counter(f for i in factors for f in {f for token in self.inputs[i] for f in _parts(token)} - made)
        if any(count > 1 for count in times.values()):
            return "matmul"
        return None if self.whole else "memory"

    def fit(self, given: Sequence[Sequence[int]], made: Sequence[Sequence[int]]) -> Factors:
        """The factors for tensors of these shapes; inputs that come last in the rule may be missing.

        Raises:
            ValueError: if the shapes do not fit.
        """
        inputs = self.inputs[: len(given)]
        if len(inputs) != len(given) or len(self.outputs) != len(made):
            raise ValueError(f"rule {self.text!r} does not fit {len(given)} inputs and {len(made)} outputs")
        sides = zip((*inputs, *self.outputs), (*given, *made), strict=True)
        expanded = [(self._names(tokens, dims), dims) for tokens, dims in sides]
        sizes: dict[str, int] = {}
        for names, dims in expanded:
            for name, size in zip(names, dims, strict=True):
                if name[0] == "(" or name.isdigit():
                    continue
                if sizes.get(name, 1) != 1 and size not in (1, sizes[name]):
                    raise ValueError(f"rule {self.text!r}: factor {name} is both {sizes[name]} and {size}")
                sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
        self._complete(sizes, [pair for names, dims in expanded for pair in zip(names, dims, strict=True)])
        for names, dims in expanded[len(given) :]:
            for name, size in zip(names, dims, strict=True):
                if size != _size(name, sizes):
                    raise ValueError(f"rule {self.text!r}: factor {name} is {_size(name, sizes)}, but 1 in the result")
        specs = [
            tuple(_parts(name) if size == _size(name, sizes) else () for name, size in zip(names, dims, strict=True))
            for names, dims in expanded
        ]
        return Factors(
            tuple(specs[: len(given)]),
            tuple(specs[len(given) :]),
            sizes,
            _spread(self.whole, sizes),
            tuple(group for group in self.linear if all(i < len(given) for i in group)),
            frozenset(i for i in self.additive if i < len(given)),
            _spread(self.contiguous, sizes),
        )

    def _complete(self, sizes: dict[str, int], dims: Sequence[tuple[str, int]]) -> None:
        """Add the sizes that numbers and dims of several factors say."""
        sizes |= {part: int(part) for name, _ in dims for part in _parts(name) if part.isdigit()}
        for _ in dims:
            for name, size in dims:
                unknown = [part for part in _parts(name) if part not in sizes]
                known = math.prod(sizes[part] for part in _parts(name) if part in sizes)
                if len(unknown) == 1 and size % known == 0:
                    sizes[unknown[0]] = size // known
                elif not unknown and size not in (1, known):
                    raise ValueError(f"rule {self.text!r}: {name} is {known}, and a dim there has size {size}")
        for name, size in dims:
            if missing := [part for part in _parts(name) if part not in sizes]:
                raise ValueError(f"rule {self.text!r}: the sizes of {', '.join(missing)} in {name} of size {size}")

    def _names(self, tokens: Sequence[str], dims: Sequence[int]) -> list[str]:
        names = list(tokens)
        if names[:1] == ["..."]:
            leading = len(dims) - len(tokens) + 1
            names[:1] = [f"b{leading - 1 - i}" for i in range(leading)]
        if len(names) != len(dims):
            raise ValueError(f"rule {self.text!r} does not fit a tensor of shape {tuple(dims)}")
        return names


def _check_tensor(text: str, tensor: Sequence[str], *, leading: bool) -> None:
    if "..." in tensor[1:]:
        raise ValueError(f"rule {text!r}: '...' may only come first")
    parts = [part for token in tensor if token != "..." for part in _parts(token)]
    for part in parts:
        if not part.isidentifier() and not part.isdigit():
            raise ValueError(
                f"rule {text!r}: {part!r} is not a name; every tensor, in a list or tuple too, is one group of names "
                "between commas; a dim of several factors is (h d), one of known size a number"
            )
        if leading and re.fullmatch(r"b\d+", part):
            raise ValueError(f"rule {text!r}: {part!r} is a name of a dim of '...'; use another")
    names = [part for part in parts if not part.isdigit()]
    if len(set(names)) != len(names):
        raise ValueError(f"rule {text!r}: a factor stands twice in one tensor")


_DIM = re.compile(r"\([^()]*\)|\S+")


def _parts(token: str) -> tuple[str, ...]:
    """The factors of a dim, outermost first; a dim of size 1 has none.

    >>> _parts("(3 h d)"), _parts("k"), _parts("1")
    (('3', 'h', 'd'), ('k',), ())
    """
    inner = token[1:-1] if token[:1] == "(" and token[-1:] == ")" else token
    return tuple(part for part in inner.split() if part != "1")


def _size(token: str, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[part] for part in _parts(token))


def _spread(names: frozenset[str], sizes: Mapping[str, int]) -> frozenset[str]:
    """``...`` stands for all dims that it covers."""
    if "..." not in names:
        return names
    return names - {"..."} | {name for name in sizes if re.fullmatch(r"b\d+", name)}


@dataclass(frozen=True)
class Rule:
    """How ``target`` may be sharded. ``shape_arg``: the position of an argument that is the output's shape, which
    becomes the local shape on each rank. ``text`` and ``options``: what :func:`rule` was given, for rules in notation.
    ``work``: what it is priced as; None: a line of :mod:`..catalog` or torch's tags say it.
    """

    target: Any
    factors: SpecFn
    shape_arg: int | None = None
    text: str = field(default="", compare=False)
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    work: Work | None = None


def rule(
    target: Any,
    text: str,
    *,
    whole: str = "",
    linear: Sequence[Sequence[int]] = (),
    additive: Sequence[int] = (),
    contiguous: str = "",
    shape_arg: int | None = None,
    work: Work | None = None,
) -> Rule:
    """A sharding rule in factor notation, like an einsum: a factor that the result lacks is summed over.

    Args:
        target: the operator, such as ``torch.ops.aten.linear.default``; ``torch.ops.lib.op`` or ``"lib::op"`` where it
            has one overload; or what ``torch.library.custom_op`` and ``triton_op`` return.
        text: factors of each dim of the tensor inputs and outputs, in the order in which the call has them, those in
            lists and tuples too (``[b n, b k]``: brackets may mark them). ``...`` stands for leading dims that
            broadcast; ``(h d)`` for a dim that has several factors, the outermost first; a number for a dim of that
            size, which is whole. Arguments that are no tensors have no place in it.
        whole: factors that must not be split, separated by spaces; ``"..."``: none of the leading dims.
        linear: groups of inputs in which the operator is linear, the others held fixed.
        additive: inputs that are added to a contraction (a bias).
        contiguous: factors of which a rank must hold a contiguous range.
        shape_arg: the position of an argument that is the output's shape; ranks get the local shape.
        work: what it is priced as, where that does not follow: ``"memory"`` for a few passes over memory, ...

    >>> rule("mm", "m k, k n -> m n", linear=[[0], [1]]).text
    'm k, k n -> m n'
    >>> heads = Notation.parse("b s (3 h d) -> b h s d, b h s d, b h s d", whole="s d")
    >>> heads.fit([(2, 8, 24)], [(2, 4, 8, 2)] * 3).inputs
    ((('b',), ('s',), ('3', 'h', 'd')),)

    Raises:
        ValueError: if the text is malformed, or an option names a factor or an input that the text lacks; if there is
            no operator of a name, or several.
    """
    options = {"whole": whole, "linear": linear, "additive": additive, "contiguous": contiguous}
    notation = Notation.parse(text, whole=whole, linear=linear, additive=additive, contiguous=contiguous)

    def factors(node: fx.Node) -> Factors:
        return notation.fit([shape(n) for n in tensor_inputs(node)], [tuple(v.shape) for v in values(node)])

    return Rule(operator_of(target), factors, shape_arg, text, options, work or notation.work)


def table(*rules: Rule | Iterable[Rule]) -> dict[Any, Rule]:
    """Rules by operator.

    Raises:
        ValueError: if an operator has two.
    """
    found: dict[Any, Rule] = {}
    for entry in rules:
        for one in [entry] if isinstance(entry, Rule) else entry:
            if one.target in found:
                raise ValueError(f"two rules for {one.target}")
            found[one.target] = one
    return found


def user_rules(rules: Iterable[Rule]) -> Mapping[Any, Rule]:
    """Return a user's rules by operator.

    Raises:
        ValueError: if two are of one operator, or one is of none.
    """
    found = table(rules)
    for target in found:
        if not isinstance(target, OpOverload):
            raise ValueError(
                f"a rule of {target!r}, which is no operator: write torch.ops.lib.op.default, or 'lib::op' of an "
                "operator that is registered"
            )
    return found
