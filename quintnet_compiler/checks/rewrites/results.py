"""What a rewrite of a differentiated program must leave as it is: its leaves, and the values that it hands on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ...ir.program import DifferentiatedProgram

Numbers = Mapping[fx.Node, int]
Fail = Callable[[str, fx.Node | None], Exception]


def check_results(
    before: DifferentiatedProgram, after: DifferentiatedProgram, old: Numbers, new: Numbers, fail: Fail
) -> None:
    """Outputs, gradients, and the values and gradients of the local program's operators are numbered alike in both.

    Raises:
        Exception: what ``fail`` makes of the first that is another one, and its node.
    """
    pairs: list[tuple[str, dict[Any, fx.Node], dict[Any, fx.Node]]] = [
        ("output", dict(enumerate(before.outputs)), dict(enumerate(after.outputs))),
        ("gradient", dict(before.gradients), dict(after.gradients)),
        ("gradient of a value", dict(before.cotangents), dict(after.cotangents)),
        ("value", dict(before.values), dict(after.values)),
    ]
    for what, left, right in pairs:
        if left.keys() != right.keys():
            raise fail(f"there is another {what} than before", None)
        for key, node in left.items():
            if old[node] != new[right[key]]:
                raise fail(f"{right[key].name} is not the {what} that {node.name} is", right[key])
    leaves = [[n.name for n in program.graph.nodes if n.op == "placeholder"] for program in (before, after)]
    if leaves[0] != leaves[1]:
        raise fail("the graph has other leaves", None)
