"""Factors of operators that run over the samples of a batch: a context axis splits the others."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ...core.annotations import is_getitem, leaf, origin, tensor_inputs
from ...ops.catalog import op_spec
from ...ops.derivatives.user_derivatives import arrives
from ...ops.rules.notation import Dims, Factors

Value = tuple[fx.Node, int]


def batch_factors(graph: fx.Graph, factors: Mapping[fx.Node, Factors]) -> dict[fx.Node, frozenset[str]]:
    """Return the factors of each operator that run over samples.

    The batch is the outermost part of a dim: [B, S] may become [B * S].
    """
    dims: dict[Value, frozenset[int]] = {}
    sample_factors: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        if node.op == "output" or is_getitem(node):
            continue
        rule_factors, marked = factors[node], set[str]()
        info = leaf(node)
        if info is not None:
            marked |= _outermost(rule_factors.outputs[0], {0} if info.batched else set())
        for operand, operand_dims in zip(tensor_inputs(node), rule_factors.inputs, strict=True):
            marked |= _outermost(operand_dims, dims.get(origin(operand), frozenset()))
        sample_factors[node] = frozenset(marked)
        for index, result_dims in enumerate(rule_factors.outputs):
            dims[node, index] = frozenset(d for d, names in enumerate(result_dims) if names and names[0] in marked)
    return sample_factors


def _outermost(dims: Dims, chosen: frozenset[int] | set[int]) -> set[str]:
    return {names[0] for d, names in enumerate(dims) if d in chosen and names}


def batch_dependent(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return operators that depend on the batch and on a parameter, and those that find scales of the batch.

    A scale is only a number, and each microbatch takes its own, so operators that read only scales do not count.
    """
    batched: set[fx.Node] = set()
    trained: set[fx.Node] = set()
    for node in graph.nodes:
        info = leaf(node) if node.op == "placeholder" else None
        if info is not None:
            if info.batched:
                batched.add(node)
            elif info.kind == "parameter":
                trained.add(node)
        elif node.op == "call_function":
            for dependents in (batched, trained):
                if any(source in dependents for source in arrives(node) if op_spec(source).cast_step != "largest"):
                    dependents.add(node)
    dependent = {node for node in batched if node in trained or op_spec(node).cast_step == "largest"}
    return frozenset(node for node in dependent if node.op == "call_function")
