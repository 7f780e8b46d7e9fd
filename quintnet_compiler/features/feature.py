"""The record of all that a feature gives to the compiler, and the function that adds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from ..core.precision import add_precisions
from ..ir.plan import Plan, add_plan_fields
from ..ir.program import Program
from ..ops.extensions import extend
from ..ops.rules.notation import Rule
from ..ops.rules.table import add_rules
from ..schedules.schedule import Schedule


class RewriteSetting(Protocol):
    """What a rewrite may depend on but the program.

    Attributes:
        plan: the plan.
        node_seconds: the time of a node of a rank's graph.
        training: whether there is a backward.
        stage_schedule: the order of stages and microbatches on each rank; there is none before stages are cut.
    """

    @property
    def plan(self) -> Plan: ...
    @property
    def node_seconds(self) -> Callable[[fx.Node], float]: ...
    @property
    def training(self) -> bool: ...
    @property
    def stage_schedule(self) -> Schedule: ...


@dataclass(frozen=True)
class Rewrite:
    """A pass of a feature, which returns a program of the type that it takes.

    Attributes:
        kind: the class of the pass.
        decides: what it decides, in a line.
        follows: the class of the pass behind which it runs; rewrites behind the same pass keep their order.
        make: the pass for a setting and a program; None if there is no use for it.
        check: proves a rewrite from the programs before and after. Raises CompileError.
        notes: what a plan leaves as it is, and why, in lines, from the program that is sharded.
    """

    kind: type
    decides: str
    follows: type
    make: Callable[[RewriteSetting, Any], Callable[[Any], Any] | None]
    check: Callable[[Any, Any], None]
    notes: Callable[[Program, Plan], tuple[str, ...]] = lambda program, plan: ()

    def checks(self, old: Any, new: Any) -> list[tuple[Callable[..., None], tuple[Any, Any]]]:
        """Return the check of a rewrite with its arguments; none where nothing changed."""
        return [(self.check, (old, new))] if new is not old else []


@dataclass(frozen=True)
class Feature:
    """Everything that the compiler knows of a feature.

    Attributes:
        name: that of its folder.
        rules: how its operators may be sharded.
        operators: by operator, what passes and checks ask of it (:mod:`..ops.extensions`), beside the facts that stand
            where it is defined.
        rewrites: its passes.
        precisions: values of a plan's ``precision``, with the dtype of what is not the feature's.
        plan_fields: the fields of plans that it alone reads; in :class:`.Plan` they are marked.
        check_plan: checks them. Raises CompileError QN207.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    operators: Mapping[Any, tuple[object, ...]] = field(default_factory=dict)
    rewrites: tuple[Rewrite, ...] = ()
    precisions: Mapping[str, torch.dtype] = field(default_factory=dict)
    plan_fields: tuple[str, ...] = ()
    check_plan: Callable[[Plan], None] = lambda plan: None


def add_feature(feature: Feature) -> Feature:
    """Tell the layers below what a feature says of its operators, and return it.

    Raises:
        ValueError: if something is said twice.
    """
    add_rules(feature.rules)
    add_precisions(feature.precisions)
    add_plan_fields(feature.plan_fields, feature.check_plan)
    for operator, extensions in feature.operators.items():
        extend(operator, *extensions)
    return feature
