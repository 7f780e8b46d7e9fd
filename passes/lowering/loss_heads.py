"""Where a graph multiplies rows by a table of classes and makes a few numbers of each row: the heads of losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...core.annotations import is_getitem, origin, shape, tensor_inputs, values
from ...ir.program import LocalProgram, outputs
from ...ops.cross_entropy import nll_terms
from ...ops.rules.notation import Dims, Factors
from ...ops.rules.table import RULES

aten = torch.ops.aten
# products with a table, and which input has the rows
_PRODUCTS: Mapping[Any, int] = {
    aten.linear.default: 0,
    aten.mm.default: 0,
    aten.matmul.default: 0,
    aten.addmm.default: 1,
}
_LEADING = frozenset({aten.reshape.default, aten.slice.Tensor})  # what may rearrange rows, or leave some out
FEW = 8  # how many numbers a loss may make of each row


@dataclass(frozen=True)
class LossHead:
    """``product`` makes all classes of each row of ``rows``; ``leading`` rearranges these, in order, to [rows,
    classes]; each of ``ends`` makes a few numbers of each row: for each of its outputs that is read, the dim of rows.

    ``nodes``: the product, all that reads it up to the ends, and the outputs of these, in graph order. ``dims``: of
    each node but the outputs and the leading ones, the dim of rows of each tensor that it reads (None: it has none).
    ``at``: the node behind which all is there that they read. ``stage``: that of all.
    """

    product: fx.Node
    rows: fx.Node
    leading: tuple[fx.Node, ...]
    ends: Mapping[fx.Node, Mapping[int, int]]
    nodes: tuple[fx.Node, ...]
    dims: Mapping[fx.Node, tuple[int | None, ...]]
    at: fx.Node
    stage: int


def loss_heads(program: LocalProgram) -> Iterator[LossHead]:
    """The heads of losses in a rank's graph; none shares a node with another, or reads one of it."""
    order, taken = {node: i for i, node in enumerate(program.graph.nodes)}, set[fx.Node]()
    for node in program.graph.nodes:
        if node.target in _PRODUCTS and node in program.stage and node not in program.once:
            found = _Head(program, node, order).found()
            if found is not None and taken.isdisjoint(_near(found)):
                taken |= {*found.nodes}
                yield found


def _near(head: LossHead) -> set[fx.Node]:
    """The nodes of a head, what they read, and what reads them."""
    return {near for node in head.nodes for near in (node, *node.all_input_nodes, *node.users)}


class _NoHead(Exception):
    pass


