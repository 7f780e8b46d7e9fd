"""The backward of single operators, proven on numbers before it is used as a pattern.

The templates of :mod:`..autodiff.vector_jacobian` say what an operator's backward looks like; this file trusts none.
The first time that a program has a template, it is evaluated on drawn values beside autograd of the eager operator,
with the dtypes and memory formats that the program's values and gradients have. Large operands are made smaller, in
proportion, and so are indices and sizes among the arguments; where an operator does not take them, they stay. Operators
that depend on a rank have no eager counterpart; their few transposes are written down here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from ...compat.torch import FakeTensorMode, schema_or_none
from ...core.absent_gpu import CPU, AbsentGpu, call_fake, on_device
from ...core.annotations import value
from ...core.errors import REPORT, CompileError
from ...ir.builder import GraphBuilder
from ...ops.collectives import combine, dispatch, ring_attention, ring_attention_backward
from ...ops.cross_entropy import nll_terms, nll_terms_backward
from ...ops.grouped_rows import group_rows, grouped_linear, ungroup_rows
from ...ops.rank_local import embedding_rows, embedding_rows_backward
from ...ops.tiled_attention import tiled_attention, tiled_attention_backward
from ..autodiff.vector_jacobian import VectorJacobian
from .device_kernels import on_cpu

MOST = 1 << 13  # elements of all operands together: more are made fewer
MANY = 1 << 17  # where they could be, and are still many, other sizes are tried
MOST_AS_THEY_ARE = 1 << 22  # where they cannot be made fewer
SMALL = 8  # sizes up to this one stay
INVALID = (RuntimeError, IndexError, ValueError, TypeError)  # what operators raise for arguments that do not fit
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}  # of what is largest; 5e-2 for dtypes of 16 bits


@dataclass(frozen=True)
class Pattern:
    """What a graph should compute, as a small graph of its own: ``inputs`` and ``tangents`` stand for nodes of the
    checked graph; ``outputs`` and ``gradients`` are what it must contain."""

    inputs: tuple[fx.Node, ...]
    tangents: tuple[fx.Node | None, ...]
    outputs: tuple[fx.Node | None, ...]
    gradients: tuple[fx.Node | None, ...]


@dataclass(frozen=True)
class OperatorCall:
    """An operator and what its operands look like. ``given``: its arguments, in which each node stands for the next of
    ``operands``; ``same``: for each of these the first that is the same value. ``tangents``: for each output the
    gradient that arrives, if one does; ``wanted``: the outputs through which one may. ``sums``: the dtype in which the
    rows of a lookup's gradient are added up, if not in their own."""

    target: Any
    given: tuple[Any, Any]
    operands: tuple[Tensor, ...]
    grads: tuple[bool, ...]
    same: tuple[int, ...]
    tangents: tuple[Tensor | None, ...]
    wanted: tuple[int, ...]
    sums: torch.dtype | None = None

    def filled(self, with_: Sequence[Any]) -> tuple[Any, Any]:
        """The arguments with these in the operands' places."""
        following = iter(with_)
        found: tuple[Any, Any] = fx.map_arg(self.given, lambda _: next(following))
        return found


