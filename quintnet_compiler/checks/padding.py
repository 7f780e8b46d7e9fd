"""Check of the padding of sizes that do not divide: it is where the types say, and reaches no element of the model.

A rank's chunk of n indices has ceil(n / ranks) places. What an operator makes of padding may be anything, so an
operator that lacks a padded factor in some operand (it adds up over it, forward or backward) must read zeros there, and
must get a gradient of zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from ..core.annotations import is_getitem, leaf, needs_grad, origin, shape, tensor_inputs, value, values
from ..core.sharding import AxisType, Shard, parse_type
from ..ir.program import Axis, LocalProgram
from ..ops.catalog import op_spec
from ..ops.cross_entropy import nll_terms, row_nll
from ..ops.rules.notation import Dims, Factors
from .failure import check_failure
from .padding_nodes import Fill, Resize, dims_with_padding, fills_of, local_shapes, peel, without_fill
from .strategies import Reading, Rules

_fail = partial(check_failure, "padding check")
aten = torch.ops.aten
Value = tuple[fx.Node, int]
Numbers = dict[int, float]  # dim: the number that is in its padding, where that is certain
# 0 where all that they read is 0, and so is the derivative times a gradient of 0
_ZERO_OF_ZEROS = frozenset(
    {
        aten.relu.default, aten.gelu.default, aten.silu.default, aten.tanh.default, aten.square.default,
        aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten._to_copy.default,
    }
)  # fmt: skip


def check_padding(local: LocalProgram, rules: Rules) -> None:
    """Check what every operator reads.

    Raises:
        CompileError: QN209 with the operator that padding would reach, or of which ranks have another part.
    """
    sharded = local.staged.sharded
    if not any(strategy.uneven for strategies in sharded.strategies.values() for strategy in strategies):
        _check_even(local)
        return
    factors = rules.factors(sharded.program.graph)
    fills: dict[Value, Numbers] = {}
    for node in sharded.program.graph.nodes:
        if node.op == "placeholder":
            fills[node, 0] = _zeros(shape(node))  # ranks store zeros as padding
        if node.op != "call_function" or is_getitem(node) or node not in local.reads:
            continue
        _check_node(local, node, factors[node], fills)


def _zeros(dims: Sequence[int]) -> Numbers:
    return dict.fromkeys(range(len(dims)), 0.0)


def _check_even(local: LocalProgram) -> None:
    """Check that nothing is padded where every size divides, and that operators read their chunks."""
    sharded = local.staged.sharded
    for node, reads in local.reads.items():
        for position, (operand, read) in enumerate(zip(tensor_inputs(node), reads, strict=True)):
            source = origin(operand)
            sizes = values(source[0])[source[1]].shape
            chunk = local_shapes(sizes, sharded.wanted(node, position), sharded.axes)[-1]
            if shape(read) != chunk:
                raise _fail(f"{read.name} is {shape(read)} where ranks have {chunk}", node)
            for step in _steps_back(read, local.parts[source]):
                if peel(step) is not None:
                    raise _fail(f"{step.name} is padding on the way of {operand.name}, whose sizes divide", node)


def _check_node(local: LocalProgram, node: fx.Node, rule: Factors, fills: dict[Value, Numbers]) -> None:
    """Check what ``node`` reads, and add what is in the padding of its results to ``fills``."""
    sharded = local.staged.sharded
    reading = Reading(node, rule)
    for axis, strategy in zip(sharded.axes, sharded.strategies[node], strict=True):
        reading.apply_strategy(strategy, axis.size)
    sources = [origin(x) for x in tensor_inputs(node)]
    read = [_check_way(local, node, position, fills.get(source, {})) for position, source in enumerate(sources)]
    for name in sorted(reading.padded):
        _check_factor(local, read, node, rule, name)
    keeps_zeros = _keeps_zeros(local, read, node, rule, reading.padded)
    for index, result in enumerate(values(node)):
        if (node, index) in local.parts:
            zeros: Numbers = _zeros(result.shape) if keeps_zeros else {}
            fills[node, index] = zeros | fills_of(local.parts[node, index])


def _reads_padding(node: fx.Node) -> bool:
    """Return whether an operator that settles a factor over ranks takes padding for data, as others do not."""
    return op_spec(node).user_derivative == "declaration" or op_spec(node).cast_step == "largest"


def _keeps_zeros(
    local: LocalProgram, read: Sequence[Numbers], node: fx.Node, rule: Factors, padded: Iterable[str]
) -> bool:
    """Return whether an operator works on each index of padding alone, reads zeros there, and makes zeros of zeros."""
    sharded = local.staged.sharded
    if op_spec(node).cast_step == "cast":  # 0 times any scale
        read = read[:1]
    elif not _makes_zeros_of_zeros(node, rule):
        return False
    tensors = (*rule.inputs, *rule.outputs)
    if any(_dim(dims, name) is None for name in padded for dims in tensors):
        return False
    return all(
        numbers.get(dim) == 0
        for position, numbers in enumerate(read)
        for dim in dims_with_padding(shape(tensor_inputs(node)[position]), sharded.wanted(node, position), sharded.axes)
    )


def _makes_zeros_of_zeros(node: fx.Node, rule: Factors) -> bool:
    if rule.linear == ((0,),) and len(rule.inputs) == 1 and op_spec(node).user_derivative != "tangent":
        return True
    adds_a_number = node.target in (aten.add.Tensor, aten.sub.Tensor) and len(rule.inputs) != 2
    return node.target in _ZERO_OF_ZEROS and not adds_a_number


# -- the way of a value to an operator


def _check_way(local: LocalProgram, node: fx.Node, position: int, fills: Numbers) -> Numbers:
    """Check what carries a value to an operator.

    It pads a value before it is cut, trims it after it is joined, and replaces nothing but padding.

    Args:
        local: the program of a rank.
        node: the operator.
        position: which of its inputs.
        fills: what is in the padding of the value.

    Returns:
        What is in its padding where the operator reads it.
    """
    sharded, read = local.staged.sharded, local.reads[node][position]
    source = origin(tensor_inputs(node)[position])
    sizes, start = values(source[0])[source[1]].shape, local.parts[source]
    way = _Way(node, source[0].name, sharded.axes, sizes, list(sharded.produced(*source)), dict(fills))
    steps = list(_steps_back(read, start))[::-1]
    for index, step in enumerate(steps):
        way.take_step(step, shape(steps[index - 1] if index else start), steps[index + 1 :])
    if way.expected_trim is not None or shape(read) != way.local_shape:
        raise _fail(f"{read.name} is {shape(read)} where ranks have {way.local_shape}", node)
    return way.fills


@dataclass
class _Way:
    """A value on its way to an operator.

    Attributes:
        node: the operator.
        source: the name of the value.
        axes: the axes of the mesh.
        sizes: the whole shape of the value.
        state: the types of the value after the steps so far.
        fills: what is in its padding after the steps so far.
        expected_trim: what must remove the padding of chunks that were joined.
    """

    node: fx.Node
    source: str
    axes: Sequence[Axis]
    sizes: Sequence[int]
    state: list[AxisType | None]
    fills: Numbers
    expected_trim: Resize | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape that a rank has now."""
        return local_shapes(self.sizes, self.state, self.axes)[-1]

    def take_step(self, step: fx.Node, sizes: Sequence[int], later: Sequence[fx.Node]) -> None:
        """Check a step that reads a value of ``sizes``, and apply it."""
        peeled = peel(step)
        change = None if peeled is None else peeled[1]
        if isinstance(change, Resize):
            self._resize(step, change, sizes, later)
        elif change is not None:
            _check_fill(self.node, step, change, self.sizes, self.state, self.axes)
            self.fills[change.dim] = change.number
        elif op_spec(step).is_typed_move:
            self._move(step)
        elif not op_spec(step).casts:
            raise _fail(f"{step.name} is on the way of {self.source}", self.node)

    def _resize(self, step: fx.Node, resize: Resize, sizes: Sequence[int], later: Sequence[fx.Node]) -> None:
        if self.expected_trim == resize:
            self.expected_trim = None
        elif not self._cut_next(resize, later):
            raise _fail(f"{step.name} makes {sizes} {shape(step)}", self.node)
        elif resize.dim not in dims_with_padding(self.sizes, self.state, self.axes):
            self.fills[resize.dim] = 0.0

    def _cut_next(self, resize: Resize, later: Sequence[fx.Node]) -> bool:
        """Return whether the next move cuts what ``resize`` pads into full chunks."""
        move = next((step for step in later if op_spec(step).is_typed_move), None)
        if move is None:
            return False
        index, _, target = _move(move, self.axes)
        if not isinstance(target, Shard) or target.dim != resize.dim or target.parts != resize.parts:
            return False
        state = [target if i == index else kind for i, kind in enumerate(self.state)]
        return resize.after == local_shapes(self.sizes, state, self.axes)[-1][target.dim] * self.axes[index].size

    def _move(self, step: fx.Node) -> None:
        if self.expected_trim is not None:
            raise _fail(f"padding is left before {step.name}", self.node)
        index, source, target = _move(step, self.axes)
        old = self.local_shape
        self.state[index] = target
        if not isinstance(source, Shard):
            return
        dim, size = source.dim, self.local_shape[source.dim]
        joined = old[dim] * self.axes[index].size
        if isinstance(target, Shard) and target.dim == dim:
            self.fills.pop(dim, None)
        elif joined != size:
            self.expected_trim = Resize(dim, source.parts, joined, size)


