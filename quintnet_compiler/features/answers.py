"""Answers of all features together to layers above them."""

from __future__ import annotations

from functools import reduce
from itertools import combinations

from ..core.errors import CompileError
from ..ir.plan import Plan
from ..ir.plans.feature_fields import check_feature_fields
from ..ir.plans.host_state import HostState
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
