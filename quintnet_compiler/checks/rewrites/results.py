"""What a rewrite of a differentiated program must leave as it is: its leaves, and the values that it hands on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ...ir.program import DifferentiatedProgram

Numbers = Mapping[fx.Node, int]
Fail = Callable[[str, fx.Node | None], Exception]


def check_results(
    original: DifferentiatedProgram, rewritten: DifferentiatedProgram, old: Numbers, new: Numbers, fail: Fail
) -> None:
    """Check that outputs, gradients, and the local program's values and their gradients have equal numbers in both.

    Raises:
        Exception: what ``fail`` makes of the first that is another one, and its node.
    """
    pairs: list[tuple[str, dict[Any, fx.Node], dict[Any, fx.Node]]] = [
        ("output", dict(enumerate(original.outputs)), dict(enumerate(rewritten.outputs))),
        ("gradient", dict(original.gradients), dict(rewritten.gradients)),
        ("gradient of a value", dict(original.cotangents), dict(rewritten.cotangents)),
        ("value", dict(original.values), dict(rewritten.values)),
    ]
    for what, left, right in pairs:
        if left.keys() != right.keys():
            raise fail(f"there is another {what} than before", None)
        for key, node in left.items():
            if old[node] != new[right[key]]:
                raise fail(f"{right[key].name} is not the {what} that {node.name} is", right[key])
    leaves = [[n.name for n in program.graph.nodes if n.op == "placeholder"] for program in (original, rewritten)]
    if leaves[0] != leaves[1]:
        raise fail("the graph has other leaves", None)
