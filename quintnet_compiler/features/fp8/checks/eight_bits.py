"""Check of linear layers in 8 bits: read backwards, what stands for one is that layer, with both of its gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from ....checks.failure import check_failure
from ....core.annotations import is_getitem, leaf, needs_grad, origin, shape, tensor_inputs, value
from ....ir.program import Program, outputs
from ....ir.value_numbers import NumberRead, ValueNumbers
from ....ops.catalog import op_spec
from ....ops.experts.expert_linear import expert_linear
from ..ops.scaled_groups import scaled_expert_linear
from ..ops.scaled_products import block_max, block_scale, scaled_cast, scaled_matmul

_fail = partial(check_failure, "8-bit check")
aten = torch.ops.aten


def check_eight_bits(source: Program, rewritten: Program) -> None:
    """Check that outputs of the rewritten program are those of ``source``.

    Linear layers may be products of 8-bit numbers: of the layer's own input and weight, scaled by the largest numbers
    of these, with the gradients of a linear layer.

    Raises:
        CompileError: QN209 with what differs.
    """
    numbers = ValueNumbers()
    old, new = _numbered(source, numbers), _numbered(rewritten, numbers)
    for left, right in zip(outputs(source.graph), outputs(rewritten.graph), strict=True):
        if old[left] != new[right]:
            raise _fail(f"{right.name} is not what {left.name} was", right)
    impure = [[numbered[n] for n in numbered if n.is_impure() and n.op != "placeholder"] for numbered in (old, new)]
    if impure[0] != impure[1]:
        raise _fail("calls that nobody reads are other ones", None)


def _numbered(program: Program, numbers: ValueNumbers) -> dict[fx.Node, int]:
    """Return a number for what each node stands for. A layer's bias counts as added afterwards."""
    node_numbers: dict[fx.Node, int] = {}
    number = numbers.number
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            info = leaf(node)
            name = info.name if info is not None else ""
            node_numbers[node] = number("leaf", node.name, name, str(value(node).dtype))
        elif is_getitem(node):
            node_numbers[node] = number("part", node_numbers[origin(node)[0]], int(node.args[1]))
        elif node.target is scaled_expert_linear:
            _check_experts(node)
            node_numbers[node] = numbers.call(None, expert_linear, (node.args[:5], {}), node_numbers.__getitem__)
        elif (layer := _layer(node)) is not None:
            node_numbers[node] = number("linear", *(node_numbers[n] for n in layer))
        elif node.target is aten.linear.default:
            x, weight, *bias = (node_numbers[n] for n in tensor_inputs(node))
            node_numbers[node] = number("linear", x, weight)
            if bias:
                added: Any = (NumberRead(node_numbers[node]), NumberRead(bias[0])), {}
                node_numbers[node] = numbers.call(None, aten.add.Tensor, added, node_numbers.__getitem__)
        else:
            node_numbers[node] = numbers.call(None, node.target, (node.args, node.kwargs), node_numbers.__getitem__)
    return node_numbers


