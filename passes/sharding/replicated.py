"""Report operators that a layout does not split, and values that travel between data ranks.

These are products and attention that every rank of an axis computes, with the reason.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from torch import fx

from ...compat.torch import schema
from ...core.annotations import facts, is_getitem, origin, shape, tensor_inputs
from ...ir.program import Axis, ShardedProgram
from ...ops.collectives import COMMUNICATION, lower_conversion
from ...ops.rules.notation import Factors
from ...ops.rules.work import work_of
from ...strategies.rule_book import RuleBook, refine
from .batch_factors import batch_dependent

_HEAVY_WORK = frozenset({"matmul", "attention"})


def unsplit(sharded: ShardedProgram, rules: RuleBook) -> tuple[str, ...]:
    """Return a line for each kind of heavy operator that runs whole on every rank, and for each exchange of rows.

    A heavy operator that a model or context axis does not split is exact, and costs as much as on one rank. Its line
    names the sizes that do not divide. Values that travel between data ranks are exact too, and cost more than the sum
    of gradients for which such an axis exists.
    """
    modules_of_lines: dict[str, list[str]] = defaultdict(list)
    factors = rules.factors(sharded.program.graph)
    for node in sharded.program.graph.nodes:
        if node.op != "call_function" or is_getitem(node) or work_of(node.target) not in _HEAVY_WORK:
            continue
        if not facts(node).needs_grad:
            continue  # constants may be computed anywhere
        local_factors = factors[node]
        for axis, strategy in zip(sharded.axes, sharded.strategies[node], strict=True):
            if axis.role in ("model", "context") and not strategy.splits:
                modules_of_lines[_line(node, axis, local_factors)].append(facts(node).where.module)
            local_factors = refine(local_factors, strategy, axis.size)
    for node, axis, line in _exchanged(sharded):
        modules_of_lines[f"{axis.name}={axis.size}: {line}"].append(facts(node).where.module)
    return tuple(line.format(places=_places(modules)) for line, modules in modules_of_lines.items())


def _exchanged(sharded: ShardedProgram) -> Iterator[tuple[fx.Node, Axis, str]]:
    """Yield operators that read other data ranks' rows, with the axis and a line.

    Scalars, such as the loss, and rows that travel to experts are left out.
    """
    dependent = batch_dependent(sharded.program.graph)
    for node in sharded.program.graph.nodes:
        if node.op != "call_function" or is_getitem(node) or node not in dependent:
            continue
        for position, operand in enumerate(tensor_inputs(node)):
            source, index = origin(operand)
            if source not in dependent or shape(operand) == ():
                continue
            types = zip(sharded.axes, sharded.produced(source, index), sharded.wanted(node, position), strict=True)
            for axis, produced, wanted in types:
                op, _ = lower_conversion(produced, wanted)
                if axis.role == "data" and op in COMMUNICATION:
                    name, user = str(schema(op).name).partition("::")[2], str(node.target).split(".")[1]
                    line = f"{user} in {{places}} reads other ranks' rows: {name} of {list(shape(operand))}"
                    yield node, axis, line


def _line(node: fx.Node, axis: Axis, factors: Factors) -> str:
    sizes = sorted({size for name, size in factors.sizes.items() if name not in factors.whole and size > 1})
    if axis.role == "context":
        reason = "no dim of a sequence divides"
    elif any(size % axis.size == 0 for size in sizes):
        reason = "by choice"
    else:
        reason = f"none of {sizes} divides"
    shapes = " x ".join(str(list(shape(n))) for n in tensor_inputs(node)[:2])
    name = str(node.target).split(".")[1]
    return f"{axis.name}={axis.size}: {name} of {shapes} in {{places}} runs whole on every rank: {reason}"


def _places(modules: list[str]) -> str:
    """Return the modules' names, with ``layers.*.attn`` for ``layers.0.attn``, ``layers.1.attn``, ..."""
    return ", ".join(dict.fromkeys(re.sub(r"\b\d+\b", "*", module) or "the model" for module in modules))