class Derivatives:
    """Patterns of operators with their backward, in the graph of ``scratch``. ``templates``: those traced already."""

    def __init__(self, scratch: GraphBuilder, templates: dict[Hashable, Any], absent: AbsentGpu | None = None) -> None:
        self.scratch, self.operators = scratch, VectorJacobian(scratch, templates, _rows, absent)

    def pattern(self, call: OperatorCall) -> Pattern:
        """What ``call`` and its backward are.

        Raises:
            CompileError: QN209 if the template that says so is not the derivative.
        """
        made = self._pattern(call)
        if call.sums is not None:
            _check_sums(call, made)
        if call.target in _RANKED:
            _check_ranked(call, made)
        elif all(t is None for t in call.tangents) or _random(call):
            return made
        elif not self._check_smaller(call) and _elements(call) <= MOST_AS_THEY_ARE:
            _check_numbers(call, made)
        return made

    def _check_smaller(self, call: OperatorCall) -> bool:
        """Whether a large ``call`` was checked as a smaller one."""
        for small in _smaller(call, self.scratch.mode) if _elements(call) > MOST else ():
            try:
                pattern = self._pattern(small)
            except INVALID:
                continue  # the call itself was traced: its arguments do not fit the smaller operands
            if _check_numbers(small, pattern):
                return True
        return False

    def _pattern(self, call: OperatorCall) -> Pattern:
        stands: list[fx.Node] = []
        for x, grad, first in zip(call.operands, call.grads, call.same, strict=True):
            new = first == len(stands)
            stands.append(self.scratch.placeholder("x", x, needs_grad=grad) if new else stands[first])
        tangents = [None if t is None else self.scratch.placeholder("t", t) for t in call.tangents]
        args, kwargs = call.filled(stands)
        made, pullback = self.operators.apply(call.target, args, kwargs, call.wanted, call.sums)
        terms = pullback(tangents) if any(t is not None for t in tangents) else [None] * len(stands)
        return Pattern(tuple(stands), tuple(tangents), tuple(made), tuple(terms))


def _rows(place: fx.Node) -> bool:
    """Whether the elements of a row are neighbours, as its fake tensor has it; a program may take more care."""
    x = value(place)
    return x.dim() == 0 or x.shape[-1] < 2 or x.stride(-1) == 1


# -- lookups


def _check_sums(call: OperatorCall, pattern: Pattern) -> None:
    """The gradient of a table has the dtype in which its rows are added up."""
    term = pattern.gradients[0]
    if term is not None and value(term).dtype is not call.sums:
        raise _wrong(call, f"rows are added up in {value(term).dtype}, not {call.sums}")


# -- operators of ranks


def _check_ranked(call: OperatorCall, pattern: Pattern) -> None:
    """The transposes of operators that no single process can run."""
    args, _ = call.filled(pattern.inputs)
    if call.target in (embedding_rows, nll_terms) and pattern.outputs[0] is None:
        return
    for position, (op, wanted) in _RANKED[call.target](args, pattern).items():
        term = pattern.gradients[position]
        if term is None and not call.grads[position]:
            continue
        if term is not None and op in (ring_attention_backward, tiled_attention_backward):  # one call gives three
            source, index = term.args
            if index != position or not isinstance(source, fx.Node):
                raise _wrong(call, f"gradient {position} is another one's")
            term = source
        if term is None or term.target is not op or repr(tuple(term.args)) != repr(tuple(wanted)):
            raise _wrong(call, f"gradient {position} is not the transpose")


def _rows_of_table(args: Any, made: Pattern) -> dict[int, tuple[Any, Any]]:
    table, ids, *layout = args
    (rows,), term = made.tangents, made.gradients[0]
    cast = term.args[0] if term is not None and term.args else None
    if isinstance(cast, fx.Node) and cast.target is torch.ops.aten._to_copy.default and cast.args == (rows,):
        rows = cast  # to what :func:`_check_sums` asks for
    return {0: (embedding_rows_backward, (rows, ids, value(table).shape[0], *layout))}


def _ring(args: Any, made: Pattern) -> dict[int, tuple[Any, Any]]:
    q, axis, size, k, v, padding, segments, *options = args
    saved = (q, k, v, *made.outputs, padding, segments)
    return dict.fromkeys(range(3), (ring_attention_backward, (made.tangents[0], axis, size, *saved, *options)))


def _tiles(args: Any, made: Pattern) -> dict[int, tuple[Any, Any]]:
    return dict.fromkeys(range(3), (tiled_attention_backward, (made.tangents[0], *args[:3], *made.outputs, *args[3:])))


