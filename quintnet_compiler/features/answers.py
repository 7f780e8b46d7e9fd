"""Answers of all features together to layers above them."""

from __future__ import annotations

from functools import reduce
from itertools import combinations

from ..core.errors import CompileError
from ..ir.plan import Plan
from ..ir.plans.feature_fields import check_feature_fields
from ..ir.plans.host_state import HostState
from ..ir.program import Program
from ..strategies.expert_copies import ExpertCopies
from . import FEATURES
from .feature import MemorySaver


def host_state(plan: Plan) -> HostState:
    """Return what a plan has on hosts."""
    return reduce(HostState.__or__, [feature.host_state(plan) for feature in FEATURES], HostState())


def is_allowed(plan: Plan) -> bool:
    """Return whether features allow what a plan sets; a planner decides the rest."""
    try:
        check_feature_fields(plan, searched=True)
    except CompileError:
        return False
    return True


def check_names(program: Program, plan: Plan) -> None:
    """Check that a program has what features' fields of a plan name.

    Raises:
        CompileError: QN203 or QN204.
    """
    for feature in FEATURES:
        feature.check_names(program, plan)


def parameter_patterns(plan: Plan) -> tuple[str, ...]:
    """Return names and globs of parameters in features' fields of a plan."""
    return tuple(pattern for feature in FEATURES for pattern in feature.parameter_patterns(plan))


def expert_copies(plan: Plan) -> ExpertCopies | None:
    """Return the experts of which every rank has a copy; None if there are none."""
    return next((copies for feature in FEATURES if (copies := feature.expert_copies(plan)) is not None), None)


def completed(plan: Plan) -> Plan:
    """Return the plan that a planner found, without what has no use in it."""
    return reduce(lambda done, feature: feature.completed(done), FEATURES, plan)


def memory_savers() -> tuple[MemorySaver, ...]:
    """Return what saves memory, in the order in which it is tried."""
    return tuple(saver for feature in FEATURES for saver in feature.memory_savers)


def savers_together() -> tuple[MemorySaver, ...]:
    """Return the first saver of each feature together with each of a later feature."""
    savers = [feature.memory_savers for feature in FEATURES if feature.memory_savers]
    return tuple(first[0] & other for first, others in combinations(savers, 2) for other in others)
