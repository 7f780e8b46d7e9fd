"""Hot experts: those to which most rows go.

Every rank over which experts are spread has their weights, and their rows stay where they are (after FasterMoE's
shadows, He et al. 2022, https://doi.org/10.1145/3503221.3508418).
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from ...core.annotations import facts, leaf, shape, tensor_inputs
from ...core.errors import CompileError
from ...ops.catalog import op_spec


def hot_experts(graph: fx.Graph, asked: Mapping[str, Sequence[int]]) -> dict[fx.Node, tuple[int, ...]]:
    """Return the hot experts of each layer of experts that has any.

    ``asked``: names or globs of parameters of experts -> numbers of experts; later ones win. Layers whose rows
    choose by the same ids have the same hot experts.

    Raises:
        CompileError: QN203 for experts that a layer does not have, for two sets of them in one mixture, and for
            layers that multiply 8-bit numbers.
    """
    layers = _layers(graph) if asked else {}
    hot_of_mixture = _hot_of_mixtures(layers, asked)
    hot_of_layer = {node: hot_of_mixture[_ids(node)] for node in layers if _ids(node) in hot_of_mixture}
    for node, hot in hot_of_layer.items():
        _check_layer(node, hot)
    return hot_of_layer


def _hot_of_mixtures(
    layers: Mapping[fx.Node, set[str]], asked: Mapping[str, Sequence[int]]
) -> dict[fx.Node, tuple[int, ...]]:
    """Return the hot experts of mixtures that have any, by the ids with which their rows choose."""
    all_names = {name for names in layers.values() for name in names}
    hot_of_name = {name: tuple(hot) for pattern, hot in asked.items() for name in _matching(pattern, all_names)}
    mixtures: dict[fx.Node, tuple[int, ...]] = {}
    for node, names in layers.items():
        for name in names & hot_of_name.keys():
            if mixtures.setdefault(_ids(node), hot_of_name[name]) != hot_of_name[name]:
                raise _refused(node, f"the hot experts of {name} are not those of the other layers of its mixture")
    return {ids: hot for ids, hot in mixtures.items() if hot}


def _check_layer(node: fx.Node, hot: tuple[int, ...]) -> None:
    """Raise QN203 unless a layer has these experts, and multiplies numbers of at least 16 bits."""
    num_experts = shape(tensor_inputs(node)[2])[0]
    if len(set(hot)) < len(hot) or not all(0 <= expert < num_experts for expert in hot):
        raise _refused(node, f"hot experts {list(hot)} are not numbers of {num_experts} experts, each once")
    reason = op_spec(node).no_copies
    if reason:
        raise _refused(node, f"hot experts of a layer that {reason}", 'use precision="bf16"')


def check_hot_experts(graph: fx.Graph, asked: Mapping[str, Sequence[int]]) -> None:
    """Raise if a name matches no parameter of experts, or :func:`hot_experts` would.

    Raises:
        CompileError: QN203 or QN204.
    """
    names = sorted({name for layer in _layers(graph).values() for name in layer}) if asked else []
    for pattern in asked:
        if not _matching(pattern, names):
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise CompileError(
                "QN204",
                f"hot_experts: {pattern!r} matches no parameter of experts",
                fix=f"did you mean {', '.join(close)}?" if close else "the model has no expert_linear: leave them out",
            )
    hot_experts(graph, asked)


def _layers(graph: fx.Graph) -> dict[fx.Node, set[str]]:
    """Return the layers of experts, with the names of their parameters."""
    return {n: _names(n) for n in graph.nodes if n.op == "call_function" and op_spec(n).by_expert}


def _names(node: fx.Node) -> set[str]:
    """Return the names of the parameters from which the weights of a layer are computed."""
    names, todo = set[str](), list(tensor_inputs(node)[2:])
    while todo:
        source = todo.pop()
        info = leaf(source)
        if info is not None and info.kind == "parameter":
            names.add(info.name)
        todo += source.all_input_nodes
    return names


def _ids(node: fx.Node) -> fx.Node:
    """Return the ids by which the rows of a layer choose experts."""
    return tensor_inputs(node)[1]


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]


def _refused(node: fx.Node, reason: str, fix: str = "give all layers of a mixture the same numbers") -> CompileError:
    return CompileError("QN203", reason, where=facts(node).where, fix=fix)