_RANKED: Mapping[Any, Callable[[Any, Pattern], dict[int, tuple[Any, Any]]]] = MappingProxyType(
    {
        embedding_rows: _rows_of_table,
        nll_terms: lambda args, made: {
            0: (nll_terms_backward, (made.tangents[0], args[0], made.outputs[0], *args[1:]))
        },
        dispatch: lambda args, made: {0: (combine, (made.tangents[0], *args[1:]))},
        combine: lambda args, made: {0: (dispatch, (made.tangents[0], *args[1:]))},
        ring_attention: _ring,
        tiled_attention: _tiles,
    }
)


# -- numbers


def _check_numbers(call: OperatorCall, pattern: Pattern) -> bool:
    """Compare the pattern with autograd of the operator itself; False if this process cannot run that."""
    for positive in (False, True):  # some operators are only defined there
        generator = torch.Generator().manual_seed(len(call.operands))
        bound = min([n for x in call.operands for n in x.shape if n] or [1])
        draw: list[Tensor] = []
        for x, first in zip(call.operands, call.same, strict=True):  # one value that is read twice is drawn once
            draw.append(draw[first] if first < len(draw) else _drawn(x, generator, bound, positive))
        draw = _PLANNED[call.target](draw) if call.target in _PLANNED else draw
        arrives = [None if t is None else _drawn(t, generator, bound, False) for t in call.tangents]
        try:
            expected = _eager(call, draw, arrives)
        except INVALID:
            return False  # no kernel here, or the drawn operands are none of its own
        if all(x is None or bool(x.isfinite().all()) for x in expected):
            break
    places = zip(pattern.inputs, draw, strict=True)
    env = dict(places) | {p: t for p, t in zip(pattern.tangents, arrives, strict=True) if p is not None}
    try:
        with torch.inference_mode(False), torch.no_grad():
            found = [None if n is None else _run(n, env) for n in (*pattern.outputs, *pattern.gradients)]
    except NotImplementedError:
        return False  # what it is traced to runs on another kind of device
    except INVALID as error:
        raise _wrong(call, f"it does not run: {error}") from error
    for position, (have, want) in enumerate(zip(found, expected, strict=True)):
        worst = _difference(have, want)
        if worst is not None:
            count = len(pattern.outputs)
            what = f"output {position}" if position < count else f"gradient {position - count}"
            raise _wrong(call, f"{what} is off by {worst:.1e} of its largest value")
    return True