def _layer(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the input and the weight of the layer for which ``node`` stands.

    None if it is no product of 8-bit numbers, or a gradient.
    """
    if node.target is scaled_matmul:
        if node.args[4] == "mk,nk->mn" and not any(op_spec(user).user_derivative == "tangent" for user in node.users):
            return _operands(node)
        return None
    if op_spec(node).user_derivative != "end":
        return None
    both, index = origin(tensor_inputs(node)[0])
    if op_spec(both).user_derivative != "tangent" or both.args[0].target is not scaled_matmul:  # type: ignore[union-attr]
        return None
    product: Any = both.args[0]
    x, weight = _operands(product)
    if (
        value(product).dtype is not value(x).dtype
        or product.args[4] != "mk,nk->mn"
        or index != 0
        or both.args[1] is not True
    ):
        raise _fail(f"{product.name} is not the product of a linear layer", node)
    _check_gradients(node, both, (x, weight))
    return x, weight


def _check_gradients(node: fx.Node, both: fx.Node, layer: tuple[fx.Node, fx.Node]) -> None:
    """Check that each input of a layer's product that needs a gradient gets one, in its dtype."""
    product: Any = both.args[0]
    remaining = [n for n in layer if needs_grad(n)]
    for end_input in tensor_inputs(node)[1:]:
        declaration = origin(end_input)[0]
        if op_spec(declaration).user_derivative != "declaration" or declaration.args[0] not in remaining:
            raise _fail(f"{declaration.name} is no gradient that {product.name} has", node)
        source, gradient = tensor_inputs(declaration)
        remaining.remove(source)
        _check_gradient(gradient, both, source is layer[0], layer)
        if value(gradient).dtype is not value(source).dtype:
            raise _fail(f"{gradient.name} has another dtype than {source.name}", node)
    if remaining:
        raise _fail(f"{remaining[0].name} gets no gradient of {product.name}", node)


def _check_gradient(gradient: fx.Node, both: fx.Node, of_input: bool, layer: tuple[fx.Node, fx.Node]) -> None:
    x, weight = layer
    if gradient.target is scaled_matmul:
        equation, other = ("mn,nk->mk", weight) if of_input else ("mn,mk->nk", x)
        tangent, second = _operands(gradient)
        right = gradient.args[4] == equation and second is other
    else:  # of a weight, in the bits that it had
        rows = gradient.args[0]
        right = not of_input and gradient.target is aten.mm.default and rows.target is aten.t.default  # type: ignore[union-attr]
        tangent, second = (_flat(n) for n in (rows.args[0], gradient.args[1])) if right else (gradient, gradient)  # type: ignore[union-attr]
        right = right and _attached(second) is x
    if not right or not is_getitem(tangent) or origin(tangent) != (both, 1):
        raise _fail(f"{gradient.name} is not the gradient of a linear layer", gradient)


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return what a product multiplies, before it was cast, each operand by the largest numbers that it has itself."""
    a, b, scale_a, scale_b = tensor_inputs(node)
    operands = _scaled(node, a, scale_a), _scaled(node, b, scale_b)
    if len(node.args) > 6 and node.args[6] and not all(scale.args[2] is True for scale in (scale_a, scale_b)):
        raise _fail(f"{node.name} takes scales for powers of two, which they need not be", node)
    return operands


def _scaled(node: fx.Node, cast: fx.Node, scale: fx.Node) -> fx.Node:
    """Return what an operand of ``node`` was before it was cast."""
    largest = scale.args[0]
    kinds = (cast.target, scale.target, getattr(largest, "target", None))
    if kinds != (scaled_cast, block_scale, block_max) or cast.args[1] is not scale:
        raise _fail(f"{node.name} multiplies {cast.name}, which {scale.name} does not scale", node)
    assert isinstance(largest, fx.Node)
    if largest.args[0] is not cast.args[0] or scale.args[1] is not cast.args[2]:
        raise _fail(f"{scale.name} is the scale of something else than {cast.name}", node)
    return _attached(tensor_inputs(cast)[0])


def _check_experts(node: fx.Node) -> None:
    """Check that both 8-bit copies of the weight are its own.

    There is a scale for each expert, or for blocks of its matrix that are as those of rows along the dim that the
    product sums over, and single numbers or as those of rows along the other.
    """
    weight, transposed, args = tensor_inputs(node)[2], node.args[4], node.args
    blocks: Any = args[9]
    outside, inside = (2, 1) if transposed else (1, 2)
    for (cast, scale), kept in (((args[5], args[6]), outside), ((args[7], args[8]), inside)):
        if cast is None and kept is inside and not needs_grad(tensor_inputs(node)[0]):
            continue
        if not isinstance(cast, fx.Node) or not isinstance(scale, fx.Node):
            raise _fail(f"{node.name} lacks {weight.name} in 8 bits", node)
        if _scaled(node, cast, scale) is not weight or value(cast).dtype is not torch.float8_e4m3fn:
            raise _fail(f"{node.name} multiplies {cast.name}, which is not {weight.name} in 8 bits", node)
        size = shape(weight)
        square = {0: size[0], inside: 1, outside: 1}
        for dim, block in zip((inside, outside), blocks, strict=False):
            square[dim] = size[dim] // block if block else 1
        single = {**square, kept: size[kept]} if blocks else square
        if dict(enumerate(shape(scale))) not in (square, single):
            raise _fail(f"{scale.name} of {shape(scale)} is no scale of the matrices {size} of {node.name}", node)


def _attached(node: fx.Node) -> fx.Node:
    return tensor_inputs(node)[0] if op_spec(node).detaches else node


def _flat(node: Any) -> fx.Node:
    """Return a matrix before its rows were one dim."""
    matrix: fx.Node = tensor_inputs(node)[0] if op_spec(node).reshapes else node
    return matrix