class _Head:
    def __init__(self, program: LocalProgram, product: fx.Node, order: Mapping[fx.Node, int]) -> None:
        self.program, self.product, self.order = program, product, order
        self.returned = set(outputs(program.graph))
        self.wide = dict[fx.Node, tuple[fx.Node, ...]]()  # has all classes of rows -> what rearranged its rows
        self.ends = dict[fx.Node, dict[int, int]]()
        self.dims = dict[fx.Node, tuple[int | None, ...]]()
        self.rest: list[fx.Node] = []

    def found(self) -> LossHead | None:
        try:
            return self._found()
        except _NoHead:
            return None

    def _found(self) -> LossHead:
        rows, place = self._rows_of_product(), _PRODUCTS[self.product.target]
        self.wide[self.product] = ()
        self.dims[self.product] = tuple(0 if i == place else None for i in range(len(tensor_inputs(self.product))))
        todo = sorted(self.product.users, key=self.order.__getitem__)
        while todo:
            node = todo.pop(0)
            self._add(node)
            more = node.users if node in self.wide else ()
            todo = sorted({*todo, *more}, key=self.order.__getitem__)
        orders = {self.wide[tensor_inputs(end)[self._wide_input(end)]] for end in self.ends}
        if len(orders) != 1:
            raise _NoHead
        (leading,) = orders
        inside = {*self.wide, *self.ends, *self.rest}
        nodes = tuple(sorted(inside, key=self.order.__getitem__))
        at = max(
            (n for node in nodes for n in (node, *node.all_input_nodes) if n not in inside or node is self.product),
            key=self.order.__getitem__,
        )
        after = [user for end in (*self.ends, *self.rest) for user in end.users if user not in inside]
        if any(self.order[user] < self.order[at] for user in after):
            raise _NoHead
        stage = self.program.stage[self.product]
        return LossHead(self.product, rows, leading, self.ends, nodes, self.dims, at, stage)

    def _wide_input(self, node: fx.Node) -> int:
        return next(i for i, source in enumerate(tensor_inputs(node)) if source in self.wide)

    def _rows_of_product(self) -> fx.Node:
        """The input that has the rows: all dims of the result but the last are its own, and no other's."""
        factors, place = _factors(self.product), _PRODUCTS[self.product.target]
        (made,), inputs = factors.outputs, factors.inputs
        leading = {name for dim in made[:-1] for name in dim}
        others = {name for i, dims in enumerate(inputs) if i != place for dim in dims for name in dim}
        own = inputs[place][:-1] == made[:-1] and not leading & others and not set(made[-1]) & set(inputs[place][-1])
        if not own or len(made[-1]) != 1 or len(made) < 2:
            raise _NoHead
        return tensor_inputs(self.product)[place]

    def _add(self, node: fx.Node) -> None:
        """Take in a node that reads something wide."""
        same = self.program.stage.get(node) == self.program.stage[self.product]
        if node.op != "call_function" or not same or node in self.returned or is_getitem(node):
            raise _NoHead
        if node.target in _PRODUCTS:  # a layer with few features, and no loss
            raise _NoHead
        wide = [source for source in tensor_inputs(node) if source in self.wide]
        before = {self.wide[source] for source in wide}
        if len(before) > 1:
            raise _NoHead
        (leading,) = before
        if node.target in _LEADING and len(wide) == 1 and shape(node)[-1] == shape(wide[0])[-1]:
            if node.target is aten.slice.Tensor and node.args[1] in (-1, len(shape(node)) - 1):
                raise _NoHead
            self.wide[node] = (*leading, node)
            return
        factors = _factors(node)
        position = self._wide_input(node)
        if len(factors.inputs[position]) > 2:
            self._pointwise(node, factors, position)
            self.wide[node] = leading
            return
        self._by_rows(node, factors, position, leading)

    def _pointwise(self, node: fx.Node, factors: Factors, position: int) -> None:
        """Before rows are one dim, operators may act on each number alone."""
        dims = factors.inputs[position]
        rows = {name for dim in dims[:-1] for name in dim}
        alone = not factors.whole & {name for dim in dims for name in dim}
        others = [d for i, d in enumerate(factors.inputs) if tensor_inputs(node)[i] not in self.wide]
        if not alone or factors.outputs != (dims,) or rows & {name for d in others for dim in d for name in dim}:
            raise _NoHead
        self.dims[node] = tuple(None for _ in tensor_inputs(node))

    def _by_rows(self, node: fx.Node, factors: Factors, position: int, leading: tuple[fx.Node, ...]) -> None:
        """Of [rows, classes]: as wide again, or a few numbers of each row."""
        (row, *more) = factors.inputs[position][0] or ("",)
        rule = RULES.get(node.target)
        if not row or more or row in factors.whole or (rule is not None and rule.shape_arg is not None):
            raise _NoHead
        inputs = tuple(_dim(dims, row) for dims in factors.inputs)
        if any(inputs[i] != 0 for i, source in enumerate(tensor_inputs(node)) if source in self.wide):
            raise _NoHead
        self.dims[node] = inputs
        rows = factors.sizes[row]
        parts = [user for user in node.users if is_getitem(user)]
        read = {origin(user)[1] for user in parts} if parts else {0}
        made = {index: _dim(factors.outputs[index], row) for index in sorted(read)}
        narrow = all(values(node)[index].numel() <= FEW * rows for index in read)
        if not parts and made[0] == 0 and not narrow and shape(node) == shape(tensor_inputs(node)[position]):
            self.wide[node] = leading
            return
        if not narrow or any(dim is None for dim in made.values()) or self.returned & {node, *parts}:
            raise _NoHead
        self.ends[node] = {index: dim for index, dim in made.items() if dim is not None}
        self.rest += parts


def _dim(dims: Dims, name: str) -> int | None:
    """Where the rows are, if alone.

    Raises:
        _NoHead: if another factor shares their dim.
    """
    for position, dim in enumerate(dims):
        if name in dim:
            if len(dim) > 1:
                raise _NoHead
            return position
    return None


def _factors(node: fx.Node) -> Factors:
    if node.target is nll_terms:
        count, classes = shape(tensor_inputs(node)[0])
        made: Dims = ((), ("three",), ("row",))
        return Factors(((("row",), ("class",)), (("row",),)), (made,), {"row": count, "class": classes, "three": 3})
    rule = RULES.get(node.target)
    if rule is None:
        raise _NoHead
    try:
        return rule.factors(node)
    except (ValueError, AssertionError, IndexError) as error:
        raise _NoHead from error