def _eager(call: OperatorCall, draw: Sequence[Tensor], arrives: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The outputs that the backward may need, then the gradient of each operand."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [x.detach().requires_grad_(flag) for x, flag in zip(draw, call.grads, strict=True)]
        args, kwargs = on_device(call.filled(leaves), CPU)
        made = _REFERENCES.get(call.target, call.target)(*args, **kwargs)
        outs = list(made) if isinstance(made, (tuple, list)) else [made]
        pairs = [(o, t) for o, t in zip(outs, arrives, strict=True) if t is not None and o.requires_grad]
        ask = [x for x in leaves if x.requires_grad]
        grads = iter(torch.autograd.grad([o for o, _ in pairs], ask, [t for _, t in pairs], allow_unused=True))
        return [*outs, *(next(grads) if x.requires_grad else None for x in leaves)]


def _run(node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    if node not in env:
        args, kwargs = on_device(fx.map_arg((node.args, node.kwargs), lambda n: _run(n, env)), CPU)
        env[node] = on_cpu(node.target)(*args, **kwargs)
    return env[node]


def _difference(have: Tensor | None, want: Tensor | None) -> float | None:
    """The largest error, of what is largest; None where it is no more than rounding."""
    if have is None or not isinstance(want, Tensor):
        return None if want is None or (have is None and not bool(want.any())) else math.inf
    if have.shape != want.shape:
        return math.inf
    if not want.is_floating_point() and not want.is_complex():
        return None if torch.equal(have.to(want.dtype), want) else math.inf
    wide = torch.complex128 if want.is_complex() else torch.float64
    a, b = have.detach().to(wide), want.detach().to(wide)
    known = b.isfinite()
    if not torch.equal(known, a.isfinite()):
        return math.inf
    gap, size = (float(x[known].abs().max()) if bool(known.any()) else 0.0 for x in (a - b, b))
    return None if gap <= TOLERANCE.get(want.dtype, 5e-2) * max(size, 1e-3) else gap / max(size, 1e-30)


def _experts(rows: Tensor, ends: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Each row times the matrix of its expert, one by one."""
    chosen = (torch.arange(rows.shape[0]).unsqueeze(1) >= ends).sum(1)
    matrix = weight[chosen] if transposed else weight[chosen].transpose(1, 2)
    made = (rows.unsqueeze(1) @ matrix).squeeze(1)
    return made if bias is None else made + bias[chosen]


# operators of this package that autograd knows nothing of
_REFERENCES: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        grouped_linear: _experts,
        group_rows: lambda x, order, ends: x[order],
        ungroup_rows: lambda x, order, ends: x[order.argsort()],
    }
)


def _ending(x: Tensor, ends: Tensor) -> Tensor:
    """Drawn ``ends`` of groups as there may be: in order, and the last where the rows of ``x`` end."""
    return torch.cat([ends.sort().values[:-1], ends.new_full([1], x.shape[0])])


# what takes a plan, and one made of drawn operands
_PLANNED: Mapping[Any, Callable[[list[Tensor]], list[Tensor]]] = MappingProxyType(
    {
        grouped_linear: lambda draw: [draw[0], _ending(draw[0], draw[1]), *draw[2:]],
        **dict.fromkeys(
            (group_rows, ungroup_rows), lambda draw: [draw[0], draw[1].argsort(), _ending(draw[0], draw[2])]
        ),
    }
)


# -- operands


def _random(call: OperatorCall) -> bool:
    """Whether two runs differ."""
    schema = schema_or_none(call.target)
    for position, known in enumerate(schema.arguments if schema is not None else ()):
        if known.name == "dropout_p":
            args, kwargs = call.given
            return bool(args[position] if position < len(args) else kwargs.get("dropout_p", known.default_value))
    return torch.Tag.nondeterministic_seeded in getattr(call.target, "tags", ())


def _elements(call: OperatorCall) -> int:
    return sum(x.numel() for x in (*call.operands, *call.tangents) if x is not None)


def _drawn(like: Tensor, generator: torch.Generator, bound: int, positive: bool) -> Tensor:
    """Values for a fake tensor, in memory as it is: in that order, with gaps and repetitions where it has some."""
    strides = _strides(like, like.shape)
    count = 1 + sum((n - 1) * s for n, s in zip(like.shape, strides, strict=True)) if like.numel() else 0
    if like.dtype is torch.bool:
        flat = torch.rand(count, generator=generator, device="cpu") > 0.5
    elif like.is_floating_point() or like.is_complex():
        wide = torch.complex128 if like.is_complex() else torch.float64
        flat = torch.randn(count, generator=generator, dtype=wide, device="cpu")
        flat = (flat.abs() / 4 + 0.1).clamp(max=0.9).to(like.dtype) if positive else flat.to(like.dtype)
    else:
        flat = torch.randint(0, bound, (count,), generator=generator, dtype=like.dtype, device="cpu")
    return flat.as_strided(like.shape, strides)


def _strides(like: Tensor, sizes: Sequence[int]) -> list[int]:
    """Strides of a tensor of these ``sizes`` that nest as those of ``like`` do."""
    made, span, dense = [0] * len(sizes), 1, 1
    order = sorted((s, d) for d, s in enumerate(like.stride()) if s)
    for stride, dim in order:
        gap = like.shape[dim] > 1 and stride > dense
        made[dim] = span * 2 if gap else span
        span, dense = made[dim] * max(sizes[dim], 1), max(dense, stride * like.shape[dim])
    return made


def _smaller(call: OperatorCall, mode: FakeTensorMode) -> Iterator[OperatorCall]:
    """The same call of operands of few elements, with its indices and sizes made smaller too. Sizes may be multiples of
    each other by chance: where many elements are left, it comes first with sizes that need not stay so."""
    found = _with_sizes(call, _sizes(call), mode)
    if found is None:
        return
    if _elements(found) > MANY and (fewer := _with_sizes(call, _sizes(call, multiples=False), mode)) is not None:
        yield fewer
    yield found


def _with_sizes(call: OperatorCall, sizes: Mapping[int, int], mode: FakeTensorMode) -> OperatorCall | None:
    """None if the operator does not take them, or if nothing would be left of an output."""

    def literal(x: Any) -> Any:
        return (sizes.get(x, x) if x >= 0 else -sizes.get(-x, -x)) if type(x) is int else x

    def fake(like: Tensor, size: Sequence[int]) -> Tensor:
        return torch.empty_strided(size, _strides(like, size), dtype=like.dtype, device=like.device)

    args, kwargs = map_aggregate(call.given, literal)
    new = replace(call, given=(args, kwargs))
    with mode:
        operands = [fake(x, [sizes.get(n, n) for n in x.shape]) for x in call.operands]
        filled, named = new.filled(operands)
        try:
            made = call_fake(call.target, filled, named)
        except INVALID:
            return None
        outs = made if isinstance(made, (tuple, list)) else (made,)
        if len(outs) != len(call.tangents):
            return None
        pairs = list(zip(call.tangents, outs, strict=True))
        if any(t is not None and t.numel() and not o.numel() for t, o in pairs):
            return None
        tangents = [None if t is None else fake(t, o.shape) for t, o in pairs]
    return replace(new, operands=tuple(operands), tangents=tuple(tangents))


def _sizes(call: OperatorCall, *, multiples: bool = True) -> dict[int, int]:
    """Smaller numbers for the sizes of a call and the numbers among its arguments. Products and sums of others stay so,
    ``multiples`` where they are told to, and what is smaller than a number among the arguments, or larger, stays that
    where it can: an index stays inside of its dim, and a slice inside of what it is cut from."""
    shapes = [tuple(x.shape) for x in (*call.operands, *call.tangents) if x is not None]
    runs = [shape[i:j] for shape in shapes for i in range(len(shape)) for j in range(i + 2, len(shape) + 1)]
    products = {math.prod(run): run for run in runs}
    sums = {sum(parts): parts for parts in _lists(call.given)}
    real = {n for shape in shapes for n in shape}
    largest = max(real, default=0)
    literals = {n for x in _numbers(call.given) if 0 < (n := abs(x)) < largest}
    made: dict[int, int] = {}

    def less(n: int) -> int:
        return made.get(n, n)

    for size in sorted(n for n in real | literals | products.keys() if n > SMALL):
        run = products.get(size, ())
        fraction = next((n for n in sorted(made, reverse=True) if size % n == 0 and size // n <= SMALL), None)
        part = next((n for n in sorted(literals) if size - n in real | literals), None)
        if size in sums:
            made[size] = sum(less(n) for n in sums[size])
        elif run and max(run) < size:
            made[size] = math.prod(less(n) for n in run)
        elif part is not None:
            made[size] = less(part) + less(size - part)
        elif fraction and multiples:
            made[size] = made[fraction] * (size // fraction)
        else:
            below = [made[n] for n in made if n in literals or (size in literals and n in real)]
            made[size] = max(SMALL + 2 * (1 + len(made)), max(below, default=0) + 2)
    return made


def _numbers(given: Any) -> list[int]:
    """The whole numbers among arguments."""
    found: list[int] = []
    map_aggregate(given, lambda x: found.append(x) if type(x) is int else None)
    return found


def _lists(given: Any) -> Iterator[list[int]]:
    """The lists of two or more numbers among arguments."""
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, (list, tuple)):
        if len(given) > 1 and all(type(x) is int for x in given):
            yield list(given)
        for each in given:
            yield from _lists(each)


def _wrong(call: OperatorCall, what: str) -> CompileError:
    return CompileError("QN209", f"backward check: the derivative of {call.target} is wrong: {what}", fix=REPORT)
