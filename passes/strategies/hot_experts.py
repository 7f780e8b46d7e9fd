"""Hot experts: those that most rows go to. Every rank over which experts are spread has their weights, and their rows
stay where they are (after FasterMoE's shadows, He et al. 2022, https://doi.org/10.1145/3503221.3508418)."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from ...core.annotations import facts, leaf, shape, tensor_inputs
from ...core.errors import CompileError
from ...ir.expert_load import ExpertLoad
from ...ops.experts.expert_linear import expert_linear
from ...ops.experts.scaled_groups import EXPERT_LAYERS


def hot_experts(graph: fx.Graph, asked: Mapping[str, Sequence[int]]) -> dict[fx.Node, tuple[int, ...]]:
    """Of each layer of experts, the hot ones. ``asked``: names or globs of parameters of experts -> numbers of experts;
    later ones win. Layers whose rows choose by the same ids have the same hot experts.

    Raises:
        CompileError: QN203 for experts that a layer does not have, for two sets of them in one mixture, and for layers
            that multiply 8-bit numbers.
    """
    layers = _layers(graph) if asked else {}
    known = {name for names in layers.values() for name in names}
    of = {name: tuple(numbers) for pattern, numbers in asked.items() for name in _matching(pattern, known)}
    mixtures: dict[fx.Node, tuple[int, ...]] = {}
    for node, names in layers.items():
        for name in names & of.keys():
            if mixtures.setdefault(tensor_inputs(node)[1], of[name]) != of[name]:
                raise _refused(node, f"the hot experts of {name} are not those of the other layers of its mixture")
    found = {node: hot for node in layers if (hot := mixtures.get(tensor_inputs(node)[1]))}
    for node, hot in found.items():
        experts = shape(tensor_inputs(node)[2])[0]
        if len(set(hot)) < len(hot) or not all(0 <= one < experts for one in hot):
            raise _refused(node, f"hot experts {list(hot)} are not numbers of {experts} experts, each once")
        if node.target is not expert_linear:
            raise _refused(node, "hot experts of a layer that multiplies 8-bit numbers", 'use precision="bf16"')
    return found


def expert_loads(
    graph: fx.Graph, asked: Mapping[str, Sequence[int]], hot_rows: float | None, imbalance: float
) -> dict[fx.Node, ExpertLoad]:
    """Of each layer of experts whose ranks are not expected to get, and to send, equally many rows."""
    hot, found = hot_experts(graph, asked), dict[fx.Node, ExpertLoad]()
    for node in graph.nodes:
        if node.op == "call_function" and node.target in EXPERT_LAYERS:
            experts = shape(tensor_inputs(node)[2])[0]
            found[node] = ExpertLoad.of(imbalance, hot_rows, len(hot.get(node, ())), experts)
    return {node: load for node, load in found.items() if load != ExpertLoad()}


def check_hot_experts(graph: fx.Graph, asked: Mapping[str, Sequence[int]]) -> None:
    """Raises: CompileError QN204 for a name that no parameter of experts has, and as :func:`hot_experts` does."""
    known = sorted({name for names in _layers(graph).values() for name in names}) if asked else []
    for pattern in asked:
        if not _matching(pattern, known):
            close = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or known[:3]
            raise CompileError(
                "QN204",
                f"hot_experts: {pattern!r} matches no parameter of experts",
                fix=f"did you mean {', '.join(close)}?" if close else "the model has no expert_linear: leave them out",
            )
    hot_experts(graph, asked)


def _layers(graph: fx.Graph) -> dict[fx.Node, set[str]]:
    """The layers of experts, with the names of their parameters."""
    return {n: _names(n) for n in graph.nodes if n.op == "call_function" and n.target in EXPERT_LAYERS}


def _names(node: fx.Node) -> set[str]:
    """The parameters that the weights of a layer are made of."""
    found, todo = set[str](), list(tensor_inputs(node)[2:])
    while todo:
        here = todo.pop()
        known = leaf(here)
        if known is not None and known.kind == "parameter":
            found.add(known.name)
        todo += here.all_input_nodes
    return found


def _matching(pattern: str, known: Iterable[str]) -> list[str]:
    return [name for name in known if name == pattern or fnmatch.fnmatchcase(name, pattern)]


def _refused(node: fx.Node, what: str, fix: str = "give all layers of a mixture the same numbers") -> CompileError:
    return CompileError("QN203", what, where=facts(node).where, fix=fix)
