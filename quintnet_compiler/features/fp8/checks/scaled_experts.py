"""Check of an expert layer in 8 bits on ranks, read from its product backwards.

Each operand is scaled by the largest numbers of the right rows on the right ranks, and the gradients are those of a
linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from ....checks.extensions import LayerError
from ....core.annotations import is_getitem, needs_grad, origin, tensor_inputs, value
from ....core.sharding import Shard
from ....ir.program import Axis, Strategy
from ....ops.catalog import op_spec
from ....ops.experts.grouped_rows import grouped_bias_grad, grouped_weight_grad
from ..ops.scaled_groups import group_cast, group_max, scaled_grouped_linear, scaled_grouped_weight_grad
from ..ops.scaled_products import block_max, block_scale, scaled_cast

aten = torch.ops.aten
Granularity = Literal["rows", "all", "columns"]  # what has a scale of its own (or each block of it)


@dataclass(frozen=True)
class ScaledLayer:
    """A layer as the program has it, with the nodes that stand for its inputs on a rank.

    Attributes:
        node: the operator of the program.
        weights: the weight, the bias if it has one, and the 8-bit copies of the weight, each followed by its scale: one
            copy, or two if rows have a gradient.
        axes: the axes of the mesh.
        strategies: how the operator runs on each axis.
    """

    node: fx.Node
    weights: Sequence[fx.Node]
    axes: Sequence[Axis]
    strategies: Sequence[Strategy]

    def read_product(self, product: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return the rows that ``product`` multiplies, and the node with the end of each expert's rows.

        Raises:
            LayerError: if it is another product, or has other gradients.
        """
        matmul = product
        if op_spec(product).user_derivative == "end":
            pair, index = origin(tensor_inputs(product)[0])
            passed_on = op_spec(pair).user_derivative == "tangent" and index == 0 and pair.args[1] is True
            _expect(passed_on, product, "passes on no product")
            matmul = tensor_inputs(pair)[0]
        _expect(matmul.target is scaled_grouped_linear, matmul, "is no product of 8-bit rows")
        rows8, ends, _, scale, *_ = tensor_inputs(matmul)
        rows = self._unscaled(rows8, scale, ends, self._granularity_of_rows, backward=False)
        self._check_operands(matmul, rows8, ends, scale, forward=True)
        _expect(value(matmul).dtype is value(rows).dtype, matmul, "has another dtype than its rows")
        self._check_gradients(product, matmul, rows, ends)
        return rows, ends

    @property
    def _blocks(self) -> Sequence[int]:
        blocks: Any = self.node.args[9]
        return tuple(blocks)

    @property
    def _granularity_of_rows(self) -> Granularity:
        return "rows" if self._blocks else "all"

    @property
    def _bias(self) -> fx.Node | None:
        return self.weights[1] if self.node.args[3] is not None else None

    @property
    def _transposed(self) -> bool:
        return bool(self.node.args[4])

    def _check_operands(self, matmul: fx.Node, rows8: fx.Node, ends: fx.Node, scale: fx.Node, *, forward: bool) -> None:
        """Check that ``matmul`` multiplies ``rows8`` with the 8-bit weight for this direction."""
        copies = tuple(self.weights[1 if self._bias is None else 2 :])
        weight8, weight_scale = copies[:2] if forward else copies[2:]
        args: Any = matmul.args
        bias = None if args[5] is None else _attached(args[5])
        multiplied = args[:2] == (rows8, ends) and args[2] is weight8
        scaled = args[3] is scale and args[4] is weight_scale
        added = bias is (self._bias if forward else None)
        turned = args[6] is (self._transposed is forward)
        _expect(multiplied and scaled and added and turned, matmul, "multiplies other operands")

    def _check_gradients(self, product: fx.Node, matmul: fx.Node, rows: fx.Node, ends: fx.Node) -> None:
        """Check that each input that needs a gradient has one declared, and that it is the right one."""
        missing = [n for n in (rows, self.weights[0], self._bias) if n is not None and needs_grad(n)]
        for result in tensor_inputs(product)[1:] if op_spec(product).user_derivative == "end" else []:
            declaration = origin(result)[0]
            declares = op_spec(declaration).user_derivative == "declaration" and declaration.args[0] in missing
            _expect(declares, declaration, "is no gradient of the layer")
            operand, gradient = tensor_inputs(declaration)
            missing.remove(operand)
            if operand is rows:
                self._check_rows_gradient(gradient, ends, matmul)
            elif operand is self._bias:
                _check_bias_gradient(gradient, ends, matmul)
            else:
                self._check_weight_gradient(gradient, rows, ends, matmul)
            same_dtype = value(gradient).dtype is value(operand).dtype
            _expect(same_dtype, gradient, f"has another dtype than {operand.name}")
        _expect(not missing, product, f"lacks the gradient of {', '.join(n.name for n in missing)}")

    def _check_rows_gradient(self, gradient: fx.Node, ends: fx.Node, matmul: fx.Node) -> None:
        _expect(gradient.target is scaled_grouped_linear, gradient, "is no gradient of rows")
        tangent8, _, _, scale = tensor_inputs(gradient)[:4]
        self._check_operands(gradient, tangent8, ends, scale, forward=False)
        tangent = self._unscaled(tangent8, scale, ends, self._granularity_of_rows, backward=True)
        _check_tangent(tangent, matmul)

    def _check_weight_gradient(self, gradient: fx.Node, rows: fx.Node, ends: fx.Node, matmul: fx.Node) -> None:
        args: Any = gradient.args
        if self.node.args[12] is not True:  # the gradient is computed in the bits of the rows
            matches = gradient.target is grouped_weight_grad and args[2:] == (ends, self._transposed)
            _expect(matches and _attached(args[1]) is rows, gradient, "is no gradient of the weight")
            return _check_tangent(tensor_inputs(gradient)[0], matmul)
        matches = gradient.target is scaled_grouped_weight_grad and args[2] is ends and args[5] is self._transposed
        _expect(matches, gradient, "is no 8-bit gradient of the weight")
        tangent8, rows8, _, tangent_scale, rows_scale = tensor_inputs(gradient)
        granularity: Granularity = "columns" if self._blocks else "all"
        read = self._unscaled(rows8, rows_scale, ends, granularity, backward=False)
        _expect(read is rows, gradient, "reads other rows")
        tangent = self._unscaled(tangent8, tangent_scale, ends, granularity, backward=True)
        return _check_tangent(tangent, matmul)

    def _unscaled(
        self, cast: fx.Node, scale: fx.Node, ends: fx.Node, granularity: Granularity, *, backward: bool
    ) -> fx.Node:
        """Return the value that was cast, which must be scaled by its own largest numbers."""
        dtype = self.node.args[10] if backward else torch.float8_e4m3fn
        args: Any = cast.args
        if granularity == "columns":
            matches = cast.target is group_cast and args[1:] == (ends, scale, dtype)
            _expect(matches, cast, "is not scaled by columns")
        else:
            matches = cast.target is scaled_cast and args[1:] == (scale, dtype)
            _expect(matches, cast, "is not scaled as it should")
        matches = scale.target is block_scale and scale.args[1:] == (dtype, self.node.args[11])
        _expect(matches, scale, "is no scale of this format")
        largest, axes = largest_over(tensor_inputs(scale)[0])
        expected_axes = self._axes_sharing_a_scale(granularity, backward)
        message = f"is the largest over {axes}, and not over {expected_axes}"
        _expect(sorted(axes) == sorted(expected_axes), scale, message)
        expected = self._largest(granularity, args[0], ends, largest, scale, backward)
        message = f"is not the largest of {granularity} of {args[0].name}"
        _expect((largest.target, largest.args) == expected, scale, message)
        return _attached(args[0])

    def _largest(
        self, granularity: Granularity, x: fx.Node, ends: fx.Node, largest: fx.Node, scale: fx.Node, backward: bool
    ) -> tuple[Any, Any]:
        """Return the operator and the arguments that compute the largest numbers of ``x``."""
        if granularity == "rows":
            return block_max, (x, [1, self._blocks[backward]])
        groups = largest if granularity == "columns" else tensor_inputs(largest)[0]
        _expect(groups.target is group_max and groups.args == (x, ends), scale, "is that of other rows")
        return (group_max, groups.args) if granularity == "columns" else (block_max, (groups, [0, 0]))

    def _axes_sharing_a_scale(self, granularity: Granularity, backward: bool) -> list[str]:
        """Return the axes over which ranks have parts of what has one scale."""
        names = []
        for axis, strategy in zip(self.axes, self.strategies, strict=True):
            if axis.role == "time":
                continue
            inside = strategy.inside or (strategy.inputs[0], strategy.outputs[0])
            features = _splits(inside[backward], 1)
            rows, experts = _splits(strategy.inputs[0], 0), _splits(strategy.inputs[2], 0)
            shared = {
                "rows": features and not (granularity == "rows" and self._blocks[backward]),
                "columns": rows and not experts,
                "all": features or rows or experts,
            }
            if shared[granularity]:
                names.append(axis.name)
        return names


