"""What a layout does not split: products and attention that every rank of an axis computes, and why; and what ranks
that share nothing but a model's parameters exchange of their batches."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from torch import fx

from ...compat.torch import schema
from ...core.annotations import facts, is_getitem, origin, shape, tensor_inputs
from ...ir.program import Axis, ShardedProgram
from ...ops.catalog import work_of
from ...ops.collectives import COMMUNICATION, lower_conversion
from ...ops.rules.notation import Factors
from ..strategies.rule_book import RuleBook, refine
from .batch_factors import made_of_the_batch

_HEAVY = frozenset({"matmul", "attention"})


def unsplit(sharded: ShardedProgram, rules: RuleBook) -> tuple[str, ...]:
    """A line for each kind of heavy operator that runs whole on every rank of a model or context axis, with the sizes
    that do not divide. It is exact, and costs what one rank alone would take. And a line for each value that travels
    between data ranks: exact too, and more than the sum of gradients that such an axis is there for."""
    found: dict[str, list[str]] = defaultdict(list)
    factors = rules.factors(sharded.program.graph)
    for node in sharded.program.graph.nodes:
        if node.op != "call_function" or is_getitem(node) or work_of(node.target) not in _HEAVY or not _trained(node):
            continue
        left = factors[node]
        for axis, strategy in zip(sharded.axes, sharded.strategies[node], strict=True):
            if axis.role in ("model", "context") and not strategy.splits:
                found[_line(node, axis, left)].append(facts(node).where.module)
            left = refine(left, strategy, axis.size)
    for node, axis, line in _exchanged(sharded):
        found[f"{axis.name}={axis.size}: {line}"].append(facts(node).where.module)
    return tuple(line.format(places=_places(modules)) for line, modules in found.items())


def _exchanged(sharded: ShardedProgram) -> Iterator[tuple[fx.Node, Axis, str]]:
    """Operators that read from other data ranks' rows. A scalar, the loss, is no news; experts are spread to travel."""
    made = made_of_the_batch(sharded.program.graph)
    for node in sharded.program.graph.nodes:
        if node.op != "call_function" or is_getitem(node) or node not in made:
            continue
        for position, given in enumerate(tensor_inputs(node)):
            source, index = origin(given)
            kinds = zip(sharded.axes, sharded.produced(source, index), sharded.wanted(node, position), strict=True)
            for axis, before, after in kinds:
                op, _ = lower_conversion(before, after)
                if axis.role == "data" and source in made and shape(given) != () and op in COMMUNICATION:
                    name, user = str(schema(op).name).partition("::")[2], str(node.target).split(".")[1]
                    yield node, axis, f"{user} in {{places}} reads other ranks' rows: {name} of {list(shape(given))}"


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
