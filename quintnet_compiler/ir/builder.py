"""Build a graph node by node while computing each node's shape: what every pass that rewrites a graph uses."""

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
from ..ops.derivatives.user_derivatives import declare_gradient, is_tangent, with_tangent

aten = torch.ops.aten
Target = Callable[..., Any]


class GraphBuilder:
    """Appends nodes to a new graph. Values are fake tensors of ``mode``; nothing is computed.

    ``at`` is the place in the user's model that new nodes are attributed to; ``phase`` and ``documents`` likewise.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.graph = fx.Graph()
        self.mode = mode
        self.made: list[fx.Node] = []
        # Within one scope (a stage, say) equal calls are one node; None: every call is a node of its own.
        self.scope: Hashable = None
        self.shared: dict[Hashable, fx.Node] = {}
        self.results: dict[Hashable, Any] = mode.results
        self.where = Where()
        self.documents: tuple[int, ...] = ()
        self.backward = False
        self.prefix = ""

    @contextmanager
    def named(self, prefix: str) -> Iterator[None]:
        """Names of new nodes begin with ``prefix``."""
        before, self.prefix = self.prefix, prefix
        try:
            yield
        finally:
            self.prefix = before

    @contextmanager
    def at(self, node: fx.Node, *, backward: bool = False) -> Iterator[None]:
        before = self.where, self.documents, self.backward
        self.where, self.documents, self.backward = facts(node).where, facts(node).documents, backward
        try:
            yield
        finally:
            self.where, self.documents, self.backward = before

    def placeholder(self, name: str, value: Tensor, leaf: Leaf | None = None, *, needs_grad: bool = False) -> fx.Node:
        return annotate(self.graph.placeholder(name), Facts(value, where=self.where, needs_grad=needs_grad, leaf=leaf))

    def call(self, target: Target, *args: Any, **kwargs: Any) -> fx.Node:
        """Append ``target(*args, **kwargs)``; node arguments may be nested in lists.

        Where the builder has a scope, an equal call that was made in it before is returned instead.
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
        flows = target is with_tangent or (
            target is not aten.detach.default
            and any(facts(s).needs_grad for s in sources)
            and (target is declare_gradient or any(isinstance(o, Tensor) and is_float(o) for o in outputs))
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
        """What ``target`` makes. Calls that look the same share it, in all graphs of one mode: nobody changes a node's
        value."""
        looks = tuple(_look(value(source)) for source in sources)
        key = (target, repr(fx.map_arg((args, kwargs), lambda _: "*")), looks)
        if key not in self.results:
            fake_args, fake_kwargs = fx.map_arg((args, kwargs), value)
            with self.mode, views_untracked():
                made = call_fake(target, fake_args, fake_kwargs, self.results)
            # fused attention also returns lengths, and None for what it did not make
            if isinstance(made, (tuple, list)):
                made = tuple(x if isinstance(x, Tensor) else None for x in made)
            self.results[key] = made
        found: Value = self.results[key]
        return found

    def getitem(self, source: fx.Node, index: int) -> fx.Node:
        known = facts(source)
        assert isinstance(known.value, tuple)
        part = known.value[index]
        name = _part_name(source, index) or (f"{self.prefix}getitem" if self.prefix else None)
        node = self.graph.create_node("call_function", operator.getitem, (source, index), name=name)
        self.made.append(node)
        grad = known.needs_grad and isinstance(part, Tensor) and is_float(part) and not is_tangent(node)
        return annotate(node, Facts(part, where=known.where, needs_grad=grad, phase=known.phase))

    def reshape(self, x: fx.Node, shape: list[int] | tuple[int, ...]) -> fx.Node:
        """``x`` in another shape; ``x`` itself where the shape is the same."""
        known = facts(x).value
        assert isinstance(known, Tensor)
        return x if tuple(known.shape) == tuple(shape) else self.call(aten.reshape.default, x, list(shape))

    def output(self, nodes: tuple[fx.Node, ...]) -> None:
        self.graph.output(nodes)
        self.graph.lint()


def _part_name(source: fx.Node, index: int) -> str | None:
    """A result of an operator of this package as its schema calls it (``group_plan_ends``). Names of torch's are long
    enough without."""
    if getattr(source.target, "namespace", None) != "quintnet":
        return None
    results = schema_or_none(source.target).returns
    return f"{source.name}_{results[index].name}" if index < len(results) and results[index].name else None


def _look(x: Tensor) -> Hashable:
    return tuple(x.shape), x.stride(), x.dtype, x.device


def _of_any_rank(x: Any) -> Any:
    """An argument in code that every rank runs, each on its own device: a device without an index."""
    return torch.device(x.type) if isinstance(x, torch.device) else x
