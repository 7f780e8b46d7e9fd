"""Check of the padding that ranks have of sizes that do not divide: that it is where the types say, and that nothing
of it reaches an element of the model.

A rank's chunk of n indices has ceil(n / ranks) places. What an operator makes of padding may be anything, so an
operator that lacks a padded factor in some operand (it adds up over it, forward or backward) must read zeros there, and
must get a gradient of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ...core.annotations import facts, is_getitem, leaf, needs_grad, origin, shape, tensor_inputs, value, values
from ...core.errors import REPORT, CompileError
from ...core.sharding import AxisType, Shard, parse_type
from ...ir.program import Axis, LocalProgram
from ...ops.collectives import convert, share
from ...ops.cross_entropy import nll_terms, row_nll
from ...ops.derivatives.user_derivatives import after_gradients, declare_gradient, with_tangent
from ...ops.experts.scaled_groups import EXPERT_LAYERS
from ...ops.rank_local import embedding_rows, microbatch, padding_of
from ...ops.rules.notation import Dims, Factors
from ...ops.scaled_products import block_max, scaled_cast
from .strategies import Reading, Rules

aten = torch.ops.aten
Value = tuple[fx.Node, int]
Numbers = dict[int, float]  # what is known to be in the padding of a dim
_MOVES = frozenset({convert, share, microbatch})
# 0 where all that they read is 0, and so is the derivative times a gradient of 0
_ZERO_OF_ZEROS = frozenset(
    {
        aten.relu.default, aten.gelu.default, aten.silu.default, aten.tanh.default, aten.square.default,
        aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten._to_copy.default,
    }
)  # fmt: skip


def held(sizes: Sequence[int], sharding: Sequence[object], axes: Sequence[Axis]) -> list[tuple[int, ...]]:
    """The shape that a rank has of a tensor, after each axis; first the tensor's own."""
    found = [tuple(sizes)]
    for kind, axis in zip(sharding, axes, strict=False):
        left = list(found[-1])
        if isinstance(kind, Shard):
            rows = kind.parts * kind.unit
            left[kind.dim] = rows * math.ceil(left[kind.dim] / (rows * axis.size))
        found.append(tuple(left))
    return found


def padded(sizes: Sequence[int], sharding: Sequence[object], axes: Sequence[Axis]) -> frozenset[int]:
    """The dims of which ranks together have more places than there are indices."""
    dims = set[int]()
    for kind, axis, before in zip(sharding, axes, held(sizes, sharding, axes), strict=False):
        if isinstance(kind, Shard) and before[kind.dim] % (kind.parts * kind.unit * axis.size):
            dims.add(kind.dim)
    return frozenset(dims)


# -- nodes that put padding in, take it off, or replace it


@dataclass(frozen=True)
class Resize:
    """Each of ``parts`` of ``dim`` made longer by zeros at its end, or shorter by its end."""

    dim: int
    parts: int
    before: int
    after: int


@dataclass(frozen=True)
class Fill:
    """The padding of ``dim`` replaced by ``number``; ``cuts``: what the node says of how the dim is split."""

    dim: int
    number: float
    count: int
    cuts: tuple[object, ...]


