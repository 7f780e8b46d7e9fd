"""A captured loss as a program that also returns the sums and means over rows that the loss is computed from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx

from ...capture.places import LEAF, WHERE
from ...compat.torch import FakeTensor, pytree
from ...core.errors import CompileError, Where
from ...ir.batch_form import ROWS
from ...ir.loss_parts import LossPart, LossParts, depends_on, is_multiple_of
from ...ir.program import Captured
from .counts import reduction_of

aten = torch.ops.aten
FIX = "say how much the loss of each batch counts: Trainer(loss_weight=lambda batch: ...), quintnet.TrainTask likewise"
SCALES = {"mul", "div", "true_divide"}
LINEAR = SCALES | {
    "neg", "add", "sub", "where", "sum", "view", "reshape", "flatten", "squeeze", "unsqueeze", "expand", "_to_copy",
    "to", "transpose", "permute", "slice", "contiguous", "clone", "masked_fill", "type_as", "lift_fresh_copy", "alias",
    "detach", "detach_",
}  # fmt: skip


def in_parts(captured: Captured) -> Captured:
    """The same, with the parts of the loss as further results behind the loss, and ``captured.parts``.

    Raises:
        CompileError: QN108 if what the loss takes of all rows is neither a sum nor a mean, or the number of rows is
            fixed.
    """
    if captured.only_rows is not None:
        raise CompileError(
            "QN108",
            f"code of the model or of its loss fixes the number of rows, {captured.only_rows}, as len(x) does: what of "
            "the loss is a sum over rows is not seen",
            fix=f"write x.shape[0] in place of len(x); or {FIX}",
        )
    return _Split.of_captured(captured).finished()


@dataclass
class _Split:
    captured: Captured
    graph: fx.Graph
    rows: str  # the symbol
    follows: set[fx.Node]  # what depends on rows
    results: list[fx.Node]
    parts: list[LossPart] = field(default_factory=list)
    cut: dict[fx.Node, int] = field(default_factory=dict)  # nodes that are parts

    @classmethod
    def of_captured(cls, captured: Captured) -> _Split:
        rows = next(symbol for symbol, name in captured.symbols.items() if name == ROWS)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        end = graph.graph_copy(captured.graph, copies)
        for node, copied in copies.items():
            copied.meta = dict(node.meta)
        split = cls(captured, graph, rows, set(), list(end))  # type: ignore[arg-type]
        for node in graph.nodes:
            inputs = node.all_input_nodes
            if split.has_rows(node) or any(x in split.follows or split.size_of_rows(x) for x in inputs):
                split.follows.add(node)
        return split

    def finished(self) -> Captured:
        loss, *changed = self.results
        order: list[fx.Node] = []
        self._visit(loss, order, set())
        combine = self._combined(loss, order)
        extra = self.results[1 + len(changed) :]
        results = [loss, *extra, *changed]
        self.graph.output(tuple(results))
        parts = tuple(_moved(part, len(changed)) for part in self.parts)
        loss_parts = LossParts(parts, combine, self.captured.symbols)
        return replace(self.captured, graph=self.graph, parts=loss_parts)

    def _visit(self, node: fx.Node, order: list[fx.Node], seen: set[fx.Node]) -> None:
        """Cut what ``node`` is computed of at the parts; ``order``: what lies behind these."""
        stack: list[tuple[fx.Node, bool]] = [(node, False)]
        while stack:
            current, inputs_done = stack.pop()
            if inputs_done:
                order.append(current)
                continue
            if current in seen:
                continue
            seen.add(current)
            if self._part(current):
                continue
            stack.append((current, True))
            stack.extend((x, False) for x in current.all_input_nodes)

    def _part(self, node: fx.Node) -> bool:
        """Return whether ``node`` is a part of the loss, which is noted."""
        value, where = node.meta.get("val"), node.meta.get(WHERE, Where())
        if isinstance(value, (SymInt, SymFloat, SymBool)) or not isinstance(value, (Tensor, tuple, list)):
            self._size(node, value, where)
        elif node not in self.follows:
            self._add(node, LossPart(_shown(node), "fixed", self._result(node)))
        elif any(self.has_rows(x) for x in node.all_input_nodes):
            self._reduced(node, where)
        else:
            return False
        return True

    def _size(self, node: fx.Node, value: Any, where: Where) -> None:
        if not depends_on(value, self.rows):
            if isinstance(value, SymBool):
                raise _refused(f"the loss computes with {value}", where)
            self._add(node, LossPart(_shown(node), "fixed size", size=value))
            return
        if not is_multiple_of(value, self.rows):
            raise _refused(f"the loss computes with {value}, which is no multiple of the number of rows", where)
        self._add(node, LossPart(_shown(node), "additive size", size=value))

    def _reduced(self, node: fx.Node, where: Where) -> None:
        reduction = None if self.has_rows(node) else reduction_of(node, _Adder(self.graph, node))
        if reduction is None:
            raise _refused(f"the loss takes {_shown(node)} of all rows of a batch, which is no sum and no mean", where)
        scaled = self._scaled_by_batch(node)
        if scaled is not None:
            raise _refused(
                f"{_shown(node)} is over rows that are divided or multiplied by {_shown(scaled)}, which is of all rows "
                "of a batch",
                where,
            )
        count = reduction.count
        output = self._result(node)
        if isinstance(count, fx.Node):
            part = LossPart(_shown(node), "mean", output, count_output=self._result(count))
        else:
            part = LossPart(_shown(node), reduction.kind, output, count)  # type: ignore[arg-type]
        self._add(node, part)

    def _scaled_by_batch(self, node: fx.Node) -> fx.Node | None:
        """Return what the rows that ``node`` reduces are scaled by that is of all rows; None if they are not."""
        stack, seen = list(node.all_input_nodes), set[fx.Node]()
        while stack:
            current = stack.pop()
            if current in seen or not self.has_rows(current) or _name(current) not in LINEAR:
                continue
            seen.add(current)
            for x in current.all_input_nodes:
                if _name(current) in SCALES and not self.has_rows(x) and (x in self.follows or self.size_of_rows(x)):
                    return x
            stack.extend(current.all_input_nodes)
        return None

    def _result(self, node: fx.Node) -> int:
        self.results.append(node)
        return len(self.results) - 1

    def _add(self, node: fx.Node, part: LossPart) -> None:
        self.cut[node] = len(self.parts)
        self.parts.append(part)

    def _combined(self, loss: fx.Node, order: list[fx.Node]) -> fx.GraphModule:
        """The loss as a function of its parts."""
        graph = fx.Graph()
        env = {node: graph.placeholder(f"part{index}") for node, index in self.cut.items()}
        for node in order:
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(env[loss])
        return fx.GraphModule({}, graph)

    def has_rows(self, node: fx.Node) -> bool:
        """Return whether a size of the value has the number of rows in it."""
        values = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
        return any(depends_on(size, self.rows) for x in values for size in x.shape)

    def size_of_rows(self, node: fx.Node) -> bool:
        return depends_on(node.meta.get("val"), self.rows)


@dataclass
class _Adder:
    """Adds nodes behind one, with what they make."""

    graph: fx.Graph
    behind: fx.Node

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        with self.graph.inserting_after(self.behind):
            node = self.graph.call_function(target, args)
        self.behind = node
        values = [x.meta["val"] if isinstance(x, fx.Node) else x for x in args]
        with next(x.fake_mode for x in values if isinstance(x, FakeTensor)):
            node.meta["val"] = target(*values)
        node.meta[WHERE] = Where()
        return node


def _moved(part: LossPart, shift: int) -> LossPart:
    """The same, where results behind the loss come ``shift`` places earlier."""
    output = part.output - shift if part.output else part.output
    count = part.count_output - shift if part.count_output else part.count_output
    return replace(part, output=output, count_output=count)


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else ""


def _shown(node: fx.Node) -> str:
    leaf = node.meta.get(LEAF)
    return leaf.name if leaf is not None else _name(node) or node.name


def _refused(message: str, where: Where) -> CompileError:
    return CompileError(
        "QN108", f"{message}: the loss of several batches does not follow from theirs", where=where, fix=FIX
    )
