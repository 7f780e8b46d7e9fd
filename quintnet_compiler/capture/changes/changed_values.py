"""Rewrite in-place changes that autograd does not see: gradients flow to the old value, not into the change.

    h = f(x)                        h = f(x)
    with torch.no_grad():           h0 = after_gradients(h, [])
        h.clamp_(-1, 1)             clamp_(detach(h), -1, 1)
    y = h @ w                       h1, t = with_tangent(detach(h), True)
                                    y = after_gradients(h1, declare_gradient(h0, t)) @ w

A tensor keeps its place in autograd's graph: a reader after the change gets the new value, and its gradient goes to the
old value. So it is with parameters, with values in between, and with all views of either. The rewrite needs in-place
operators (the left side); on the right side, the gradient is a derivative of
:mod:`...ops.derivatives.user_derivatives`, and the new value comes from a ``detach``.

Each ``detach`` is another tensor of the same memory. A write with a gradient to one of them gives a gradient to that
one alone; all others are changed as under ``no_grad``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from ...core.annotations import is_getitem
from ...core.errors import CompileError
from ...ops.catalog import op_spec
from ...ops.derivatives.user_derivatives import after_gradients, declare_gradient, with_tangent
from ..places import where_of
from .autocast import regions
from .memory import same_memory, written_arguments
from .no_grad import WITHOUT_GRADIENTS

aten = torch.ops.aten
_detach = aten.detach.default


def keep_gradients(exported: ExportedProgram) -> None:
    """Rewrite writes in the graph of ``exported`` to values with a gradient that autograd would not see.

    Raises:
        CompileError: QN110 for a parameter with several places (torch cannot remove in-place operators then).
    """
    _in_autocast(exported.graph_module)
    if not any(True for node in exported.graph.nodes for _ in written_arguments(node)):
        return
    names = exported.graph_signature.inputs_to_parameters
    of = {n: exported.state_dict[names[n.name]] for n in exported.graph.nodes if n.name in names}
    tensors = Tensors(exported.graph, {n for n, parameter in of.items() if parameter.requires_grad})
    for node, writes in tensors.writes.items():
        for parameter in writes.keys() & of.keys():
            if sum(x is of[parameter] for x in of.values()) > 1:
                raise CompileError(
                    "QN110",
                    f"the forward pass changes {names[parameter.name].removeprefix('model.')!r}, which has several "
                    "places in the model; a program would not",
                    where=where_of(node),
                    fix="change it outside forward, between steps",
                )
    if not tensors.unseen:
        return
    replaced = _Rewriter(exported.graph, tensors).rewrite_graph()
    for spec in exported.graph_signature.output_specs:
        spec.arg.name = replaced.get(spec.arg.name, spec.arg.name)
    exported.graph.eliminate_dead_code()
    exported.graph.lint()
    exported.graph_module.recompile()


def _in_autocast(gm: fx.GraphModule) -> None:
    """Rewrite the graphs of autocast regions, each by itself.

    Raises:
        CompileError: QN110 if one changes a tensor from outside, and nothing outside would see it.
    """
    for node, _, body, _ in regions(gm):
        _in_autocast(body)
        inputs = {n for n in body.graph.nodes if n.op == "placeholder" and _differentiable(n)}
        tensors = Tensors(body.graph, inputs)
        for write, memory in ((n, memory) for n, writes in tensors.writes.items() for memory in writes):
            if memory.op == "placeholder" and (memory in tensors.unseen or not node.users):
                raise CompileError(
                    "QN110",
                    "the forward pass changes a tensor in place inside a region of torch.autocast, and made it outside "
                    "of that; a program would not",
                    where=where_of(write),
                    fix="change it before or after that region",
                )
        if tensors.unseen:
            _Rewriter(body.graph, tensors).rewrite_graph()
            body.recompile()


@dataclass(frozen=True)
class Write:
    """A write to some memory.

    ``grown``: the tensors of that memory that have a gradient before. ``tensor``: the one that gets the gradient of the
    written value, if that has one.
    """

    grown: frozenset[fx.Node]
    tensor: fx.Node | None


@dataclass
class Tensors:
    """Memory and autograd's tensors of the values of a graph.

    Attributes:
        graph: The graph.
        leaves: The trained inputs.
        of_memory: For some memory, the tensors that have it.
        memory: For a value, the first value with its memory.
        tensor: For a value, the first value with its place in autograd's graph: the base of a view, or a ``detach``.
        source: For a view, the value that the user's code views.
        writes: By operator, and by the memory that it writes to.
        unseen: Memory in which a write and a gradient belong to different tensors, so that an in-place operator would
            not do what autograd does.
    """

    graph: fx.Graph
    leaves: Collection[fx.Node]
    of_memory: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    memory: dict[fx.Node, fx.Node] = field(default_factory=dict)
    tensor: dict[fx.Node, fx.Node] = field(default_factory=dict)
    source: dict[fx.Node, fx.Node] = field(default_factory=dict)
    writes: dict[fx.Node, Mapping[fx.Node, Write]] = field(default_factory=dict)
    unseen: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        grown = set(self.leaves)
        for node in self.graph.nodes:
            self._add_value(node)
            if node.op != "call_function":
                continue
            flows = WITHOUT_GRADIENTS not in node.meta and any(self.tensor[x] in grown for x in node.all_input_nodes)
            flows = flows and op_spec(node).detaches != "in place"
            if targets := list(written_arguments(node)):
                self._add_writes(node, targets, grown, flows=flows)
            else:
                grown |= self._grown_by(node, flows=flows)
        self._find_unseen()

    def _add_value(self, node: fx.Node) -> None:
        """Record the memory and the tensor of a value."""
        source = same_memory(node)
        self.memory[node] = self.tensor[node] = node
        if source is not None:
            self.source[node], self.memory[node] = source, self.memory[source]
            if op_spec(node).detaches != "of its own":
                self.tensor[node] = self.tensor[source]
        if self.tensor[node] is node:
            self.of_memory.setdefault(self.memory[node], []).append(node)

    def _add_writes(self, node: fx.Node, targets: Collection[fx.Node], grown: set[fx.Node], *, flows: bool) -> None:
        """Record what an operator writes to, and change ``grown``. ``flows``: whether it has a gradient."""
        memory = dict.fromkeys(self.memory[x] for x in targets)
        self.writes[node] = MappingProxyType({m: self._write(m, targets, grown, flows) for m in memory})
        if flows:
            grown |= {self.tensor[x] for x in targets if _differentiable(x)}
        if op_spec(node).detaches == "in place":
            grown -= {self.tensor[x] for x in targets}

    def _grown_by(self, node: fx.Node, *, flows: bool) -> set[fx.Node]:
        """Return the tensors that have a gradient after an operator that writes nothing. ``flows``: whether it has."""
        if op_spec(node).inner_gradient == "start":  # its argument is now a leaf
            return {node, *(self.tensor[x] for x in node.all_input_nodes)}
        is_new = node not in self.source and op_spec(node).detaches != "of its own"
        return {node} if is_new and flows and _differentiable(node) else set()

    def _write(self, memory: fx.Node, targets: Collection[fx.Node], grown: set[fx.Node], flows: bool) -> Write:
        mine = {self.tensor[x] for x in targets if self.memory[x] is memory and flows and _differentiable(x)}
        return Write(frozenset(x for x in grown if self.memory[x] is memory), next(iter(mine), None))

    def _find_unseen(self) -> None:
        place = {node: i for i, node in enumerate(self.graph.nodes)}
        last: dict[fx.Node, int] = {}  # the last place where each tensor is read
        for node, i in place.items():
            for x in node.all_input_nodes:
                if self.source.get(node) is not x:
                    last[self.tensor[x]] = i
        for node, writes in self.writes.items():
            for memory, write in writes.items():
                lost = set(write.grown)
                if write.tensor is memory:
                    lost -= {memory}
                elif write.tensor is not None:
                    lost = {x for x in self.of_memory[memory] if x < node}
                if any(x.op == "placeholder" or last.get(x, 0) > place[node] for x in lost):
                    self.unseen.add(memory)


def _differentiable(node: fx.Node) -> bool:
    if op_spec(node).inner_gradient == "gradient":
        return bool(node.args[3])
    if declare_gradient in (node.target, getattr(node.args[0] if node.args else None, "target", None)):
        return True  # it says where a gradient goes
    result = node.meta.get("val")
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in parts)


@dataclass
class _Rewriter:
    """A rewrite after which the memory of the graph has the current values at each place."""

    graph: fx.Graph
    tensors: Tensors
    begun: set[fx.Node] = field(default_factory=set)  # memory that was written to
    starts: dict[fx.Node, fx.Node] = field(default_factory=dict)  # by tensor: its value when autograd last saw it
    now: dict[fx.Node, fx.Node] = field(default_factory=dict)  # by tensor or view: its node since the last write
    meta: dict[fx.Node, Any] = field(default_factory=dict)  # by memory: of the operator that wrote last

    def rewrite_graph(self) -> Mapping[str, str]:
        """Rewrite the graph; return the new names of its results that have other nodes."""
        tensors, out = self.tensors, self.graph.output_node()
        named = {x: x.name for x in out.all_input_nodes}
        for node in list(self.graph.nodes):
            writes = {m: w for m, w in tensors.writes.get(node, {}).items() if m in tensors.unseen}
            if node.op == "placeholder" or (node in tensors.source and not writes):
                continue
            replaced = self._replaced_inputs(node, writes)
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda x: replaced.get(x, x))  # noqa: B023
            if node is out:
                return {name: replaced[x].name for x, name in named.items() if x in replaced}
            for memory, write in writes.items():
                self._end(memory, write, node)
        return {}

    def _replaced_inputs(self, node: fx.Node, writes: Mapping[fx.Node, Write]) -> dict[fx.Node, fx.Node]:
        """Return new nodes for inputs whose memory was written to, and for those that ``node`` writes to."""
        memory = self.tensors.memory
        targets = [x for x in written_arguments(node) if memory[x] in writes]
        replaced: dict[fx.Node, fx.Node] = {}
        with self.graph.inserting_before(node):
            for x in node.all_input_nodes:
                if x not in targets and memory.get(x) in self.begun:
                    replaced[x] = self._current(x)
            for place, write in writes.items():
                self._begin(place, write, node)
                to = self._at if write.tensor is None else self._current
                replaced |= {x: to(x) for x in targets if memory[x] is place}
        return replaced

    def _end(self, memory: fx.Node, write: Write, node: fx.Node) -> None:
        """Forget the nodes of memory after a write to it, and copy the written tensor to it."""
        current = self.now.get(write.tensor) if write.tensor is not None else None
        self.now = {x: node for x, node in self.now.items() if self.tensors.memory[x] is not memory}
        if write.tensor is not None and current is not None:
            self.now[write.tensor] = current
            if current is not memory:
                with self.graph.inserting_before(node.next):
                    value = self._call(_detach, (current,), write.tensor)
                    self._call(aten.copy_.default, (self._at(write.tensor), value), write.tensor)

    def _begin(self, memory: fx.Node, write: Write, node: fx.Node) -> None:
        """Prepare a write."""
        if memory not in self.begun:
            self.begun.add(memory)
            self.now |= {x: x for x in self.tensors.of_memory[memory] if x < node}
        self.meta[memory] = node.meta
        for tensor in sorted(write.grown):
            if tensor in self.now and tensor is not write.tensor:
                self.starts[tensor] = self._call(after_gradients, (self.now[tensor], []), tensor)
        if op_spec(node).detaches == "in place":
            self.starts.pop(self.tensors.tensor[node.args[0]], None)  # type: ignore[index]
        current = None if write.tensor is None else self._current(write.tensor)
        if write.tensor is not None and current is not None and op_spec(current).detaches == "of its own":
            # others have its memory
            self.now[write.tensor] = self._call(aten.clone.default, (self.now[write.tensor],), write.tensor)

    def _current(self, x: fx.Node) -> fx.Node:
        """Return ``x`` with its current value; the gradient of a tensor goes to its old value."""
        if x in self.now:
            return self.now[x]
        if self.tensors.tensor[x] is not x:
            self.now[x] = self._copied(x, self._current)
        elif x in self.starts:
            self.now[x] = self._grown(x)
        else:
            self.now[x] = self._at(x)
        return self.now[x]

    def _at(self, x: fx.Node) -> fx.Node:
        """Return the place of ``x`` in memory, without a gradient."""
        if x is self.tensors.memory[x]:
            return self._call(_detach, (x,), x)
        return self._copied(x, self._at)

    def _copied(self, x: fx.Node, of: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """Return the same view as ``x`` of another value."""
        source = self.tensors.source[x]
        if list(written_arguments(x)):
            return of(source)
        if is_getitem(x):
            views_node = x.args[0]
            assert isinstance(views_node, fx.Node)
            views = self.graph.node_copy(views_node, lambda n: of(n) if n is source else n)
            copy = self.graph.call_function(operator.getitem, (views, x.args[1]))
            copy.meta = dict(x.meta)
            return copy
        return self.graph.node_copy(x, lambda n: of(n) if n is source else n)

    def _grown(self, tensor: fx.Node) -> fx.Node:
        """Return the current value in memory, whose gradient goes to the old value of a tensor."""
        value: Any = tensor.meta["val"]
        both = self._call(with_tangent, (self._at(tensor), True), tensor, [value, value])
        new, tangent = (self._call(operator.getitem, (both, i), tensor) for i in range(2))
        token = value.new_empty((), dtype=torch.int64)
        says = self._call(declare_gradient, (self.starts[tensor], tangent), tensor, [token])
        done = self._call(operator.getitem, (says, 0), tensor, token)
        return self._call(after_gradients, (new, [done]), tensor)

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node, value: Any = None) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = {**self.meta[self.tensors.memory[like]], "val": like.meta["val"] if value is None else value}
        node.meta.pop(WITHOUT_GRADIENTS, None)
        return node
