"""Check of a layer of experts in 8 bits on ranks: read backwards, the scales of what it multiplies are the largest
numbers of the right rows on the right ranks, and its gradients are those of a linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from ....core.annotations import is_getitem, needs_grad, origin, tensor_inputs, value
from ....core.sharding import Shard
from ....ir.program import Axis, Strategy
from ....ops.collectives import convert
from ....ops.derivatives.user_derivatives import after_gradients, declare_gradient, with_tangent
from ....ops.experts.grouped_rows import grouped_bias_grad, grouped_weight_grad
from ....ops.experts.scaled_groups import group_cast, group_max, scaled_grouped_linear, scaled_grouped_weight_grad
from ....ops.scaled_products import block_max, block_scale, scaled_cast

aten = torch.ops.aten
Scaled = Literal["rows", "all", "columns"]  # what has one scale, or each block of it


class Wrong(Exception):
    """What is wrong with a layer."""


@dataclass(frozen=True)
class ScaledLayer:
    """A layer as the program has it, with what stands for its inputs on a rank: ``weights``: the weight, the bias if it
    has one, and the 8-bit copies of the weight with their scales, one, or two if rows have a gradient."""

    node: fx.Node
    weights: Sequence[fx.Node]
    axes: Sequence[Axis]
    chosen: Sequence[Strategy]

    def read(self, product: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The rows that ``product`` multiplies, and where each expert's end.

        Raises:
            Wrong: if it is another product, or has other gradients.
        """
        made = product
        if product.target is after_gradients:
            both, index = origin(tensor_inputs(product)[0])
            _expect(
                both.target is with_tangent and index == 0 and both.args[1] is True, product, "passes on no product"
            )
            made = tensor_inputs(both)[0]
        _expect(made.target is scaled_grouped_linear, made, "is no product of 8-bit rows")
        x8, ends, _, scale, *_ = tensor_inputs(made)
        x = self._base(x8, scale, ends, "rows" if self._blocks else "all", False)
        self._product(made, x8, ends, scale, forward=True)
        _expect(value(made).dtype is value(x).dtype, made, "has another dtype than its rows")
        self._gradients(product, made, x, ends)
        return x, ends

    @property
    def _blocks(self) -> Sequence[int]:
        found: Any = self.node.args[9]
        return tuple(found)

    def _product(self, made: fx.Node, rows8: fx.Node, ends: fx.Node, scale: fx.Node, *, forward: bool) -> None:
        copies = tuple(self.weights[1 if self._bias is None else 2 :])
        right = copies[:2] if forward else copies[2:]
        bias, turned = self._bias if forward else None, bool(self.node.args[4]) is forward
        found: Any = made.args
        added = None if found[5] is None else _bare(found[5])
        same = found[:2] == (rows8, ends) and (found[2], found[4]) == right and found[3] is scale
        _expect(same and added is bias and found[6] is turned, made, "multiplies other operands")

    @property
    def _bias(self) -> fx.Node | None:
        return self.weights[1] if self.node.args[3] is not None else None

    def _gradients(self, product: fx.Node, made: fx.Node, x: fx.Node, ends: fx.Node) -> None:
        left = [n for n in (x, self.weights[0], self._bias) if n is not None and needs_grad(n)]
        for done in tensor_inputs(product)[1:] if product.target is after_gradients else []:
            says = origin(done)[0]
            _expect(says.target is declare_gradient and says.args[0] in left, says, "is no gradient of the layer")
            of, gradient = tensor_inputs(says)
            left.remove(of)
            if of is x:
                self._of_rows(gradient, ends, made)
            elif of is self._bias:
                tangent = tensor_inputs(gradient)[0]
                _expect(gradient.target is grouped_bias_grad and gradient.args[1] is ends, gradient, "is of no bias")
                _tangent(tangent, made)
            else:
                self._of_weight(gradient, x, ends, made)
            _expect(value(gradient).dtype is value(of).dtype, gradient, f"has another dtype than {of.name}")
        _expect(not left, product, f"lacks the gradient of {', '.join(n.name for n in left)}")

    def _of_rows(self, gradient: fx.Node, ends: fx.Node, made: fx.Node) -> None:
        _expect(gradient.target is scaled_grouped_linear, gradient, "is no gradient of rows")
        t8, _, _, scale = tensor_inputs(gradient)[:4]
        self._product(gradient, t8, ends, scale, forward=False)
        _tangent(self._base(t8, scale, ends, "rows" if self._blocks else "all", True), made)

    def _of_weight(self, gradient: fx.Node, x: fx.Node, ends: fx.Node, made: fx.Node) -> None:
        found: Any = gradient.args
        transposed = bool(self.node.args[4])
        if self.node.args[12] is not True:
            right = gradient.target is grouped_weight_grad and found[2:] == (ends, transposed)
            _expect(right and _bare(found[1]) is x, gradient, "is no gradient of the weight")
            return _tangent(tensor_inputs(gradient)[0], made)
        right = gradient.target is scaled_grouped_weight_grad and found[2] is ends and found[5] is transposed
        _expect(right, gradient, "is no 8-bit gradient of the weight")
        t8, x8, _, scale_t, scale_x = tensor_inputs(gradient)
        one: Scaled = "columns" if self._blocks else "all"
        _expect(self._base(x8, scale_x, ends, one, False) is x, gradient, "reads other rows")
        return _tangent(self._base(t8, scale_t, ends, one, True), made)

    def _base(self, cast: fx.Node, scale: fx.Node, ends: fx.Node, one: Scaled, backward: bool) -> fx.Node:
        """What was cast, by the largest numbers that it has itself."""
        kind = self.node.args[10] if backward else torch.float8_e4m3fn
        given: Any = cast.args
        if one == "columns":
            _expect(cast.target is group_cast and given[1:] == (ends, scale, kind), cast, "is not scaled by columns")
        else:
            _expect(cast.target is scaled_cast and given[1:] == (scale, kind), cast, "is not scaled as it should")
        right = scale.target is block_scale and scale.args[1:] == (kind, self.node.args[11])
        _expect(right, scale, "is no scale of this format")
        largest, over = largest_over(tensor_inputs(scale)[0])
        axes = self._apart(one, backward)
        _expect(sorted(over) == sorted(axes), scale, f"is the largest over {over}, and not over {axes}")
        wanted: Any = block_max, (given[0], [1, self._blocks[backward]]) if one == "rows" else ()
        if one != "rows":
            groups = largest if one == "columns" else tensor_inputs(largest)[0]
            _expect(groups.target is group_max and groups.args == (given[0], ends), scale, "is that of other rows")
            wanted = (group_max, groups.args) if one == "columns" else (block_max, (groups, [0, 0]))
        _expect((largest.target, largest.args) == wanted, scale, f"is not the largest of {one} of {given[0].name}")
        return _bare(given[0])

    def _apart(self, one: Scaled, backward: bool) -> list[str]:
        """The axes over which ranks have parts of what has one scale."""
        found = []
        for axis, strategy in zip(self.axes, self.chosen, strict=True):
            if axis.role == "time":
                continue
            there = strategy.inside or (strategy.inputs[0], strategy.outputs[0])
            features, rows, experts = (
                isinstance(kind, Shard) and kind.dim == dim
                for kind, dim in ((there[backward], 1), (strategy.inputs[0], 0), (strategy.inputs[2], 0))
            )
            split = features and not (one == "rows" and self._blocks[backward])
            parts = {"rows": split, "columns": rows and not experts, "all": features or rows or experts}
            found += [axis.name] if parts[one] else []
        return found


def largest_over(node: fx.Node) -> tuple[fx.Node, list[str]]:
    """What each rank found, before the largest was taken over these axes.

    Raises:
        Wrong: if something else was made of it.
    """
    over: list[str] = []
    while node.target is aten.amax.default:
        every = tensor_inputs(node)[0]
        moved = every.target is convert and every.args[3:] == ("S(0)", "I") and node.args[1:] == ([0],)
        one = tensor_inputs(every)[0] if moved else every
        right = moved and one.target is aten.unsqueeze.default and one.args[1:] == (0,)
        _expect(right, node, "is no largest number of all ranks")
        over.append(str(every.args[1]))
        node = tensor_inputs(one)[0]
    return node, over


def _tangent(node: fx.Node, made: fx.Node) -> None:
    both, index = origin(node)
    right = is_getitem(node) and index == 1 and both.target is with_tangent and both.args[0] is made
    _expect(right, node, f"is not the gradient of {made.name}")


def _bare(node: fx.Node) -> fx.Node:
    return tensor_inputs(node)[0] if node.target is aten.detach.default else node


def _expect(holds: bool, node: fx.Node, what: str) -> None:
    if not holds:
        raise Wrong(f"{node.name} {what}")
