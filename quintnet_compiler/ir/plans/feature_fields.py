"""Fields of plans that features read: what they may be where a feature is not installed, or does not allow them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel

from ...core.errors import CompileError


class OfFeature:
    """Marks a field of plans that a feature reads: without that feature it can only have its default."""


PlanCheck = Callable[[Any, bool], None]  # takes a plan, and whether a planner completes it
_CHECKS: dict[str, PlanCheck] = {}  # of fields of installed features, filled as these are added


def add_plan_fields(names: Iterable[str], check: PlanCheck) -> None:
    """Add fields of plans that an installed feature reads; ``check`` raises where their values do not fit a plan."""
    _CHECKS.update(dict.fromkeys(names, check))


def check_feature_fields(plan: BaseModel, *, searched: bool = False) -> None:
    """Check the fields that features read.

    Args:
        plan: the plan.
        searched: whether a planner completes it, and leaves out what has no use.

    Raises:
        CompileError: QN207 for a field of a feature that is not installed, or for what a feature does not allow.
    """
    fields = type(plan).model_fields
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        if OfFeature in field.metadata and name not in _CHECKS and getattr(plan, name) != default:
            raise CompileError(
                "QN207",
                f"{name}={getattr(plan, name)!r} belongs to a feature that is not installed",
                fix=f"leave {name} out",
            )
    for check in dict.fromkeys(_CHECKS.values()):
        check(plan, searched)
