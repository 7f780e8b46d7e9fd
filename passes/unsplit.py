"""What a layout leaves whole: products and attention that every rank of an axis computes, and why."""

from __future__ import annotations

import re
from collections import defaultdict

from torch import fx

from ..annotations import facts, is_getitem, shape, tensor_inputs
from ..attention_ops import attention
from ..program import Axis, ShardedProgram
from .candidates import CONTRACTIONS, aten
from .rule_notation import Factors
from .strategies import RuleBook, refine

_HEAVY = frozenset({*CONTRACTIONS, aten.scaled_dot_product_attention.default, attention})


def unsplit(sharded: ShardedProgram, rules: RuleBook) -> tuple[str, ...]:
    """A line for each kind of heavy operator that runs whole on every rank of a model or context axis, with the sizes
    that do not divide. It is exact, and costs what one rank alone would take."""
    found: dict[str, list[str]] = defaultdict(list)
    factors = rules.factors(sharded.program.graph)
    for node in sharded.program.graph.nodes:
        if node.op != "call_function" or is_getitem(node) or node.target not in _HEAVY or not _trained(node):
            continue
        left = factors[node]
        for axis, strategy in zip(sharded.axes, sharded.strategies[node], strict=True):
            if axis.role in ("model", "context") and not strategy.splits:
                found[_line(node, axis, left)].append(facts(node).where.module)
            left = refine(left, strategy, axis.size)
    return tuple(line.format(places=_places(modules)) for line, modules in found.items())


def _trained(node: fx.Node) -> bool:
    """Whether gradients flow here: constants may be computed anywhere."""
    return facts(node).needs_grad


def _line(node: fx.Node, axis: Axis, factors: Factors) -> str:
    sizes = sorted({size for name, size in factors.sizes.items() if name not in factors.whole and size > 1})
    why = "by choice" if any(size % axis.size == 0 for size in sizes) else f"none of {sizes} divides"
    why = "no dim of a sequence divides" if axis.role == "context" else why
    shapes = " x ".join(str(list(shape(n))) for n in tensor_inputs(node)[:2])
    name = str(node.target).split(".")[1]
    return f"{axis.name}={axis.size}: {name} of {shapes} in {{places}} runs whole on every rank: {why}"


def _places(modules: list[str]) -> str:
    """``layers.*.attn`` for ``layers.0.attn``, ``layers.1.attn``, ..."""
    return ", ".join(dict.fromkeys(re.sub(r"\b\d+\b", "*", module) or "the model" for module in modules))