def _move(node: fx.Node, axes: Sequence[Axis]) -> tuple[int, AxisType | None, AxisType | None]:
    """Return the axis of a move, and the types before and after (None: whole, or a term)."""
    if op_spec(node).cuts_microbatch:
        index = next(i for i, axis in enumerate(axes) if axis.role == "time")
        return index, None, Shard(*map(int, node.args[2:]))  # type: ignore[arg-type]
    index = next(i for i, axis in enumerate(axes) if axis.name == node.args[1])
    if op_spec(node).shares:
        return index, None, None
    return index, parse_type(str(node.args[3])), parse_type(str(node.args[4]))


def _steps_back(read: fx.Node, start: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes from what an operator reads back to the value, which is not among them."""
    node = read
    while node is not start:
        yield node
        peeled = peel(node)
        if peeled is None and op_spec(node).casts:  # the copy of a parameter
            return
        node = peeled[0] if peeled is not None else node.all_input_nodes[0]


def _check_fill(
    user: fx.Node, node: fx.Node, fill: Fill, sizes: Sequence[int], state: Sequence[object], axes: Sequence[Axis]
) -> None:
    """Check that ``node`` fills the padding that the types in ``state`` have, and nothing else."""
    cuts = [
        (axis.name, axis.size, kind.parts, kind.unit)
        for axis, kind in zip(axes, state, strict=True)
        if isinstance(kind, Shard) and kind.dim == fill.dim
    ]
    columns = [list(column) for column in zip(*cuts, strict=True)] or [[], [], [], []]
    expected = (sizes[fill.dim], *columns)
    if fill.cuts != expected or fill.count != shape(node)[fill.dim]:
        raise _fail(f"{node.name} replaces {fill.cuts} of {fill.count} where ranks have {expected}", user)


# -- what an operator makes of padding


@dataclass(frozen=True)
class _FactorUse:
    """The dim that a factor is of each input and result of an operator, or None."""

    rule: Factors
    inputs: list[int | None]
    results: list[int | None]

    @property
    def in_all_tensors(self) -> bool:
        """Return whether the operator works on each index alone."""
        return None not in (*self.inputs, *self.results)

    @property
    def is_summed(self) -> bool:
        """Return whether some result lacks the factor."""
        return None in self.results

    def may_divide(self, position: int) -> bool:
        """Return whether the operator works on single elements, and need not be linear in an input."""
        plain = self.rule.product is None and not self.rule.whole and not self.rule.additive
        linear = any(position in group for group in self.rule.linear)
        return plain and not linear and not self.is_summed


def _check_factor(local: LocalProgram, read: Sequence[Numbers], node: fx.Node, rule: Factors, name: str) -> None:
    """Check that a factor with padding is in every operand, or is zeros in those that have it."""
    if name in rule.settled and not _reads_padding(node):
        return _check_classes(local, node)
    inputs = rule.inputs[:1] if op_spec(node).user_derivative == "end" else rule.inputs  # others have no value
    use = _FactorUse(rule, [_dim(dims, name) for dims in inputs], [_dim(dims, name) for dims in rule.outputs])
    if op_spec(node).user_derivative == "declaration":
        dim = use.inputs[1]
        if dim is not None and read[1].get(dim) != 0:
            raise _fail(f"the gradient of {tensor_inputs(node)[0].name} has padding in dim {dim}", node)
        return
    for position, dim in enumerate(use.inputs):
        if dim is not None:
            _check_operand(local, read[position].get(dim), node, use, position, dim)
    for index, dim in enumerate(use.results):
        if dim is not None and not use.in_all_tensors:
            _check_gradient(local, node, index, dim)


def _check_operand(
    local: LocalProgram, number: float | None, node: fx.Node, use: _FactorUse, position: int, dim: int
) -> None:
    """Check an input with ``number`` in the padding of ``dim``."""
    x = local.reads[node][position]
    if use.in_all_tensors and not _is_index(node, use.rule, tensor_inputs(node)[position], x):
        return _check_stored(local, node, position, dim, x)
    if use.may_divide(position):
        if not use.in_all_tensors and number != 1:
            raise _fail(f"{x.name} may divide by padding of dim {dim}", node)
    elif number != 0:
        raise _fail(f"{x.name} has padding in dim {dim}, over which {node.name} or its backward adds up", node)
    alone = sum(d is not None for d in use.inputs) < 2
    if use.is_summed and alone and not op_spec(node).reads_named_rows:
        _check_stored(local, node, position, dim, x)


def _is_index(node: fx.Node, rule: Factors, operand: fx.Node, x: fx.Node) -> bool:
    """Return whether an operand is of whole numbers that may name elements of another one."""
    number = value(operand).is_floating_point() or value(operand).is_complex() or value(x).dtype == torch.bool
    return not number and (bool(rule.whole) or any(v.is_floating_point() for v in values(node)))


def _check_gradient(local: LocalProgram, node: fx.Node, index: int, dim: int) -> None:
    """Check that the gradient of a result has zeros in the padding of ``dim``, over which it is added up."""
    part = local.parts.get((node, index))
    if part is None or not needs_grad(node) or not values(node)[index].is_floating_point():
        return
    if fills_of(part).get(dim) != 0:
        raise _fail(f"the gradient of {part.name} has padding in dim {dim}, over which it is added up", node)
    sharded = local.staged.sharded
    while (peeled := peel(part)) is not None and isinstance(peeled[1], Fill):
        _check_fill(node, part, peeled[1], values(node)[index].shape, sharded.produced(node, index), sharded.axes)
        part = peeled[0]


def _check_stored(local: LocalProgram, node: fx.Node, position: int, dim: int, x: fx.Node) -> None:
    """Check that the padding of a parameter as it is stored gets no gradient: it must be read through zeros."""
    source, sharded = origin(tensor_inputs(node)[position]), local.staged.sharded
    tensor = leaf(source[0])
    if tensor is None or not tensor.trainable or x is not local.parts.get(source):
        return
    if dim in dims_with_padding(shape(source[0]), sharded.produced(source[0]), sharded.axes):
        raise _fail(f"the padding of {tensor.name} in dim {dim} gets a gradient", node)


def _check_classes(local: LocalProgram, node: fx.Node) -> None:
    """Check that the classes of a loss that are padding have the lowest logits."""
    if node.target is not row_nll:
        raise _fail(f"{node.target} settles what it adds up, and says nothing of padding", node)
    sharded, logits = local.staged.sharded, without_fill(local.reads[node][0])
    for terms in local.graph.nodes:
        if terms.target is not nll_terms or without_fill(terms.args[0]) is not logits:
            continue
        x = terms.args[0]
        peeled = peel(x)
        fill = None if peeled is None else peeled[1]
        if not isinstance(fill, Fill) or (fill.dim, fill.number) != (1, torch.finfo(value(x).dtype).min):
            raise _fail(f"{terms.name} counts classes that are padding", node)
        _check_fill(node, x, fill, shape(tensor_inputs(node)[0]), sharded.wanted(node, 0), sharded.axes)


def _dim(dims: Dims, name: str) -> int | None:
    return next((d for d, names in enumerate(dims) if name in names), None)
