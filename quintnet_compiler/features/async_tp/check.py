"""Check of fused products: undone, every value is what it was. Values are numbered by what makes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from ...checks.failure import check_failure
from ...core.annotations import facts, is_getitem, shape, values
from ...ir.program import DifferentiatedProgram
from ...ir.value_numbers import NumberRead, ValueNumbers
from ...ops.catalog import op_spec
from ...ops.collectives import all_gather, reduce_scatter

_fail = partial(check_failure, "fusion check")
aten = torch.ops.aten
# what may become part of another node
PARTS = frozenset(
    {
        all_gather, reduce_scatter, aten.reshape.default, aten.linear.default, aten.mm.default, aten.addmm.default,
        aten.add.Tensor,
    }
)  # fmt: skip

Number = tuple[int, tuple[int, ...] | None]  # of the contents in order, and their shape: a reshape keeps the first


def check_fused(source: DifferentiatedProgram, fused: DifferentiatedProgram) -> None:
    """Check that a program with fused products has the values of its source.

    Raises:
        CompileError: QN209 with the value that is another one.
    """
    numbers = ValueNumbers()
    old, new = _Products(source, numbers), _Products(fused, numbers)
    nodes = {node.name: node for node in fused.graph.nodes}
    for node, number in old.of.items():
        same = nodes.get(node.name)
        if same is None and node.target not in PARTS:
            raise _fail(f"{node.name} is lost", node)
        if same is None:
            continue
        if number != new.of[same]:
            raise _fail(f"{node.name} is another value than it was", node)
        if _looks(node) != _looks(same):
            raise _fail(f"{node.name} has another shape or dtype than it had", node)
    for what in ("outputs", "gradients"):
        a, b = (_named(products.of, getattr(program, what)) for products, program in ((old, source), (new, fused)))
        if a != b:
            raise _fail(f"the program has other {what} than it had", None)


def _looks(node: fx.Node) -> list[Any]:
    return [(v.shape, v.dtype) for v in values(node) if v is not None]  # an operator may leave one out


def _named(of: dict[fx.Node, Number], nodes: Any) -> Any:
    return {key: of[node] for key, node in (nodes.items() if hasattr(nodes, "items") else enumerate(nodes))}


class _Products:
    """The number of every value of a program."""

    def __init__(self, program: DifferentiatedProgram, numbers: ValueNumbers) -> None:
        self.program, self.number = program, numbers.number
        self.numbers = numbers
        self.of: dict[fx.Node, Number] = {}
        self.several: dict[fx.Node, list[Number]] = {}
        for node in program.graph.nodes:
            if node.op != "output":
                self.of[node] = self._node(node)

    def _node(self, node: fx.Node) -> Number:
        results = values(node)
        own = tuple(results[0].shape) if len(results) == 1 else None
        if node.op == "placeholder":
            return self.number(node.name), own
        place = self.program.stage.get(node), facts(node).phase, node in self.program.once
        args: Any = node.args
        if is_getitem(node):
            source, index = args
            if source in self.several:
                number: Number = self.several[source][index]
                return number
            return self.number("result", self.of[source], index), own
        if op_spec(node).reshapes:
            return self.of[args[0]][0], own
        if op_spec(node).slice_at == "input":
            return self._gather(node, place)
        if op_spec(node).slice_at == "result":
            return self._scatter(node, place), own
        product = _factors(node)
        if product is not None:
            return self._matmul(place, self.of[product[0]], *product[1:]), own
        inputs = node.all_input_nodes
        alike = len(inputs) == 2 and all(shape(n) == own for n in inputs) and not node.kwargs
        if op_spec(node).adds and alike:
            return self._sum(place, [self.of[n][0] for n in inputs]), own
        return self._call(place, node.target, *args, **node.kwargs), own

    def _call(self, place: Any, target: Any, *args: Any, **kwargs: Any) -> int:
        return self.numbers.call(place, target, (args, kwargs), self.of.__getitem__)

    def _matmul(self, place: Any, x: Number, weight: fx.Node, bias: fx.Node | None, transposed: bool) -> int:
        """Rows are numbered alike in whatever shape they are."""
        assert x[1] is not None
        return self.number("product", place, x[0], x[1][-1], self.of[weight], bias and self.of[bias], transposed)

    def _sum(self, place: Any, terms: Sequence[int]) -> int:
        """Return the number of a sum in this order; which of two terms comes first makes no difference."""
        total, *rest = terms
        for term in rest:
            total = self.number("sum", place, *sorted((total, term)))
        return total

    def _gather(self, node: fx.Node, place: Any) -> Number:
        args: Any = node.args
        x, axis, size, dim, parts, weights, biases, transposed, keep = args
        whole = [n * size if d == dim else n for d, n in enumerate(shape(x))]
        gathered = self._call(place, all_gather, x, axis, size, dim, parts), tuple(whole)
        results: list[Number] = []
        for each in zip(weights, biases, transposed, strict=True):
            columns = shape(each[0])[0 if each[2] else 1]
            results.append((self._matmul(place, gathered, *each), (*whole[:-1], columns)))
        self.several[node] = [*results, gathered] if keep else results
        return self.number("several", tuple(self.several[node])), None

    def _scatter(self, node: fx.Node, place: Any) -> int:
        args: Any = node.args
        xs, axis, size, dim, parts, weights, biases, transposed = args
        factors = list(zip(weights, biases, transposed, strict=True))
        terms = [self._matmul(place, self.of[x], *each) for x, each in zip(xs, factors, strict=True)]
        rows: set[tuple[int, ...]] = {
            (*shape(x)[:-1], shape(each[0])[0 if each[2] else 1]) for x, each in zip(xs, factors, strict=True)
        }
        if len(rows) > 1:
            raise _fail(f"{node.name} adds up products of several shapes", node)
        summed = NumberRead((self._sum(place, terms), rows.pop()))
        return self._call(place, reduce_scatter, summed, axis, size, dim, parts)


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, bool] | None:
    """x, weight, bias, and whether the weight is [out, in], of a product with a matrix."""
    product = op_spec(node).product
    if node.kwargs or product is None or product.weight_dims != 2:
        return None
    x, weight, bias = product.operands(node.args)
    is_layer = len(shape(weight)) == 2 and (bias is None or len(shape(bias)) == 1)
    return (x, weight, bias, product.transposed) if is_layer else None
