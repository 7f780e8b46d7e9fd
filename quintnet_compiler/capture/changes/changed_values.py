"""Values that forward changes in place where autograd does not see it, in a traced graph: gradients go on to the value
as it was, not into the change.

    h = f(x)                        h = f(x)
    with torch.no_grad():           h0 = after_gradients(h, [])
        h.clamp_(-1, 1)             clamp_(detach(h), -1, 1)
    y = h @ w                       h1, t = with_tangent(detach(h), True)
                                    y = after_gradients(h1, declare_gradient(h0, t)) @ w

A tensor keeps its place in autograd's graph: what reads it after the change has the new value, and the gradient of that
is the gradient of what it was. So it is with parameters, with values in between, and with all views of either. This is
done while the graph still has in-place operators (the left side); the right side without them has the gradient as a
derivative of :mod:`...ops.derivatives.user_derivatives`, and the new value behind ``detach``.

Each ``detach`` is another tensor of the same memory. What writes to one of them and has a gradient gives a gradient to
that one alone; all others are changed as under ``no_grad``.
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
from .memory import same_memory, written
from .no_grad import WITHOUT_GRADIENTS

aten = torch.ops.aten
_detach = aten.detach.default


def keep_gradients(exported: ExportedProgram) -> None:
    """Change the graph of ``exported`` where it changes values that have a gradient, and autograd would not see it.

    Raises:
        CompileError: QN110 for a parameter that has several places (torch's removal of operators in place fails).
    """
    _in_autocast(exported.graph_module)
    if not any(True for node in exported.graph.nodes for _ in written(node)):
        return
    names = exported.graph_signature.inputs_to_parameters
    of = {n: exported.state_dict[names[n.name]] for n in exported.graph.nodes if n.name in names}
    tensors = Tensors(exported.graph, {n for n, parameter in of.items() if parameter.requires_grad})
    for node, writes in tensors.writes.items():
        for parameter in writes.keys() & of.keys():
            if sum(one is of[parameter] for one in of.values()) > 1:
                raise CompileError(
                    "QN110",
                    f"the forward pass changes {names[parameter.name].removeprefix('model.')!r}, which has several "
                    "places in the model; a program would not",
                    where=where_of(node),
                    fix="change it outside forward, between steps",
                )
    if not tensors.unseen:
        return
    replaced = _Rewriter(exported.graph, tensors).run()
    for spec in exported.graph_signature.output_specs:
        spec.arg.name = replaced.get(spec.arg.name, spec.arg.name)
    exported.graph.eliminate_dead_code()
    exported.graph.lint()
    exported.graph_module.recompile()


def _in_autocast(gm: fx.GraphModule) -> None:
    """Change the graphs of regions of autocast, too, each on its own.

    Raises:
        CompileError: QN110 where one changes what is made outside, and nothing outside would see it.
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
            _Rewriter(body.graph, tensors).run()
            body.recompile()


@dataclass(frozen=True)
class Write:
    """A write to some memory: the tensors of that memory that have a gradient before, and the ``tensor`` that gets the
    gradient of what is written, if that has one."""

    grown: frozenset[fx.Node]
    tensor: fx.Node | None


@dataclass
class Tensors:
    """What autograd knows of the values of a graph.

    ``memory``: what first had the memory of a value, ``of_memory`` the tensors that have it; ``tensor``: what first had
    its place in autograd's graph, which is the base of a view, and what ``detach`` made. ``source``: of a view, what it
    is a view of, as the user wrote it. ``writes``: by operator, and by the memory that it writes to. ``unseen``: memory
    in which a write and a gradient are of different tensors, so that an operator in place would not do what autograd
    does. ``leaves``: what is trained.
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
            source = same_memory(node)
            self.memory[node] = node if source is None else self.memory[source]
            detached = op_spec(node).detaches == "of its own"
            self.tensor[node] = self.tensor[source] if source is not None and not detached else node
            if source is not None:
                self.source[node] = source
            if self.tensor[node] is node:
                self.of_memory.setdefault(self.memory[node], []).append(node)
            if node.op != "call_function":
                continue
            flows = WITHOUT_GRADIENTS not in node.meta and any(self.tensor[x] in grown for x in node.all_input_nodes)
            flows = flows and op_spec(node).detaches != "in place"
            targets = list(written(node))
            if targets:
                places = dict.fromkeys(self.memory[x] for x in targets)
                self.writes[node] = MappingProxyType({m: self._write(m, targets, grown, flows) for m in places})
                grown |= {self.tensor[x] for x in targets if flows and _differentiable(x)}
                grown -= {self.tensor[x] for x in targets if op_spec(node).detaches == "in place"}
            elif op_spec(node).inner_gradient == "start":  # its argument is a leaf from now on
                grown |= {node, *(self.tensor[x] for x in node.all_input_nodes)}
            elif source is None and flows and not detached and _differentiable(node):
                grown.add(node)
        self._find_unseen()

    def _write(self, memory: fx.Node, targets: Collection[fx.Node], grown: set[fx.Node], flows: bool) -> Write:
        mine = {self.tensor[x] for x in targets if self.memory[x] is memory and flows and _differentiable(x)}
        return Write(frozenset(x for x in grown if self.memory[x] is memory), next(iter(mine), None))

    def _find_unseen(self) -> None:
        place = {node: i for i, node in enumerate(self.graph.nodes)}
        last: dict[fx.Node, int] = {}  # where each tensor is read
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
    known = node.meta.get("val")
    parts = known if isinstance(known, (tuple, list)) else (known,)
    return any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in parts)


@dataclass
class _Rewriter:
    """The memory of the graph as it is always has the values that are in it now."""

    graph: fx.Graph
    known: Tensors
    begun: set[fx.Node] = field(default_factory=set)  # memory that is not as it was made
    starts: dict[fx.Node, fx.Node] = field(default_factory=dict)  # by tensor: what it was when autograd last saw it
    now: dict[fx.Node, fx.Node] = field(default_factory=dict)  # what a tensor, or a view, is since the last write
    meta: dict[fx.Node, Any] = field(default_factory=dict)  # by memory: of the operator that wrote last

    def run(self) -> Mapping[str, str]:
        """The names of results of the graph that others stand for."""
        known, out = self.known, self.graph.output_node()
        named = {x: x.name for x in out.all_input_nodes}
        for node in list(self.graph.nodes):
            writes = {m: w for m, w in known.writes.get(node, {}).items() if m in known.unseen}
            if node.op == "placeholder" or (node in known.source and not writes):
                continue
            targets = [x for x in written(node) if known.memory[x] in writes]
            stands: dict[fx.Node, fx.Node] = {}
            with self.graph.inserting_before(node):
                for x in node.all_input_nodes:
                    if x not in targets and known.memory.get(x) in self.begun:
                        stands[x] = self._current(x)
                for memory, write in writes.items():
                    self._begin(memory, write, node)
                    to = self._at if write.tensor is None else self._current
                    stands |= {x: to(x) for x in targets if known.memory[x] is memory}
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda x: stands.get(x, x))  # noqa: B023
            if node is out:
                return {name: stands[x].name for x, name in named.items() if x in stands}
            for memory, write in writes.items():
                mine = self.now.get(write.tensor) if write.tensor is not None else None
                self.now = {x: found for x, found in self.now.items() if known.memory[x] is not memory}
                if write.tensor is not None and mine is not None:
                    self.now[write.tensor] = mine
                    if mine is not memory:
                        with self.graph.inserting_before(node.next):
                            value = self._made(_detach, (mine,), write.tensor)
                            self._made(aten.copy_.default, (self._at(write.tensor), value), write.tensor)
        return {}

    def _begin(self, memory: fx.Node, write: Write, node: fx.Node) -> None:
        """Prepare a write."""
        if memory not in self.begun:
            self.begun.add(memory)
            self.now |= {x: x for x in self.known.of_memory[memory] if x < node}
        self.meta[memory] = node.meta
        for tensor in sorted(write.grown):
            if tensor in self.now and tensor is not write.tensor:
                self.starts[tensor] = self._made(after_gradients, (self.now[tensor], []), tensor)
        if op_spec(node).detaches == "in place":
            self.starts.pop(self.known.tensor[node.args[0]], None)  # type: ignore[index]
        current = None if write.tensor is None else self._current(write.tensor)
        if write.tensor is not None and current is not None and op_spec(current).detaches == "of its own":
            # others have its memory
            self.now[write.tensor] = self._made(aten.clone.default, (self.now[write.tensor],), write.tensor)

    def _current(self, x: fx.Node) -> fx.Node:
        """``x`` as it is now; the gradient of a tensor is that of what it was."""
        if x in self.now:
            return self.now[x]
        if self.known.tensor[x] is not x:
            self.now[x] = self._copied(x, self._current)
        elif x in self.starts:
            self.now[x] = self._grown(x)
        else:
            self.now[x] = self._at(x)
        return self.now[x]

    def _at(self, x: fx.Node) -> fx.Node:
        """The place of ``x`` in memory, without a gradient."""
        if x is self.known.memory[x]:
            return self._made(_detach, (x,), x)
        return self._copied(x, self._at)

    def _copied(self, x: fx.Node, of: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """``x`` as the same view of another value."""
        source = self.known.source[x]
        if list(written(x)):
            return of(source)
        if is_getitem(x):
            several = x.args[0]
            assert isinstance(several, fx.Node)
            views = self.graph.node_copy(several, lambda n: of(n) if n is source else n)
            copy = self.graph.call_function(operator.getitem, (views, x.args[1]))
            copy.meta = dict(x.meta)
            return copy
        return self.graph.node_copy(x, lambda n: of(n) if n is source else n)

    def _grown(self, tensor: fx.Node) -> fx.Node:
        """What is in memory now, with the gradient of what a tensor was."""
        value: Any = tensor.meta["val"]
        both = self._made(with_tangent, (self._at(tensor), True), tensor, [value, value])
        new, tangent = (self._made(operator.getitem, (both, i), tensor) for i in range(2))
        token = value.new_empty((), dtype=torch.int64)
        says = self._made(declare_gradient, (self.starts[tensor], tangent), tensor, [token])
        done = self._made(operator.getitem, (says, 0), tensor, token)
        return self._made(after_gradients, (new, [done]), tensor)

    def _made(self, target: Any, args: tuple[Any, ...], like: fx.Node, value: Any = None) -> fx.Node:
        made = self.graph.call_function(target, args)
        made.meta = {**self.meta[self.known.memory[like]], "val": like.meta["val"] if value is None else value}
        made.meta.pop(WITHOUT_GRADIENTS, None)
        return made
