"""A derivative that a model's author wrote, as operators of the same graph.

``y = f(x)`` with the user's backward ``b`` is

    y0 = f(detach(x))
    y1, t = with_tangent(y0, True)       # t stands for the gradient that will arrive at y1
    done = declare_gradient(x, b(t))     # the gradient of x is b(t)
    y = after_gradients(y1, done)

All of it are ordinary nodes with ordinary sharding rules. Where ``y1`` has a type, ``t`` has that of its gradient, and
``b(t)`` that of the gradient of ``x``; so what a backward does to a partial sum is linear, or its terms are added up
before. :class:`...passes.autodiff.differentiate.Differentiate` moves what depends on ``t`` to the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, fx

from ...compat.torch import OpOverload
from ...compat.torch_codegen import SHIPPED
from ...core.annotations import is_getitem, origin, tensor_inputs
from ..define import define_operator


def _as_made(x: Tensor, *_: object) -> Tensor:
    return SHIPPED.empty_like(x, memory_format=torch.contiguous_format)


# ``zeros``: the gradient is zero where none arrives; if not, nobody may read it then
with_tangent = define_operator(
    "with_tangent(Tensor x, bool zeros) -> Tensor[]", lambda x, zeros: [_as_made(x), _as_made(x)]
)
# what it returns has no bits that matter, and no gradient: it says that after_gradients comes later
declare_gradient = define_operator(
    "declare_gradient(Tensor x, Tensor gradient) -> Tensor[]",
    lambda x, gradient: [x.new_empty((), dtype=torch.int64)],
)
after_gradients = define_operator("after_gradients(Tensor x, Tensor[] done) -> Tensor", _as_made)
# as after_gradients, for ``x`` that has been used already: capture puts it between ``x`` and all its users
hooked = define_operator("hooked(Tensor x, Tensor[] done, int number) -> Tensor", _as_made)
torch.fx.node.has_side_effect(hooked)  # nobody reads it until then


End = Literal["tangent", "declaration", "end"]
ENDS: Mapping[OpOverload, End] = MappingProxyType(
    {with_tangent: "tangent", declare_gradient: "declaration", after_gradients: "end"}
)


def _end(node: fx.Node) -> End | None:
    """Return which end of a derivative a node is; None if it is none."""
    return ENDS.get(node.target)  # type: ignore[call-overload,no-any-return]


def is_tangent(node: fx.Node) -> bool:
    """Return whether a node is the gradient that will arrive at a result."""
    return is_getitem(node) and _end(origin(node)[0]) == "tangent" and origin(node)[1] == 1


def of_tangents(nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Return those of ``nodes`` (in order) that the backward computes: all that depends on a tangent."""
    dependents: set[fx.Node] = set()
    for node in nodes:
        if _end(node) == "declaration" or node.op != "call_function":
            continue
        if is_tangent(node) or any(source in dependents for source in node.all_input_nodes):
            dependents.add(node)
    return frozenset(dependents)


def derivatives(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map each node of a derivative that a user wrote to the node that stands for that derivative (union-find)."""
    backward = of_tangents(graph.nodes)
    parent: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            parent[node] = node = parent[parent[node]]
        return node

    for node in graph.nodes:
        mine: list[fx.Node] = []
        if node in backward:
            mine = [n for n in node.all_input_nodes if n in parent]
        elif _end(node) == "declaration":
            mine = [n for n in tensor_inputs(node)[1:] if n in backward]
        elif _end(node) == "end":
            mine = [n for n in tensor_inputs(node) if n in parent]
        elif is_getitem(node) and _end(origin(node)[0]) in ("tangent", "declaration"):
            mine = [origin(node)[0]]
        elif _end(node) != "tangent":
            continue
        parent[node] = node
        for other in mine:
            parent[find(other)] = find(node)
    return {node: find(node) for node in parent}


def arrives(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node that have values: the ends of a derivative have none."""
    inputs = tensor_inputs(node)
    return inputs[:1] if _end(node) == "end" else inputs
