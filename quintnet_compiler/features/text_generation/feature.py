"""The record of all that this feature gives to the compiler."""

from __future__ import annotations

from typing import Any

from ...ops.rules.notation import Rule
from ...runtime.execute.extensions import RankMethod
from ..feature import Feature
from . import rules
from .ops import paged_attention
from .rank_methods import attend_to_pages


def _generate(*args: Any) -> Any:
    from .methods import generate  # what decodes is imported by programs that write texts

    return generate(*args)


def _generation(*args: Any) -> Any:
    from .methods import generation

    return generation(*args)


TEXT_GENERATION = Feature(
    "text_generation",
    rules=(Rule(paged_attention, rules.paged_attention, work="attention"),),
    operators={paged_attention: (RankMethod(attend_to_pages),)},
    methods={"generate": _generate, "generation": _generation},
)
