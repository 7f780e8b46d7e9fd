"""LocalProgram -> LocalProgram: losses that read all classes of a row are computed for some of the rows at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ...core.annotations import facts, is_getitem, origin, shape, tensor_inputs
from ...ir.builder import GraphBuilder
from ...ir.program import LocalProgram
from ...ops.catalog import op_spec
from .loss_heads import LossHead, loss_heads

aten = torch.ops.aten
Parts = dict[tuple[fx.Node, int], list[fx.Node]]  # (end of a head, output) -> its result for each part of the rows


@dataclass(frozen=True)
class ChunkLosses:
    """Compute logits and the loss of them in ``loss_chunks`` parts of the rows, one after the other.

    Before: %y = linear(%h, %w);  %s = log_softmax(%y, 1);  %l = nll_loss(%s, %labels)
    After:  %h_0 = slice(%h, 0, 0, 8);  %y_0 = linear(%h_0, %w);  ...;  %l_0 = nll_loss(%s_0, %labels_0);
            %h_1 = slice(%h, 0, 8, 16);  ...;  %l = cat([%l_0, %l_1])
    Ensures: each row's result is computed from the same numbers; values with all classes of a row are read inside their
    part alone, and are recomputed in the backward (``again``), so that memory holds one part of the logits at a time.
    Gradients of the table are the sum of those of the parts.

    A product stays as it is if its rows are combined, exchanged between ranks, or returned. Wijmans et al. 2024, "Cut
    your losses in large-vocabulary language models", and Liger Kernel do the same in custom kernels.
    """

    loss_chunks: int

    def __call__(self, program: LocalProgram, /) -> LocalProgram:
        """Return the program with losses in parts."""
        heads = list(loss_heads(program)) if self.loss_chunks > 1 else []
        return _Chunking(program, heads, self.loss_chunks).run() if heads else program


class _Chunking:
    """A copy of a program with chunked heads. ``new``: the copy of each node; ``again``: nodes to recompute."""

    def __init__(self, program: LocalProgram, heads: Sequence[LossHead], chunks: int) -> None:
        self.program, self.heads, self.chunks = program, heads, chunks
        self.builder = GraphBuilder(program.mode)
        self.new: dict[fx.Node, fx.Node] = {}
        self.stage: dict[fx.Node, int] = {}
        self.again: set[fx.Node] = set()

    def run(self) -> LocalProgram:
        inside = {node for head in self.heads for node in head.nodes}
        heads_after = defaultdict[fx.Node, list[LossHead]](list)
        for head in self.heads:
            heads_after[head.at].append(head)
        for node in self.program.graph.nodes:
            if node.op == "output":
                self.builder.graph.output(fx.map_arg(node.args[0], lambda n: self.new[n]))
                continue
            if node not in inside:
                self.new[node] = self.builder.graph.node_copy(node, lambda n: self.new[n])
            for head in heads_after[node]:
                self._emit(head)
        self.builder.graph.lint()
        moved = self.program.moved(self.builder.graph, self.new)
        return replace(moved, stage={**moved.stage, **self.stage}, again=frozenset(self.again))

    def _emit(self, head: LossHead) -> None:
        """Emit a head in parts, and concatenate their results."""
        first_new = len(self.builder.made)
        with self.builder.named("chunk_"):
            rows = self._rows(head)
            count = shape(rows)[0]
            part_rows = math.ceil(count / self.chunks)
            parts: Parts = defaultdict(list)
            for start in range(0, count, part_rows):
                self._emit_part(head, rows, start, min(start + part_rows, count), parts)
            for node, dims in head.ends.items():
                with self.builder.at(node):
                    whole = {i: self.builder.call(aten.cat.default, parts[node, i], dim) for i, dim in dims.items()}
                items = [user for user in node.users if is_getitem(user)] if _is_tuple(node) else [node]
                self.new |= {item: whole[origin(item)[1]] for item in items}
        self.stage |= dict.fromkeys(self.builder.made[first_new:], head.stage)

    def _rows(self, head: LossHead) -> fx.Node:
        """Return the rows that the product reads, in the order in which the loss reads them, [rows, features]."""
        rows = self.new[head.rows]
        with self.builder.at(head.product):
            for node in head.leading:
                if op_spec(node).reshapes:
                    rows = self.builder.reshape(rows, [*shape(node)[:-1], shape(rows)[-1]])
                else:
                    rows = self.builder.call(node.target, rows, *node.args[1:])  # type: ignore[arg-type]
        return rows

    def _emit_part(self, head: LossHead, rows: fx.Node, start: int, stop: int, parts: Parts) -> None:
        """Emit a head for the rows from ``start`` to ``stop``, and add its results to ``parts``."""
        env: dict[fx.Node, fx.Node] = {}

        def read(node: fx.Node, source: fx.Node, dim: int | None) -> fx.Node:
            if source in env:
                return env[source]
            whole = rows if node is head.product and source is head.rows else self.new[source]
            return whole if dim is None else self.builder.call(aten.slice.Tensor, whole, dim, start, stop)

        for node in head.nodes:
            if is_getitem(node):
                continue
            if node in head.leading:
                env[node] = env[tensor_inputs(node)[0]]
                continue
            with self.builder.at(node):
                inputs = [
                    read(node, source, dim) for source, dim in zip(tensor_inputs(node), head.dims[node], strict=True)
                ]
                args, kwargs = _arguments(node, inputs)
                result = self.builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
                for index in head.ends.get(node, ()):
                    parts[node, index].append(self.builder.getitem(result, index) if _is_tuple(node) else result)
            if node not in head.ends:
                env[node] = result
                self.again.add(result)


def _arguments(node: fx.Node, inputs: Iterable[fx.Node]) -> Any:
    """Return the arguments of a call, with other tensors."""
    remaining = iter(inputs)
    return fx.map_arg((node.args, node.kwargs), lambda _: next(remaining))


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(facts(node).value, tuple)
