"""Sharding rules in factor notation: ``"m k, k n -> m n"``.

A rule names the *factors* of an operator's dims. Everything follows from where a factor stands: an input that has
it is sharded, an input that lacks it is replicated, an output that lacks it is a partial sum. ``...`` stands for
leading dims that broadcast, ``(h d)`` for a dim that has several factors, a number for a dim of that size. The search
for shardings needs no more than this. (After einops' notation and Shardy's factors.)
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

from torch import fx

from ...compat.torch import OpOverload
from ...core.annotations import shape, tensor_inputs, values
from ..functional_forms import name_for_users
from .targets import operator_of

# "matmul": a product, whose size follows from the factors; "attention"; "view": moves nothing; "memory": bound by the
# bytes that it reads and writes
Work = Literal["matmul", "attention", "view", "memory"]
Dims = tuple[tuple[str, ...], ...]  # for each dim its factors, outermost first; () for a broadcast dim of size 1


@dataclass(frozen=True)
class Factors:
    """The factors of one operator's dims.

    Attributes:
        inputs: the factors of each dim of each input; ``outputs``: of each output.
        sizes: the size of each factor.
        whole: factors that must not be split.
        linear: groups of inputs in which the operator is linear, the others held fixed.
        additive: inputs that are added to a contraction (a bias): they enter a partial sum as partial.
        contiguous: factors that may be split only from the outside (a rank must hold a range of indices).
        settled: sum factors over which the operator itself sums, or takes the maximum, over ranks: its outputs are
            whole.
        joint: pairs that one axis may split at once, because the operator exchanges what belongs together. If the
            second is ``whole``, only once, from the outside, and before another axis splits one of them.
        dual: pairs of positions (of inputs, then of outputs) where the second is the gradient of the first, and has
            the gradient's type.
        even: factors that a further axis must split evenly (a range of what an earlier axis has split).
        padded: factors that an earlier axis has padded at the end, on some ranks.
        whole_gradients: whether the backward rounds the gradient that arrives, which must not be a term of a sum.
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
        """Return every factor once, outputs first."""
        factors = (f for dims in (*self.outputs, *self.inputs) for dim in dims for f in dim)
        return tuple(dict.fromkeys(factors))

    @property
    def product(self) -> tuple[int, int, int, int] | None:
        """Return (batch, rows, columns, depth) of a product, or None if the operator is none.

        A product sums over factors that two inputs share and no output has. The first of these inputs has the rows, the
        last the columns.
        """
        outputs = _names(self.outputs)
        inputs = [_names([dims]) for i, dims in enumerate(self.inputs) if i not in self.additive]
        shared = {f for a, b in combinations(inputs, 2) for f in a & b}
        summed = shared - outputs
        if not summed:
            return None
        first, *_, last = (factors for factors in inputs if factors & summed)
        batch, rows = outputs & first & last, (outputs & first) - last
        groups = (batch, rows, outputs - batch - rows, summed)
        return tuple(math.prod(self.sizes[f] for f in group) for group in groups)  # type: ignore[return-value]

    def offset(self, dims: Dims, factor: str) -> tuple[int, int] | None:
        """Return the dim of ``factor`` and the product of the factors outside it there; None if ``dims`` lacks it."""
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
        _check_options(text, named, len(inputs), [*whole.split(), *contiguous.split()], [additive, *linear])
        groups = tuple(tuple(group) for group in linear)
        fixed = {*whole.split(), *(name for name in named if name.isdigit())}
        return Notation(
            text, inputs, outputs, frozenset(fixed), groups, frozenset(additive), frozenset(contiguous.split())
        )

    @property
    def work(self) -> Work | None:
        """Return a product, if it sums over factors that two inputs share and is linear in each or adds a bias.

        Otherwise a pass over memory, or None if a dim must be whole: the rule does not say what happens there.
        """
        outputs, last = {f for dims in self.outputs for token in dims for f in _parts(token)}, len(self.inputs)
        alone = {group[0] for group in self.linear if len(group) == 1}
        factors = set(range(last)) - self.additive if self.additive else alone
        times = Counter(f for i in factors for f in {f for token in self.inputs[i] for f in _parts(token)} - outputs)
        if any(count > 1 for count in times.values()):
            return "matmul"
        return None if self.whole else "memory"

    def fit(self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Factors:
        """Return the factors of tensors of these shapes; the last inputs of the rule may be missing.

        Raises:
            ValueError: if the shapes do not fit.
        """
        count = len(inputs)
        if len(self.inputs) < count or len(self.outputs) != len(outputs):
            raise ValueError(f"rule {self.text!r} does not fit {count} inputs and {len(outputs)} outputs")
        pairs = self._pairs(count, [*inputs, *outputs])
        sizes = self._sizes([pair for tensor in pairs for pair in tensor])
        self._check_results(sizes, [pair for tensor in pairs[count:] for pair in tensor])
        dims = [tuple(_parts(name) if size == _size(name, sizes) else () for name, size in tensor) for tensor in pairs]
        return Factors(
            tuple(dims[:count]),
            tuple(dims[count:]),
            sizes,
            _spread(self.whole, sizes),
            tuple(group for group in self.linear if all(i < count for i in group)),
            frozenset(i for i in self.additive if i < count),
            _spread(self.contiguous, sizes),
        )

    def _pairs(self, num_inputs: int, shapes: Sequence[Sequence[int]]) -> list[list[tuple[str, int]]]:
        """Return the name and size of each dim of each tensor."""
        tensors = zip((*self.inputs[:num_inputs], *self.outputs), shapes, strict=True)
        return [list(zip(self._names(tokens, dims), dims, strict=True)) for tokens, dims in tensors]

    def _sizes(self, pairs: Sequence[tuple[str, int]]) -> dict[str, int]:
        """Return the size of each factor. ``pairs``: the name and size of each dim.

        Raises:
            ValueError: if a factor has two sizes other than 1.
        """
        sizes: dict[str, int] = {}
        for name, size in pairs:
            if name[0] == "(" or name.isdigit():
                continue
            if sizes.get(name, 1) != 1 and size not in (1, sizes[name]):
                raise ValueError(f"rule {self.text!r}: factor {name} is both {sizes[name]} and {size}")
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
        self._complete(sizes, pairs)
        return sizes

    def _check_results(self, sizes: Mapping[str, int], pairs: Sequence[tuple[str, int]]) -> None:
        """Raise ValueError if a dim of a result is broadcast."""
        for name, size in pairs:
            if size != _size(name, sizes):
                raise ValueError(f"rule {self.text!r}: factor {name} is {_size(name, sizes)}, but 1 in the result")

    def _complete(self, sizes: dict[str, int], dims: Sequence[tuple[str, int]]) -> None:
        """Add the sizes that follow from numbers and from dims of several factors."""
        sizes |= {part: int(part) for name, _ in dims for part in _parts(name) if part.isdigit()}
        for _ in dims:
            for name, size in dims:
                unknown = [part for part in _parts(name) if part not in sizes]
                product = math.prod(sizes[part] for part in _parts(name) if part in sizes)
                if len(unknown) == 1 and size % product == 0:
                    sizes[unknown[0]] = size // product
                elif not unknown and size not in (1, product):
                    raise ValueError(f"rule {self.text!r}: {name} is {product}, and a dim there has size {size}")
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


def _check_options(
    text: str, named: Set[str], num_inputs: int, factors: Sequence[str], groups: Sequence[Sequence[int]]
) -> None:
    """Raise ValueError if options name a factor or an input that a rule lacks."""
    for factor in factors:
        if factor not in named:
            raise ValueError(f"rule {text!r}: {factor!r} is not a factor of it")
    for position in (position for group in groups for position in group):
        if not 0 <= position < num_inputs:
            raise ValueError(f"rule {text!r}: there is no input {position}")


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
    """Return the factors of a dim, outermost first; a dim of size 1 has none.

    >>> _parts("(3 h d)"), _parts("k"), _parts("1")
    (('3', 'h', 'd'), ('k',), ())
    """
    inner = token[1:-1] if token[:1] == "(" and token[-1:] == ")" else token
    return tuple(part for part in inner.split() if part != "1")


def _size(token: str, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[part] for part in _parts(token))


def _spread(names: frozenset[str], sizes: Mapping[str, int]) -> frozenset[str]:
    """Replace ``...`` by all dims that it stands for."""
    if "..." not in names:
        return names
    return names - {"..."} | {name for name in sizes if re.fullmatch(r"b\d+", name)}


@dataclass(frozen=True)
class Rule:
    """A sharding rule of ``target``.

    Attributes:
        target: the operator.
        factors: returns the factors of a call.
        shape_arg: the position of an argument that is the output's shape, which becomes the local shape on each rank.
        text: the notation, and ``options`` its options, of rules in notation.
        work: the kind of work for prices; None: see :mod:`..catalog`, or torch's tags.
    """

    target: Any
    factors: SpecFn
    shape_arg: int | None = None
    text: str = field(default="", compare=False)
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    work: Work | None = None

    def __str__(self) -> str:
        """Return the rule as a user writes it."""
        name = name_for_users(self.target).replace(".", "::", 1)
        options = "".join(f", {option}={json.dumps(setting)}" for option, setting in self.options.items() if setting)
        return f'quintnet.rule("{name}", "{self.text}"{options})'


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
    """Return a sharding rule in factor notation, like an einsum: a factor that the result lacks is summed over.

    Args:
        target: the operator, such as ``torch.ops.aten.linear.default``; ``torch.ops.lib.op`` or ``"lib::op"`` where it
            has one overload; or what ``torch.library.custom_op`` and ``triton_op`` return.
        text: factors of each dim of the tensor inputs and outputs, in the order in which the call has them, those in
            lists and tuples too (``[b n, b k]``: brackets may mark them). ``...`` stands for leading dims that
            broadcast; ``(h d)`` for a dim that has several factors, the outermost first; a number for a dim of that
            size, which is whole. Arguments that are no tensors have no place in it. Tensors that the operator writes to
            are inputs, and outputs behind those that it returns.
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
    """Return rules by operator.

    Raises:
        ValueError: if an operator has two.
    """
    by_target: dict[Any, Rule] = {}
    for entry in rules:
        for rule in [entry] if isinstance(entry, Rule) else entry:
            if rule.target in by_target:
                raise ValueError(f"two rules for {rule.target}")
            by_target[rule.target] = rule
    return by_target


def user_rules(rules: Iterable[Rule]) -> Mapping[Any, Rule]:
    """Return a user's rules by operator.

    Raises:
        ValueError: if two are of one operator, or one is of none.
    """
    by_target = table(rules)
    for target in by_target:
        if not isinstance(target, OpOverload):
            raise ValueError(
                f"a rule of {target!r}, which is no operator: write torch.ops.lib.op.default, or 'lib::op' of an "
                "operator that is registered"
            )
    return by_target
