"""The record of all that this feature gives to the compiler."""

from __future__ import annotations

from ...ops.extensions import RankMethod
from ...ops.rules.notation import Rule
from ..feature import Feature
from . import methods, rules
from .ops import paged_attention
from .rank_methods import attend_to_pages

TEXT_GENERATION = Feature(
    "text_generation",
    rules=(Rule(paged_attention, rules.paged_attention, work="attention"),),
    operators={paged_attention: (RankMethod(attend_to_pages),)},
    methods={"generate": methods.generate, "generation": methods.generation},
)