def _filled(node: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """What a node puts a number in, where, and which; numbers of 8 bits have an operator of their own for it."""
    if node.target is aten.masked_fill.Scalar:
        x, where, number = node.args[:3]
    elif node.target is aten.where.ScalarSelf:
        where, number, x = node.args[:3]
    else:
        return None
    if not isinstance(x, fx.Node) or not isinstance(where, fx.Node):
        return None
    return x, where, float(number)  # type: ignore[arg-type]


def peel(node: fx.Node) -> tuple[fx.Node, Resize | Fill] | None:
    """What a node of padding is put around, and which one it is. None for any other node."""
    filled = _filled(node)
    if filled is not None:
        x, where, number = filled
        behind = 0
        if where.target is aten.reshape.default:
            behind = len(shape(where)) - 1
            if any(size != 1 for size in shape(where)[1:]):
                return None
            where = where.all_input_nodes[0]
        if where.target is not padding_of:
            return None
        count, *cuts = where.args[:-1]
        return x, Fill(len(shape(x)) - 1 - behind, number, count, tuple(cuts))  # type: ignore[arg-type]
    inner, parts = node, 1
    if node.target is aten.reshape.default:
        inner = node.all_input_nodes[0]
    found = _resized(inner)
    if found is None:
        return None
    x, dim, before, after = found
    if inner is not node:  # of several parts, which are a dim of their own meanwhile
        if x.target is not aten.reshape.default or dim == 0:
            return None
        dim, parts = dim - 1, shape(x)[dim - 1]
        x = x.all_input_nodes[0]
        own = [*shape(x)[:dim], parts, before, *shape(x)[dim + 1 :]], [*shape(x)[:dim], parts * after]
        if list(shape(inner.all_input_nodes[0])) != own[0] or list(shape(node)) != [*own[1], *shape(x)[dim + 1 :]]:
            return None
    return x, Resize(dim, parts, parts * before, parts * after)


def _resized(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    if node.target is aten.slice.Tensor:
        x, dim, start, end, *step = node.args
        fits = start == 0 and not step
        return (x, dim, shape(x)[dim], end) if fits and isinstance(x, fx.Node) else None  # type: ignore[index,return-value]
    if node.target is aten.constant_pad_nd.default and len(node.args) == 2:
        x, widths = node.all_input_nodes[0], list(node.args[1])  # type: ignore[arg-type]
        dim = len(shape(x)) - len(widths) // 2
        if widths and not any(widths[:-1]) and widths[-1] > 0:
            return x, dim, shape(x)[dim], shape(x)[dim] + widths[-1]
    return None


def without_fill(node: fx.Node) -> fx.Node:
    """What padding was replaced in."""
    while (found := peel(node)) is not None and isinstance(found[1], Fill):
        node = found[0]
    return node


# -- the check


def check_padding(local: LocalProgram, rules: Rules) -> None:
    """Raises: CompileError QN209 with the operator that padding would reach, or of which ranks have another part."""
    sharded = local.staged.sharded
    if not any(strategy.uneven for strategies in sharded.strategies.values() for strategy in strategies):
        _check_even(local)
        return
    factors = rules.factors(sharded.program.graph)
    known: dict[Value, Numbers] = {}
    for node in sharded.program.graph.nodes:
        if node.op == "placeholder":
            known[node, 0] = dict.fromkeys(range(len(shape(node))), 0.0)  # what ranks have in their memory
        if node.op != "call_function" or is_getitem(node) or node not in local.reads:
            continue
        rule, reading = factors[node], Reading(node, factors[node])
        for axis, chosen in zip(sharded.axes, sharded.strategies[node], strict=True):
            reading.axis(chosen, axis.size)
        given = [origin(x) for x in tensor_inputs(node)]
        read = [_check_way(local, node, i, known.get(source, {})) for i, source in enumerate(given)]
        for name in sorted(reading.padded):
            _check_operator(local, read, node, rule, name)
        steady = _steady(local, read, node, rule, reading.padded)
        for index in range(len(values(node))):
            if (node, index) in local.parts:
                zeros: Numbers = dict.fromkeys(range(len(values(node)[index].shape)), 0.0) if steady else {}
                known[node, index] = zeros | _fills_of(local.parts[node, index])


def _check_even(local: LocalProgram) -> None:
    """Where every size divides, nothing is padded, and what an operator reads are the chunks."""
    sharded = local.staged.sharded
    for node, reads in local.reads.items():
        for position, (given, read) in enumerate(zip(tensor_inputs(node), reads, strict=True)):
            source = origin(given)
            chunk = held(values(source[0])[source[1]].shape, sharded.wanted(node, position), sharded.axes)[-1]
            if shape(read) != chunk:
                raise _fail(node, f"{read.name} is {shape(read)} where ranks have {chunk}")
            for one in _chain(read, local.parts[source]):
                if peel(one) is not None:
                    raise _fail(node, f"{one.name} is padding on the way of {given.name}, whose sizes divide")


def _steady(local: LocalProgram, read: Sequence[Numbers], node: fx.Node, rule: Factors, names: Iterable[str]) -> bool:
    """Whether an operator works on each index of padding alone, reads zeros there, and makes zeros of zeros."""
    sharded = local.staged.sharded
    two = node.target not in (aten.add.Tensor, aten.sub.Tensor) or len(rule.inputs) == 2  # and no number
    linear = rule.linear == ((0,),) and len(rule.inputs) == 1 and node.target is not with_tangent
    if node.target is scaled_cast:  # 0 times any scale
        linear, read = True, read[:1]
    every = all(_dim(dims, name) is not None for name in names for dims in (*rule.inputs, *rule.outputs))
    return (linear or (node.target in _ZERO_OF_ZEROS and two)) and every and all(
        found.get(dim) == 0
        for i, found in enumerate(read)
        for dim in padded(shape(tensor_inputs(node)[i]), sharded.wanted(node, i), sharded.axes)
    )  # fmt: skip


def _fills_of(part: fx.Node) -> Numbers:
    found: Numbers = {}
    while (one := peel(part)) is not None and isinstance(one[1], Fill):
        part = one[0]
        found = {one[1].dim: one[1].number} | found
    return found


def _check_way(local: LocalProgram, node: fx.Node, position: int, known: Numbers) -> Numbers:
    """What carries a value to an operator makes it longer before it is cut, shorter after it is joined, and replaces
    nothing but padding. ``known``: what is in the padding of the value's dims; returns what is where it is read."""
    sharded, axes, read = local.staged.sharded, local.staged.sharded.axes, local.reads[node][position]
    source = origin(tensor_inputs(node)[position])
    whole, start = values(source[0])[source[1]].shape, local.parts[source]
    chain = list(_chain(read, start))[::-1]
    here, expected, there = start, list[Resize](), dict(known)
    state: list[AxisType | None] = list(sharded.produced(*source))
    for one in chain:
        found = peel(one)
        how = None if found is None else found[1]
        if isinstance(how, Resize):
            if expected and expected[0] == how:
                expected.pop(0)
            elif not _before(one, chain, axes, state, whole, how):
                raise _fail(node, f"{one.name} makes {shape(here)} {shape(one)}")
            elif how.dim not in padded(whole, state, axes):
                there[how.dim] = 0.0
        elif how is not None:
            _check_fill(node, one, how, whole, state, axes)
            there[how.dim] = how.number
        elif one.target in _MOVES:
            if expected:
                raise _fail(node, f"padding is left before {one.name}")
            index, before, after = _move(one, axes)
            old = held(whole, state, axes)[-1]
            state[index] = after
            new = held(whole, state, axes)[-1]
            if isinstance(before, Shard) and isinstance(after, Shard) and before.dim == after.dim:
                there.pop(before.dim, None)
            elif isinstance(before, Shard) and old[before.dim] * axes[index].size != new[before.dim]:
                have = old[before.dim] * axes[index].size
                expected = [Resize(before.dim, before.parts, have, new[before.dim])]
        elif one.target is not aten._to_copy.default:
            raise _fail(node, f"{one.name} is on the way of {source[0].name}")
        here = one
    if expected or shape(read) != held(whole, state, axes)[-1]:
        raise _fail(node, f"{read.name} is {shape(read)} where ranks have {held(whole, state, axes)[-1]}")
    return there


def _before(
    one: fx.Node, chain: Sequence[fx.Node], axes: Sequence[Axis], state: Sequence[object], whole: Sequence[int],
    found: Resize,
) -> bool:  # fmt: skip
    """Whether the next move cuts what was made longer here, into full chunks."""
    move = next((other for other in chain[chain.index(one) + 1 :] if other.target in _MOVES), None)
    if move is None:
        return False
    index, _, after = _move(move, axes)
    then = [after if i == index else kind for i, kind in enumerate(state)]
    if not isinstance(after, Shard) or after.dim != found.dim or after.parts != found.parts:
        return False
    return found.after == held(whole, then, axes)[-1][after.dim] * axes[index].size


def _move(node: fx.Node, axes: Sequence[Axis]) -> tuple[int, AxisType | None, AxisType | None]:
    if node.target is microbatch:
        index = next(i for i, axis in enumerate(axes) if axis.role == "time")
        return index, None, Shard(*map(int, node.args[2:]))  # type: ignore[arg-type]
    index = next(i for i, axis in enumerate(axes) if axis.name == node.args[1])
    if node.target is share:
        return index, None, None
    return index, parse_type(str(node.args[3])), parse_type(str(node.args[4]))


def _chain(read: fx.Node, start: fx.Node) -> Iterator[fx.Node]:
    """From what an operator reads back to what was made."""
    here = read
    while here is not start:
        yield here
        found = peel(here)
        if found is None and here.target is aten._to_copy.default:  # the copy of a parameter
            return
        here = found[0] if found is not None else here.all_input_nodes[0]


def _check_fill(
    user: fx.Node, node: fx.Node, fill: Fill, whole: Sequence[int], state: Sequence[object], axes: Sequence[Axis]
) -> None:
    """Padding is replaced where the type has it, and nowhere else."""
    cuts = [
        (axis.name, axis.size, kind.parts, kind.unit)
        for axis, kind in zip(axes, state, strict=True)
        if isinstance(kind, Shard) and kind.dim == fill.dim
    ]
    says = (whole[fill.dim], *([list(column) for column in zip(*cuts, strict=True)] or [[], [], [], []]))
    if fill.cuts != says or fill.count != shape(node)[fill.dim]:
        raise _fail(user, f"{node.name} replaces {fill.cuts} of {fill.count} where ranks have {says}")


def _check_operator(local: LocalProgram, there: Sequence[Numbers], node: fx.Node, rule: Factors, name: str) -> None:
    """A factor with padding is in every operand, or is zeros in those that have it."""
    values_read = rule.inputs[:1] if node.target is after_gradients else rule.inputs  # others have no value
    read = [_dim(dims, name) for dims in values_read]
    made = [_dim(dims, name) for dims in rule.outputs]
    alone = None not in (*read, *made)
    if node.target is declare_gradient:
        if read[1] is not None and there[1].get(read[1]) != 0:
            raise _fail(node, f"the gradient of {tensor_inputs(node)[0].name} has padding in dim {read[1]}")
        return
    if name in rule.settled and node.target is not block_max:
        return _check_classes(local, node)
    for position, dim in enumerate(read):
        x, given = local.reads[node][position], tensor_inputs(node)[position]
        if dim is None:
            continue
        divides = _may_divide(rule, position) and None not in made
        integer = not (value(given).is_floating_point() or value(given).is_complex()) and value(x).dtype != torch.bool
        if alone and not (integer and (rule.whole or any(v.is_floating_point() for v in values(node)))):
            _check_own(local, node, position, dim, x)
            continue
        if not alone and divides and there[position].get(dim) != 1:
            raise _fail(node, f"{x.name} may divide by padding of dim {dim}")
        if not divides and there[position].get(dim) != 0:
            raise _fail(node, f"{x.name} has padding in dim {dim}, over which {node.name} or its backward adds up")
        if None in made and sum(one is not None for one in read) < 2 and node.target not in _NAMED_ROWS:
            _check_own(local, node, position, dim, x)
    for index, dim in enumerate(made):
        part = local.parts.get((node, index))
        flows = needs_grad(node) and part is not None and values(node)[index].is_floating_point()
        if dim is None or alone or not flows:
            continue
        assert part is not None
        if _fills_of(part).get(dim) != 0:
            raise _fail(node, f"the gradient of {part.name} has padding in dim {dim}, over which it is added up")
        _check_result(local, node, index, part)


_NAMED_ROWS = EXPERT_LAYERS | {aten.embedding.default, embedding_rows}  # read rows that ids name


def _may_divide(rule: Factors, position: int) -> bool:
    """Whether an operator on single elements need not be linear in an input."""
    plain = rule.product is None and not rule.whole and not rule.additive
    return plain and all(position not in group for group in rule.linear)


def _check_own(local: LocalProgram, node: fx.Node, position: int, dim: int, x: fx.Node) -> None:
    """A parameter whose padding would get a gradient here is read through zeros."""
    source = origin(tensor_inputs(node)[position])
    known = leaf(source[0])
    stored = local.parts.get(source)
    if known is not None and known.trainable and x is stored and dim in padded(
        shape(source[0]), local.staged.sharded.produced(source[0]), local.staged.sharded.axes
    ):  # fmt: skip
        raise _fail(node, f"the padding of {known.name} in dim {dim} gets a gradient")


def _check_classes(local: LocalProgram, node: fx.Node) -> None:
    """Classes that are none are the least likely ones."""
    if node.target is not row_nll:
        raise _fail(node, f"{node.target} settles what it adds up, and says nothing of padding")
    logits = local.reads[node][0]
    terms = [n for n in local.graph.nodes if n.target is nll_terms and without_fill(n.args[0]) is without_fill(logits)]
    for one in terms:
        x = one.args[0]
        least = torch.finfo(value(x).dtype).min
        found = peel(x)
        if found is None or not isinstance(found[1], Fill) or found[1].dim != 1 or found[1].number != least:
            raise _fail(node, f"{one.name} counts classes that are padding")
        sharded = local.staged.sharded
        _check_fill(node, x, found[1], shape(tensor_inputs(node)[0]), sharded.wanted(node, 0), sharded.axes)


def _check_result(local: LocalProgram, node: fx.Node, index: int, part: fx.Node) -> None:
    sharded, here = local.staged.sharded, part
    while (found := peel(here)) is not None and isinstance(found[1], Fill):
        _check_fill(node, here, found[1], values(node)[index].shape, sharded.produced(node, index), sharded.axes)
        here = found[0]


def _dim(dims: Dims, name: str) -> int | None:
    return next((d for d, names in enumerate(dims) if name in names), None)


def _fail(node: fx.Node, what: str) -> CompileError:
    return CompileError("QN209", f"padding check: {what}", where=facts(node).where, fix=REPORT)
