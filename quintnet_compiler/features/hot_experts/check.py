"""Checks of the copies of hot experts: what a rank contributes to them, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ...checks.derivatives.calls import Pattern
from ...core.annotations import shape
from ...ir.program import Axis
from .ops import pick_experts, place_experts


def is_part_of_copies(node: fx.Node, stored: fx.Node, experts: Sequence[int], split: Sequence[Axis]) -> bool:
    """Return whether ``node`` has ``experts`` of those that the rank stores, and zeros for the others."""
    names, sizes = [axis.name for axis in split], [axis.size for axis in split]
    return node.target is pick_experts and node.args == (stored, list(experts), shape(stored)[0], names, sizes)


def gradient_of_part(args: Sequence[Any], pattern: Pattern) -> dict[int, tuple[Any, Any]]:
    """Return the call that must stand for the gradient of ``pick_experts``."""
    return {0: (place_experts, (pattern.tangents[0], *args[1:]))}
