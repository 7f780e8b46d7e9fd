"""Record the operators that a function runs on fake tensors as a graph: no more than that, so it takes little time."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.torch import TorchDispatchMode, pytree, root_of


def record(work: Callable[[Callable[[Callable[[], Tensor]], Tensor]], Any]) -> fx.Graph:
    """Return a graph of the operators that ``work(takes)`` runs below autograd.

    It returns the tensors (or None) of the list that ``work`` returns. ``takes(make)`` returns ``make()`` as an input
    of the graph; the first call comes before any operator. ``meta["val"]`` of a node is its value.

    Raises:
        NotImplementedError: ``work`` reads a tensor that is neither an input nor a recorded result, or an element's
            value.
    """
    recorder = _Recorder()
    with recorder:
        results = work(recorder.takes)
    recorder.graph.output([recorder.node(x) if isinstance(x, Tensor) else None for x in results])
    return recorder.graph


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[Tensor] = []  # so that no other tensor gets the id of one of them
        self.inputs: list[fx.Node] = []
        self.idle = False

    def takes(self, make: Callable[[], Tensor]) -> Tensor:
        self.idle = True
        x = make()
        self.idle = False
        last = self.inputs[-1] if self.inputs else root_of(self.graph)
        with self.graph.inserting_after(last):
            self.inputs.append(self.graph.placeholder(f"x{len(self.inputs)}"))
        self._set_value(self.inputs[-1], x)
        return x

    def node(self, x: Tensor) -> fx.Node:
        node = self.nodes.get(id(x))
        if node is None:
            raise NotImplementedError(f"a tensor {tuple(x.shape)} comes from outside")
        return node

    def _set_value(self, node: fx.Node, x: Any) -> None:
        node.meta["val"] = x
        if isinstance(x, Tensor):
            self.nodes[id(x)] = node
            self.alive.append(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.idle:
            return out
        leaves = pytree.tree_leaves(out)
        if not any(isinstance(x, Tensor) for x in leaves):
            if leaves and torch.Tag.data_dependent_output in func.tags:
                raise NotImplementedError(f"{func} reads an element's value")
            return out
        node_args, node_kwargs = pytree.tree_map_only(Tensor, self.node, (args, kwargs or {}))
        node = self.graph.call_function(func, tuple(node_args), node_kwargs)
        if isinstance(out, (tuple, list)):
            node.meta["val"] = out
            for index, part in enumerate(out):
                if isinstance(part, Tensor):
                    self._set_value(self.graph.call_function(operator.getitem, (node, index)), part)
        else:
            self._set_value(node, out)
        return out
