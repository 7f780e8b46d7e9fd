"""Loss heads: a product of rows with a table of classes, and the operators up to a few numbers for each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ...core.annotations import is_getitem, origin, shape, tensor_inputs, values
from ...ir.program import LocalProgram, outputs
from ...ops.catalog import op_spec
from ...ops.cross_entropy import nll_terms
from ...ops.rules.notation import Dims, Factors
from ...ops.rules.table import RULES

aten = torch.ops.aten
MAX_RESULTS_PER_ROW = 8  # numbers of each row that a loss may return


@dataclass(frozen=True)
class LossHead:
    """The head of a loss.

    Attributes:
        product: computes the logits of each row.
        rows: what the product multiplies by the table.
        leading: nodes that rearrange the product to [rows, classes], in order.
        ends: nodes that compute a few numbers of each row; for each output that is read, the dim of rows.
        nodes: the product, its users up to the ends, and the outputs of these, in graph order.
        dims: of each node but the outputs and the leading ones, the dim of rows of each tensor that it reads (None: it
            has no rows).
        at: the node after which all inputs of the head are computed.
        stage: the stage of all nodes.
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
    """Yield the loss heads of a rank's graph. None shares a node with another, or reads a node of another."""
    order, taken = {node: i for i, node in enumerate(program.graph.nodes)}, set[fx.Node]()
    for node in program.graph.nodes:
        if _place_of_rows(node) is not None and node in program.stage and node not in program.once:
            head = _HeadSearch(program, node, order).head()
            if head is not None and taken.isdisjoint(_neighbours(head)):
                taken |= {*head.nodes}
                yield head


def _neighbours(head: LossHead) -> set[fx.Node]:
    """Return the nodes of a head, their inputs and their users."""
    return {neighbour for node in head.nodes for neighbour in (node, *node.all_input_nodes, *node.users)}


class _NoHeadError(Exception):
    """A product is not the head of a loss."""


