"""Parameters that forward changes in place, in a traced graph: gradients go on to the parameter, not into the change.

    with torch.no_grad():           w0 = after_gradients(w, [])
        w.clamp_(-1, 1)             clamp_(detach(w), -1, 1)
    y = x @ w                       w1, t = with_tangent(detach(w), True)
                                    y = x @ after_gradients(w1, declare_gradient(w0, t))

``w`` stays a leaf of autograd: what reads it after the change has the new value, and the gradient of that is the
gradient of ``w``. This is done while the graph still has in-place operators (the left side); the right side without
them has the gradient as a derivative of :mod:`...ops.user_derivatives`, and the new value behind ``detach``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from ...compat.torch import OpOverload, schema
from ...core.errors import CompileError
from ...ops.user_derivatives import after_gradients, declare_gradient, with_tangent
from ..places import where_of

aten = torch.ops.aten


def keep_gradients(exported: ExportedProgram) -> None:
    """Change the graph of ``exported`` for trained parameters that it changes.

    Raises:
        CompileError: QN110 for a parameter that has several places (torch's removal of operators in place fails).
    """
    names = exported.graph_signature.inputs_to_parameters
    of = {n: exported.state_dict[names[n.name]] for n in exported.graph.nodes if n.name in names}
    memory = _Memory(exported.graph, set(of))
    for node in memory.changed:
        if sum(parameter is of[node] for parameter in of.values()) > 1:
            raise CompileError(
                "QN110",
                f"the forward pass changes {names[node.name].removeprefix('model.')!r}, which has several places in "
                "the model; a program would not",
                where=where_of(next(n for n in exported.graph.nodes if node in map(memory.of.get, written(n)))),
                fix="change it outside forward, between steps",
            )
    changed = {node for node in memory.changed if of[node].requires_grad}
    _Rewriter(exported.graph, changed).run()
    exported.graph.eliminate_dead_code()
    exported.graph.lint()
    exported.graph_module.recompile()


def written(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that an operator writes to."""
    if not isinstance(node.target, OpOverload) or not schema(node.target).is_mutable:
        return
    arguments = schema(node.target).arguments
    given = {a.name: x for a, x in zip(arguments, node.args, strict=False)} | node.kwargs
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            found: list[fx.Node] = []
            fx.map_arg(given.get(argument.name), found.append)
            yield from found


def same_memory(node: fx.Node) -> fx.Node | None:
    """The argument whose memory a result has: that of a view, or of an operator in place."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        return same_memory(node.args[0])
    if not isinstance(node.target, OpOverload):
        return None
    returned = schema(node.target).returns
    return node.args[0] if returned and returned[0].alias_info is not None else None


@dataclass
class _Memory:
    """``of``: the parameter whose memory a value has. ``changed``: the parameters that are written to."""

    graph: fx.Graph
    parameters: set[fx.Node]
    of: dict[fx.Node, fx.Node] = field(default_factory=dict)
    changed: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            if node in self.parameters:
                self.of[node] = node
            elif (source := same_memory(node)) in self.of:
                self.of[node] = self.of[source]
            self.changed |= {self.of[x] for x in written(node) if x in self.of}


@dataclass
class _Rewriter:
    graph: fx.Graph
    changed: set[fx.Node]
    source: dict[fx.Node, fx.Node] = field(default_factory=dict)  # of each view of a parameter, as the user wrote it
    starts: dict[fx.Node, fx.Node] = field(default_factory=dict)
    now: dict[fx.Node, fx.Node] = field(default_factory=dict)  # what stands for a value since the last change

    def run(self) -> None:
        of = _Memory(self.graph, self.changed).of
        self.source = {x: source for x in of if (source := same_memory(x)) is not None}
        nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        begun: set[fx.Node] = set()
        for node in nodes:
            targets = {x for x in written(node) if x in of}
            with self.graph.inserting_before(node):
                for parameter in sorted({of[x] for x in targets} - self.starts.keys()):
                    self.starts[parameter] = self._made(after_gradients, (parameter, []), parameter)
                fresh = {x: self._again(x, self._detached) for x in targets}
                reads = [] if same_memory(node) in of and not targets else node.all_input_nodes
                stands = {x: self._current(x) for x in reads if of.get(x) in begun and x not in targets}
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda x: (fresh | stands).get(x, x))  # noqa: B023
            for parameter in {of[x] for x in targets}:
                begun.add(parameter)
                self.now = {x: found for x, found in self.now.items() if of[x] is not parameter}

    def _current(self, x: fx.Node) -> fx.Node:
        if x not in self.now:
            self.now[x] = self._leaf(x) if x in self.changed else self._again(x, self._current)
        return self.now[x]

    def _again(self, x: fx.Node, of_parameter: Any) -> fx.Node:
        """``x``, a view of a parameter, as the same view of what stands for the parameter."""
        if x in self.changed:
            return of_parameter(x)  # type: ignore[no-any-return]
        source = self.source[x]
        if list(written(x)):
            return self._again(source, of_parameter)
        if x.target is operator.getitem:
            several = x.args[0]
            assert isinstance(several, fx.Node)
            views = self.graph.node_copy(several, lambda n: self._again(n, of_parameter) if n is source else n)
            return self._made(operator.getitem, (views, x.args[1]), x)
        return self.graph.node_copy(x, lambda n: self._again(n, of_parameter) if n is source else n)

    def _detached(self, parameter: fx.Node) -> fx.Node:
        return self._made(aten.detach.default, (parameter,), parameter)

    def _leaf(self, parameter: fx.Node) -> fx.Node:
        """The parameter as it is now, whose gradient is the parameter's."""
        value: Any = parameter.meta["val"]
        both = self._made(with_tangent, (self._detached(parameter), True), parameter, [value, value])
        new, tangent = (self._made(operator.getitem, (both, i), parameter) for i in range(2))
        token = value.new_empty((), dtype=torch.int64)
        says = self._made(declare_gradient, (self.starts[parameter], tangent), parameter, [token])
        done = self._made(operator.getitem, (says, 0), parameter, token)
        return self._made(after_gradients, (new, [done]), parameter)

    def _made(self, target: Any, args: tuple[Any, ...], like: fx.Node, value: Any = None) -> fx.Node:
        made = self.graph.call_function(target, args)
        made.meta = {"val": like.meta["val"] if value is None else value}
        return made
