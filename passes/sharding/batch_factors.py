"""Which factors of which operators are the batch: a context axis splits the others."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ...core.annotations import is_getitem, leaf, origin, tensor_inputs
from ...ops.derivatives.user_derivatives import arrives
from ...ops.rules.notation import Dims, Factors
from ...ops.scaled_products import block_max

Value = tuple[fx.Node, int]


def batch_factors(graph: fx.Graph, factors: Mapping[fx.Node, Factors]) -> dict[fx.Node, frozenset[str]]:
    """The factors that run over samples. The batch is the outermost part of a dim: [B, S] may become [B * S]."""
    dims: dict[Value, frozenset[int]] = {}
    found: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        if node.op == "output" or is_getitem(node):
            continue
        spec, marked = factors[node], set[str]()
        known = leaf(node)
        if known is not None:
            marked |= _outermost(spec.outputs[0], {0} if known.batched else set())
        for given, place in zip(tensor_inputs(node), spec.inputs, strict=True):
            marked |= _outermost(place, dims.get(origin(given), frozenset()))
        found[node] = frozenset(marked)
        for index, place in enumerate(spec.outputs):
            dims[node, index] = frozenset(d for d, names in enumerate(place) if names and names[0] in marked)
    return found


def _outermost(dims: Dims, chosen: frozenset[int] | set[int]) -> set[str]:
    return {names[0] for d, names in enumerate(dims) if d in chosen and names}


def made_of_the_batch(graph: fx.Graph) -> frozenset[fx.Node]:
    """Operators that depend on the batch and on a parameter, and those that scale 8-bit numbers by what the batch has.
    A scale is no more than a number: a microbatch takes its own, so what reads only scales may be anything."""
    batched: set[fx.Node] = set()
    trained: set[fx.Node] = set()
    for node in graph.nodes:
        found = leaf(node) if node.op == "placeholder" else None
        if found is not None:
            if found.batched:
                batched.add(node)
            elif found.kind == "parameter":
                trained.add(node)
        elif node.op == "call_function":
            for kind in (batched, trained):
                if any(source in kind for source in arrives(node) if source.target is not block_max):
                    kind.add(node)
    made = {node for node in batched if node in trained or node.target is block_max}
    return frozenset(node for node in made if node.op == "call_function")
