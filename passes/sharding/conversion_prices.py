"""What a conversion of a value costs on an axis, and which ones the axis' role rules out."""

from __future__ import annotations

import math

from torch import Tensor, fx

from ...compat.torch import schema
from ...core.annotations import facts, is_float, leaf, needs_grad, num_bytes, shape, values
from ...core.sharding import AxisType, I, P, R, Shard, gradient, plain
from ...ir.program import Axis
from ...ops.collectives import lower_conversion, share
from ..stages.cut_stages import staged_operators
from .axis_view import AxisView, OperandEdge
from .integer_program import FORBIDDEN

DISCOURAGED = 1e2  # how much dearer a conversion is that the axis' role avoids


class ConversionPrices:
    """Call it with an edge, two types and the bytes that the earlier axes leave of the value."""

    def __init__(self, view: AxisView) -> None:
        self.view, self.axis, self.cost = view, view.axis, view.cost
        self.later = frozenset(staged_operators(view.program.graph)) if view.axis.role == "time" else frozenset()
        self.trains = any(map(needs_grad, view.factors))
        # What any collective costs at least, in moves of a typical activation: without it a collective of a few
        # statistics looks free, and the search trades one large move for a layout full of small ones.
        made = [n for n in view.factors if leaf(n) is None and (needs_grad(n) or not self.trains)]
        sizes = sorted(num_bytes(v) for n in made for v in values(n) if is_float(v) or self.trains)
        typical = sizes[len(sizes) // 2] if sizes else 0
        self.least = 0.1 * self.cost.collective_seconds("all_gather", typical / math.prod(view.ranks), self.axis.size)

    def __call__(self, edge: OperandEdge, a: AxisType, b: AxisType, size: float) -> float | None:
        """Seconds of a conversion, forward and backward; None where it has no meaning or must never be used."""
        if a == b or (not edge.grad and plain(a) == plain(b)):
            return 0.0
        source = leaf(edge.source)
        if source is not None and source.kind == "cache" and self.axis.role != "time":
            return None  # what is written to a copy would be lost
        constant = b is P and not edge.grad and self._in_shares(edge, a)
        if not edge.grad and b is P and not (edge.additive or constant):
            return None
        if isinstance(a, Shard) and b is P:
            return None
        if b is P and not (edge.additive or constant) and edge.user.op != "output" and self.axis.role != "time":
            # correct, and useful in time alone, where nothing adds up what a whole value (a penalty) is added to
            return None
        price = self._move(a, b, size)
        if edge.grad:
            price += self._move(gradient(b), gradient(a), size)
        return self._role(edge, a, b, price)

    def _only_computed(self, edge: OperandEdge) -> bool:
        """Whether a value between two operators would have a gradient if the program had a backward."""
        inside = leaf(edge.source) is None and edge.user.op != "output"
        return not self.trains and inside and any(map(is_float, values(edge.source)))

    def _in_shares(self, edge: OperandEdge, a: AxisType) -> bool:
        """Whether a value without a gradient may enter a sum in equal shares: ``loss + 1e-3``. In space only a scalar,
        which costs nothing either way; in time there is no other way."""
        x = facts(edge.source).value
        if not isinstance(x, Tensor) or not is_float(x) or plain(a) is not I:
            return False
        return self.axis.role == "time" or x.dim() == 0

    def _move(self, a: AxisType, b: AxisType, size: float) -> float:
        op, _ = lower_conversion(a, b)
        if op is None or op is share:
            return 0.0
        name = str(schema(op).name).partition("::")[2]
        least = 0.0 if name.startswith("shard_") else self.least
        return least + self.cost.collective_seconds(name, size, self.axis.size)

    def _role(self, edge: OperandEdge, a: AxisType, b: AxisType, price: float) -> float | None:
        source = leaf(edge.source)
        if self.axis.role == "time":
            # a slice is taken at the start of a step, of what is there then
            whole_to_slice = not edge.grad and plain(a) is I and isinstance(b, Shard) and edge.source not in self.later
            share = b is P and plain(a) is I
            return price if whole_to_slice or share or (a is R and b is I) else FORBIDDEN
        if self.axis.role == "data":
            # rows may be exchanged for experts, where a plan spreads what one-hot dispatch sends them to
            exchanges = isinstance(b, Shard) and self.view.spreads_experts
            gathers = isinstance(a, Shard) and not exchanges
            return price * DISCOURAGED if gathers else price
        if self.axis.role == "context":
            # a parameter's slices would not save its memory; sequences are gathered for what reads all of them
            return FORBIDDEN if source is not None and source.kind == "parameter" and isinstance(b, Shard) else price
        if source is not None and source.kind == "parameter" and isinstance(a, Shard):
            return FORBIDDEN
        activation = edge.grad or self._only_computed(edge)
        kept = activation and _residual(a, b) and not (self.view.travels(edge.source) or self.view.travels(edge.user))
        return price * DISCOURAGED if kept and not self.view.constraints.sequence_parallel else price


def leaves_as_is(axis: Axis, kind: AxisType, result: fx.Node, *, carried: bool = False, ended: bool = False) -> bool:
    """Whether the runtime settles an output of type ``kind``: it adds up a partial scalar, what microbatches have terms
    of, and what the end of the step reads (``ended``), and joins the slices of microbatches and then of data ranks.
    Everything else is converted to I inside the graph; so is all that is ``carried``, as the next batch of the step
    reads it."""
    if carried:
        return kind is I
    if kind is I or (kind is R and not needs_grad(result)):
        return True
    if kind is P:
        return shape(result) == () or axis.role == "time" or ended
    return isinstance(kind, Shard) and axis.role in ("time", "data")


def _residual(a: AxisType, b: AxisType) -> bool:
    """Whether a conversion enters or leaves a split of values that plain tensor parallelism keeps whole."""
    slices = isinstance(b, Shard) and not isinstance(a, Shard)
    return slices or (isinstance(a, Shard) and plain(b) is I)
