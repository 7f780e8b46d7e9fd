"""Prices of converting a value on an axis, and the conversions that the axis' role rules out."""

from __future__ import annotations

import math

from torch import Tensor, fx

from ...compat.torch import schema
from ...core.annotations import facts, is_float, leaf, needs_grad, num_bytes, operators_of_parameters, shape, values
from ...core.sharding import AxisType, I, P, R, Shard, forward_type, gradient
from ...ir.program import Axis
from ...ops.collectives import lower_conversion, share
from .axis_view import AxisView, OperandEdge
from .integer_program import FORBIDDEN_SECONDS

DISCOURAGED_FACTOR = 1e2  # multiplies the price of a conversion that the axis' role avoids
MIN_COLLECTIVE_SHARE = 0.1  # the least price of a collective, in all-gathers of a typical activation


class ConversionPrices:
    """The price of a conversion: call it with an edge, two types and the bytes that outer axes leave of the value.

    Attributes:
        later: operators that run in stages, not at the start of a step; empty on other axes than time.
        trains: whether any value has a gradient.
        least: the least seconds of a collective.
    """

    def __init__(self, view: AxisView) -> None:
        self.view, self.axis, self.cost = view, view.axis, view.cost
        self.later = frozenset(operators_of_parameters(view.program.graph)) if view.axis.role == "time" else frozenset()
        self.trains = any(map(needs_grad, view.factors))
        # Without a least price, collectives of a few statistics look free, and the search trades one large
        # conversion for a layout full of small ones.
        operators = [n for n in view.factors if leaf(n) is None and (needs_grad(n) or not self.trains)]
        sizes = sorted(num_bytes(v) for n in operators for v in values(n) if is_float(v) or self.trains)
        typical = sizes[len(sizes) // 2] / math.prod(view.outer_sizes) if sizes else 0.0
        self.least = MIN_COLLECTIVE_SHARE * self.cost.collective_seconds("all_gather", typical, self.axis.size)

    def __call__(self, edge: OperandEdge, a: AxisType, b: AxisType, size: float) -> float | None:
        """Return the seconds of a conversion, forward and backward; None where it is meaningless or never allowed."""
        if a == b or (not edge.grad and forward_type(a) == forward_type(b)):
            return 0.0
        source = leaf(edge.source)
        if source is not None and source.kind == "cache" and self.axis.role != "time":
            return None  # writes to a copy would be lost
        if b is P and not self._may_become_partial(edge, a):
            return None
        price = self._collective(a, b, size)
        if edge.grad:
            price += self._collective(gradient(b), gradient(a), size)
        return self._by_role(edge, a, b, price)

    def _may_become_partial(self, edge: OperandEdge, a: AxisType) -> bool:
        """Return whether a value may be converted to terms of a sum."""
        if isinstance(a, Shard):
            return False
        if edge.additive or (not edge.grad and self._equal_shares(edge, a)):
            return True
        # Otherwise correct, but useful only in time, where a whole value (a penalty) is added to terms.
        return edge.grad and (edge.user.op == "output" or self.axis.role == "time")

    def _is_inference_activation(self, edge: OperandEdge) -> bool:
        """Return whether a value would have a gradient if the program, which has no backward, had one."""
        inside = leaf(edge.source) is None and edge.user.op != "output"
        return not self.trains and inside and any(map(is_float, values(edge.source)))

    def _equal_shares(self, edge: OperandEdge, a: AxisType) -> bool:
        """Return whether a value without a gradient may enter a sum in equal shares: ``loss + 1e-3``.

        In space only a scalar, which costs nothing either way; in time there is no other way.
        """
        x = facts(edge.source).value
        if not isinstance(x, Tensor) or not is_float(x) or forward_type(a) is not I:
            return False
        return self.axis.role == "time" or x.dim() == 0

    def _collective(self, a: AxisType, b: AxisType, size: float) -> float:
        op, _ = lower_conversion(a, b)
        if op is None or op is share:
            return 0.0
        name = str(schema(op).name).partition("::")[2]
        least = 0.0 if name.startswith("shard_") else self.least
        return least + self.cost.collective_seconds(name, size, self.axis.size)

    def _by_role(self, edge: OperandEdge, a: AxisType, b: AxisType, price: float) -> float | None:
        """Return the price of a conversion under the axis' role."""
        prices = {"time": self._in_time, "data": self._over_data, "context": self._over_context}
        return prices.get(self.axis.role, self._over_model)(edge, a, b, price)

    def _in_time(self, edge: OperandEdge, a: AxisType, b: AxisType, price: float) -> float:
        whole = forward_type(a) is I
        # a slice is taken at the start of a step, of a value that exists then
        slices = whole and isinstance(b, Shard) and not edge.grad and edge.source not in self.later
        shares = whole and b is P
        return price if slices or shares or (a is R and b is I) else FORBIDDEN_SECONDS

    def _over_data(self, edge: OperandEdge, a: AxisType, b: AxisType, price: float) -> float:
        # rows may be exchanged for experts, where a plan spreads the experts of one-hot dispatch
        exchanges = isinstance(b, Shard) and self.view.spreads_experts
        gathers = isinstance(a, Shard) and not exchanges
        return price * DISCOURAGED_FACTOR if gathers else price

    def _over_context(self, edge: OperandEdge, a: AxisType, b: AxisType, price: float) -> float:
        # slices of a parameter would not save its memory; sequences are gathered for operators that read them whole
        return FORBIDDEN_SECONDS if _is_parameter(edge.source) and isinstance(b, Shard) else price

    def _over_model(self, edge: OperandEdge, a: AxisType, b: AxisType, price: float) -> float:
        if _is_parameter(edge.source) and isinstance(a, Shard):
            return price * DISCOURAGED_FACTOR if self.view.constraints.follows else FORBIDDEN_SECONDS
        if self.view.constraints.sequence_parallel or not _splits_residual(a, b):
            return price
        activation = edge.grad or self._is_inference_activation(edge)
        travels = self.view.travels(edge.source) or self.view.travels(edge.user)
        return price * DISCOURAGED_FACTOR if activation and not travels else price


def leaves_as_is(axis: Axis, kind: AxisType, result: fx.Node, *, carried: bool = False, ended: bool = False) -> bool:
    """Return whether the runtime takes an output of type ``kind`` as it is.

    It adds up partial scalars, terms of microbatches, and terms that the end of the step reads (``ended``), and joins
    the slices of microbatches and then of data ranks. All else is converted to I inside the graph, as are ``carried``
    values, which the next batch of the step reads.
    """
    if carried:
        return kind is I
    if kind is I or (kind is R and not needs_grad(result)):
        return True
    if kind is P:
        return shape(result) == () or axis.role == "time" or ended
    return isinstance(kind, Shard) and axis.role in ("time", "data")


def _splits_residual(a: AxisType, b: AxisType) -> bool:
    """Return whether a conversion enters or leaves a split of values that plain tensor parallelism keeps whole."""
    slices = isinstance(b, Shard) and not isinstance(a, Shard)
    return slices or (isinstance(a, Shard) and forward_type(b) is I)


def _is_parameter(node: fx.Node) -> bool:
    info = leaf(node)
    return info is not None and info.kind == "parameter"
