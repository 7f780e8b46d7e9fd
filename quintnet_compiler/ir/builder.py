"""Build a graph node by node while computing each node's shape; every pass that rewrites a graph uses it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from ..compat.torch import FakeTensorMode, schema_or_none, views_untracked
from ..core.absent_gpu import call_fake
from ..core.annotations import Facts, Leaf, Value, annotate, facts, is_float, value
from ..core.errors import Where
from ..ops.catalog import spec_of
from ..ops.derivatives.user_derivatives import is_tangent

aten = torch.ops.aten
Target = Callable[..., Any]


class GraphBuilder:
    """Appends nodes to a new graph. Values are fake tensors of ``mode``; nothing is computed.

    Attributes:
        graph: the new graph.
        mode: the fake mode of all values.
        made: the nodes of calls, in order.
        scope: within one scope (a stage, say) equal calls are one node; None: every call is a node of its own.
        where: the place in the user's model to which new nodes are attributed.
        documents: likewise the expected lengths of documents.
        backward: whether new nodes belong to the backward.
        prefix: how names of new nodes begin.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.graph = fx.Graph()
        self.mode = mode
        self.made: list[fx.Node] = []
        self.scope: Hashable = None
        self.shared: dict[Hashable, fx.Node] = {}
        self.results: dict[Hashable, Any] = mode.results
        self.where = Where()
        self.documents: tuple[int, ...] = ()
        self.backward = False
        self.prefix = ""

    @contextmanager
    def named(self, prefix: str) -> Iterator[None]:
        """Begin names of new nodes with ``prefix``, while inside."""
        outer_prefix, self.prefix = self.prefix, prefix
        try:
            yield
        finally:
            self.prefix = outer_prefix

    @contextmanager
    def at(self, node: fx.Node, *, backward: bool = False) -> Iterator[None]:
        """Attribute new nodes to the place of ``node``, while inside."""
        outer = self.where, self.documents, self.backward
        self.where, self.documents, self.backward = facts(node).where, facts(node).documents, backward
        try:
            yield
        finally:
            self.where, self.documents, self.backward = outer

    def placeholder(self, name: str, value: Tensor, leaf: Leaf | None = None, *, needs_grad: bool = False) -> fx.Node:
        """Append a placeholder."""
        return annotate(self.graph.placeholder(name), Facts(value, where=self.where, needs_grad=needs_grad, leaf=leaf))

    def call(self, target: Target, *args: Any, **kwargs: Any) -> fx.Node:
        """Append ``target(*args, **kwargs)``; node arguments may be nested in lists.

        Where the builder has a scope, an equal earlier call of that scope is returned instead.
        """
        if target is operator.getitem:
            return self.getitem(args[0], args[1])
        args, kwargs = map_aggregate((args, kwargs), _of_any_rank)
        key = (target, repr((args, kwargs)), self.scope, self.backward)
        if self.scope is not None and key in self.shared:
            return self.shared[key]
        sources: list[fx.Node] = []
        fx.map_arg((args, kwargs), sources.append)
        result = self._result(target, args, kwargs, sources)
        outputs = (result,) if isinstance(result, Tensor) else result
        user_derivative = spec_of(target).user_derivative
        flows = user_derivative == "tangent" or (
            spec_of(target).detaches is None
            and any(facts(s).needs_grad for s in sources)
            and (user_derivative == "declaration" or any(isinstance(o, Tensor) and is_float(o) for o in outputs))
        )
        name = self.prefix + getattr(target, "overloadpacket", target).__name__
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        self.made.append(node)
        self.shared[key] = node
        return annotate(
            node,
            Facts(
                result,
                where=self.where,
                needs_grad=flows,
                phase="backward" if self.backward else "forward",
                documents=self.documents,
            ),
        )

    def _result(self, target: Target, args: Any, kwargs: Any, sources: list[fx.Node]) -> Value:
        """Return the fake result of a call.

        Calls with equal targets, arguments and shapes share it, in all graphs of one mode: no node's value is changed.
        """
        layouts = tuple(_layout(value(source)) for source in sources)
        key = (target, repr(fx.map_arg((args, kwargs), lambda _: "*")), layouts)
        if key not in self.results:
            fake_args, fake_kwargs = fx.map_arg((args, kwargs), value)
            with self.mode, views_untracked():
                result = call_fake(target, fake_args, fake_kwargs, self.results)
            # fused attention also returns lengths, and None for outputs that it did not compute
            if isinstance(result, (tuple, list)):
                result = tuple(x if isinstance(x, Tensor) else None for x in result)
            self.results[key] = result
        shared: Value = self.results[key]
        return shared

    def getitem(self, source: fx.Node, index: int) -> fx.Node:
        """Append ``source[index]``."""
        source_facts = facts(source)
        assert isinstance(source_facts.value, tuple)
        part = source_facts.value[index]
        name = _part_name(source, index) or (f"{self.prefix}getitem" if self.prefix else None)
        node = self.graph.create_node("call_function", operator.getitem, (source, index), name=name)
        self.made.append(node)
        grad = source_facts.needs_grad and isinstance(part, Tensor) and is_float(part) and not is_tangent(node)
        return annotate(node, Facts(part, where=source_facts.where, needs_grad=grad, phase=source_facts.phase))

    def reshape(self, x: fx.Node, shape: list[int] | tuple[int, ...]) -> fx.Node:
        """Return ``x`` in another shape; ``x`` itself where the shape is the same."""
        return x if tuple(value(x).shape) == tuple(shape) else self.call(aten.reshape.default, x, list(shape))

    def output(self, nodes: tuple[fx.Node, ...]) -> None:
        """Append the output, and check the graph."""
        self.graph.output(nodes)
        self.graph.lint()


def _part_name(source: fx.Node, index: int) -> str | None:
    """Return the name of an operator's result from its schema (``group_plan_ends``), for operators of this package.

    Names of torch's operators are long enough without.
    """
    if getattr(source.target, "namespace", None) != "quintnet":
        return None
    results = schema_or_none(source.target).returns
    return f"{source.name}_{results[index].name}" if index < len(results) and results[index].name else None


def _layout(x: Tensor) -> Hashable:
    return tuple(x.shape), x.stride(), x.dtype, x.device


def _of_any_rank(x: Any) -> Any:
    """Drop the index of a device: every rank runs the code, each on its own device."""
    return torch.device(x.type) if isinstance(x, torch.device) else x
