"""The record of all that this feature gives to the compiler."""

from __future__ import annotations

from ...checks.extensions import ExpectedGradients, ExpertCopiesCheck
from ...ir.plan import Plan
from ...ir.program import Program
from ...runtime.execute.extensions import RankMethod
from ..feature import Feature
from . import rank_methods
from .check import gradient_of_part, is_part_of_copies
from .copies import HotExpertCopies
from .layers import check_hot_experts
from .ops import pick_experts, place_experts


def _check_names(program: Program, plan: Plan) -> None:
    check_hot_experts(program.graph, plan.hot_experts)


def _copies(plan: Plan) -> HotExpertCopies | None:
    return HotExpertCopies(plan.hot_experts) if plan.hot_experts else None


HOT_EXPERTS = Feature(
    "hot_experts",
    operators={
        pick_experts: (
            RankMethod(rank_methods.pick_experts),
            ExpertCopiesCheck(is_part_of_copies),
            ExpectedGradients(gradient_of_part),
        ),
        place_experts: (RankMethod(rank_methods.place_experts),),
    },
    plan_fields=("hot_experts",),
    check_names=_check_names,
    parameter_patterns=lambda plan: tuple(plan.hot_experts),
    expert_copies=_copies,
)