class _HeadSearch:
    """Follows the users of a product up to the ends of a head."""

    def __init__(self, program: LocalProgram, product: fx.Node, order: Mapping[fx.Node, int]) -> None:
        self.program, self.product, self.order = program, product, order
        self.returned = set(outputs(program.graph))
        self.wide = dict[fx.Node, tuple[fx.Node, ...]]()  # has all classes of rows -> what rearranged its rows
        self.ends = dict[fx.Node, dict[int, int]]()
        self.dims = dict[fx.Node, tuple[int | None, ...]]()
        self.results: list[fx.Node] = []

    def head(self) -> LossHead | None:
        """Return the head, or None if there is none."""
        try:
            return self._head()
        except _NoHeadError:
            return None

    def _head(self) -> LossHead:
        rows, place = self._rows_of_product(), _place_of_rows(self.product)
        self.wide[self.product] = ()
        self.dims[self.product] = tuple(0 if i == place else None for i in range(len(tensor_inputs(self.product))))
        todo = sorted(self.product.users, key=self.order.__getitem__)
        while todo:
            node = todo.pop(0)
            self._add(node)
            users = node.users if node in self.wide else ()
            todo = sorted({*todo, *users}, key=self.order.__getitem__)
        orders = {self.wide[tensor_inputs(end)[self._wide_input(end)]] for end in self.ends}
        if len(orders) != 1:
            raise _NoHeadError
        (leading,) = orders
        inside = {*self.wide, *self.ends, *self.results}
        nodes = tuple(sorted(inside, key=self.order.__getitem__))
        at = self._last_input(nodes, inside)
        outer_users = [user for end in (*self.ends, *self.results) for user in end.users if user not in inside]
        if any(self.order[user] < self.order[at] for user in outer_users):
            raise _NoHeadError
        stage = self.program.stage[self.product]
        return LossHead(self.product, rows, leading, self.ends, nodes, self.dims, at, stage)

    def _last_input(self, nodes: Sequence[fx.Node], inside: set[fx.Node]) -> fx.Node:
        """Return the last node that the head reads, or the product."""
        inputs = [source for node in nodes for source in node.all_input_nodes if source not in inside]
        product = [self.product, *self.product.all_input_nodes]
        return max((*inputs, *product), key=self.order.__getitem__)

    def _wide_input(self, node: fx.Node) -> int:
        return next(i for i, source in enumerate(tensor_inputs(node)) if source in self.wide)

    def _rows_of_product(self) -> fx.Node:
        """Return the input with the rows: it alone has all dims of the result but the last, the classes."""
        factors, place = _factors(self.product), _place_of_rows(self.product)
        assert place is not None
        (output,), inputs = factors.outputs, factors.inputs
        leading = {name for dim in output[:-1] for name in dim}
        others = {name for i, dims in enumerate(inputs) if i != place for dim in dims for name in dim}
        has_rows = inputs[place][:-1] == output[:-1] and not leading & others
        if not has_rows or set(output[-1]) & set(inputs[place][-1]) or len(output[-1]) != 1 or len(output) < 2:
            raise _NoHeadError
        return tensor_inputs(self.product)[place]

    def _add(self, node: fx.Node) -> None:
        """Add a node that reads all classes of rows."""
        self._require_plain(node)
        wide = [source for source in tensor_inputs(node) if source in self.wide]
        orders = {self.wide[source] for source in wide}
        if len(orders) > 1:
            raise _NoHeadError
        (leading,) = orders
        rearranges = op_spec(node).reshapes or op_spec(node).slices  # or drops some
        if rearranges and len(wide) == 1 and shape(node)[-1] == shape(wide[0])[-1]:
            if op_spec(node).slices and node.args[1] in (-1, len(shape(node)) - 1):
                raise _NoHeadError
            self.wide[node] = (*leading, node)
            return
        factors = _factors(node)
        position = self._wide_input(node)
        if len(factors.inputs[position]) > 2:
            self._pointwise(node, factors, position)
            self.wide[node] = leading
            return
        self._by_rows(node, factors, position, leading)

    def _require_plain(self, node: fx.Node) -> None:
        """Raise _NoHeadError unless a node is an operator of the same stage whose result stays in the head."""
        same_stage = self.program.stage.get(node) == self.program.stage[self.product]
        if node.op != "call_function" or not same_stage or node in self.returned or is_getitem(node):
            raise _NoHeadError
        if _place_of_rows(node) is not None:  # a layer with few features, and no loss
            raise _NoHeadError

    def _pointwise(self, node: fx.Node, factors: Factors, position: int) -> None:
        """Add an operator on logits before rows are one dim: it has to act on each number alone."""
        dims = factors.inputs[position]
        rows = {name for dim in dims[:-1] for name in dim}
        alone = not factors.whole & {name for dim in dims for name in dim}
        others = [d for i, d in enumerate(factors.inputs) if tensor_inputs(node)[i] not in self.wide]
        if not alone or factors.outputs != (dims,) or rows & {name for d in others for dim in d for name in dim}:
            raise _NoHeadError
        self.dims[node] = tuple(None for _ in tensor_inputs(node))

    def _by_rows(self, node: fx.Node, factors: Factors, position: int, leading: tuple[fx.Node, ...]) -> None:
        """Add an operator on [rows, classes]: its result has as many, or is a few numbers of each row."""
        row = _row_factor(node, factors, position)
        input_dims = tuple(_dim(dims, row) for dims in factors.inputs)
        if any(input_dims[i] != 0 for i, source in enumerate(tensor_inputs(node)) if source in self.wide):
            raise _NoHeadError
        self.dims[node] = input_dims
        items = [user for user in node.users if is_getitem(user)]
        indices = _outputs_in_use(items)
        output_dims = {index: _dim(factors.outputs[index], row) for index in sorted(indices)}
        limit = MAX_RESULTS_PER_ROW * factors.sizes[row]
        narrow = all(values(node)[index].numel() <= limit for index in indices)
        as_wide = not items and output_dims[0] == 0 and not narrow
        if as_wide and shape(node) == shape(tensor_inputs(node)[position]):
            self.wide[node] = leading
        elif narrow and not self.returned & {node, *items}:
            self._add_end(node, output_dims)
            self.results += items
        else:
            raise _NoHeadError

    def _add_end(self, node: fx.Node, output_dims: Mapping[int, int | None]) -> None:
        """Add an end. Each of its outputs has to have rows."""
        self.ends[node] = {index: dim for index, dim in output_dims.items() if dim is not None}
        if len(self.ends[node]) != len(output_dims):
            raise _NoHeadError


def _outputs_in_use(items: Sequence[fx.Node]) -> set[int]:
    """Return the outputs of an operator that are read. ``items``: its getitems, if it has several outputs."""
    return {origin(item)[1] for item in items} if items else {0}


def _row_factor(node: fx.Node, factors: Factors, position: int) -> str:
    """Return the factor of rows of an input [rows, classes]. The operator has to work on any number of rows.

    Raises:
        _NoHeadError: if it does not.
    """
    (row, *others) = factors.inputs[position][0] or ("",)
    rule = RULES.get(node.target)
    if not row or others or row in factors.whole or (rule is not None and rule.shape_arg is not None):
        raise _NoHeadError
    return row


def _dim(dims: Dims, name: str) -> int | None:
    """Return the dim of a factor.

    Raises:
        _NoHeadError: if another factor shares the dim.
    """
    for position, dim in enumerate(dims):
        if name in dim:
            if len(dim) > 1:
                raise _NoHeadError
            return position
    return None


def _place_of_rows(node: fx.Node) -> int | None:
    """Return which input of a product with a table has the rows; None for other operators."""
    product = op_spec(node).product
    return None if product is None or product.weight_dims == 3 else product.rows


def _factors(node: fx.Node) -> Factors:
    if node.target is nll_terms:
        count, classes = shape(tensor_inputs(node)[0])
        terms: Dims = ((), ("three",), ("row",))
        return Factors(((("row",), ("class",)), (("row",),)), (terms,), {"row": count, "class": classes, "three": 3})
    rule = RULES.get(node.target)
    if rule is None:
        raise _NoHeadError
    try:
        return rule.factors(node)
    except (ValueError, AssertionError, IndexError) as error:
        raise _NoHeadError from error