def largest_over(node: fx.Node) -> tuple[fx.Node, list[str]]:
    """Return the largest numbers of one rank, and the axes over which ``node`` takes the largest of ranks.

    Raises:
        LayerError: if something else is computed on the way.
    """
    axes: list[str] = []
    while node.target is aten.amax.default:
        gathered = tensor_inputs(node)[0]
        gathers = op_spec(gathered).converts and gathered.args[3:] == ("S(0)", "I") and node.args[1:] == ([0],)
        local = tensor_inputs(gathered)[0] if gathers else gathered
        matches = gathers and local.target is aten.unsqueeze.default and local.args[1:] == (0,)
        _expect(matches, node, "is no largest number of all ranks")
        axes.append(str(gathered.args[1]))
        node = tensor_inputs(local)[0]
    return node, axes


def _check_bias_gradient(gradient: fx.Node, ends: fx.Node, matmul: fx.Node) -> None:
    tangent = tensor_inputs(gradient)[0]
    _expect(gradient.target is grouped_bias_grad and gradient.args[1] is ends, gradient, "is of no bias")
    _check_tangent(tangent, matmul)


def _check_tangent(node: fx.Node, matmul: fx.Node) -> None:
    pair, index = origin(node)
    matches = is_getitem(node) and index == 1 and op_spec(pair).user_derivative == "tangent" and pair.args[0] is matmul
    _expect(matches, node, f"is not the gradient of {matmul.name}")


def _splits(kind: object, dim: int) -> bool:
    return isinstance(kind, Shard) and kind.dim == dim


def _attached(node: fx.Node) -> fx.Node:
    """Return what ``node`` detaches, or ``node`` itself."""
    return tensor_inputs(node)[0] if op_spec(node).detaches else node


def _expect(holds: bool, node: fx.Node, message: str) -> None:
    if not holds:
        raise LayerError(f"{node.name} {message}")


def read_product(
    node: fx.Node, weights: Sequence[fx.Node], axes: Sequence[Axis], strategies: Sequence[Strategy], product: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """Return the rows that the product of a layer multiplies, and the node with the end of each expert's rows.

    Raises:
        LayerError: if it is another product, or has other gradients.
    """
    return ScaledLayer(node, weights, axes, strategies).read_product(product)


def check_largest(node: fx.Node, result: fx.Node, axes: Sequence[str]) -> None:
    """Check that the largest number of a block is that of all ranks with parts of it.

    Raises:
        LayerError: if it is another number, or that of other ranks.
    """
    largest, gathered_over = largest_over(result)
    if largest.target is not block_max or sorted(gathered_over) != sorted(axes):
        raise LayerError(f"{node.name} is the largest over {gathered_over} where ranks over {axes} have parts")
