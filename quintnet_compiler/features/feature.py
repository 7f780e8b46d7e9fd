"""The record of all that a feature gives to the compiler, and the function that adds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..core.precision import add_precisions
from ..ir.plan import Plan
from ..ir.plans.feature_fields import add_plan_fields
from ..ir.plans.host_state import HostState
from ..ir.program import DifferentiatedProgram, Program
from ..ops.extensions import extend
from ..ops.rules.notation import Rule
from ..ops.rules.table import add_rules
from ..passes.autodiff.recompute_budget import Leaves
from ..runtime.execute.engines import EngineKind, add_engines
from ..schedules.schedule import Schedule
from ..strategies.expert_copies import ExpertCopies


@dataclass(frozen=True)
class RewriteSetting:
    """Everything that a rewrite may depend on but the program.

    Attributes:
        plan: the plan.
        node_seconds: the time of a node of a rank's graph.
        training: whether there is a backward.
        schedule: the order of stages and microbatches on each rank; None before stages are cut.
    """

    plan: Plan
    node_seconds: Callable[[fx.Node], float]
    training: bool
    schedule: Schedule | None

    @property
    def stage_schedule(self) -> Schedule:
        """Return the schedule, which passes behind the cut of stages need."""
        if self.schedule is None:
            raise AssertionError("passes behind the cut of stages need a schedule")
        return self.schedule


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
        leaving: which saved values the pass takes off their device, from a program before recomputing; None if none.
        planned: whether a planner runs it to price a plan. Otherwise prices need no graph, but the plan's state.
    """

    kind: type
    decides: str
    follows: type
    make: Callable[[RewriteSetting, Any], Callable[[Any], Any] | None]
    check: Callable[[Any, Any], None]
    notes: Callable[[Program, Plan], tuple[str, ...]] = lambda program, plan: ()
    leaving: Callable[[RewriteSetting, DifferentiatedProgram], Leaves | None] = lambda setting, program: None
    planned: bool = True

    def checks(self, old: Any, new: Any) -> list[tuple[Callable[..., None], tuple[Any, Any]]]:
        """Return the check of a rewrite with its arguments; none where nothing changed."""
        return [(self.check, (old, new))] if new is not old else []


@dataclass(frozen=True)
class MemorySaver:
    """Decisions of a plan with which a step takes less memory of devices.

    Attributes:
        text: what they do, for people.
        decisions: fields of a plan.
        in_functions: whether they save nothing where generated functions are the same with and without them.
    """

    text: str
    decisions: Mapping[str, Any]
    in_functions: bool = False

    def __and__(self, other: MemorySaver) -> MemorySaver:
        """Return the decisions of both."""
        return MemorySaver(f"{self.text}, and {other.text}", {**self.decisions, **other.decisions})


@dataclass(frozen=True)
class Feature:
    """Everything that the compiler knows of a feature.

    Attributes:
        name: that of its folder.
        rules: how its operators may be sharded.
        operators: by operator, its own or another, what passes, checks and ranks ask of it (:mod:`..ops.extensions`),
            beside the facts that stand where it is defined.
        rewrites: its passes.
        precisions: values of a plan's ``precision``, with the dtype of what is not the feature's.
        plan_fields: the fields of plans that it alone reads; in :class:`.Plan` they are marked.
        check_plan: checks them, of a plan that a planner completes (True) or of a complete one. Raises CompileError.
        check_names: checks what its fields name, in a program whose precision is decided. Raises CompileError.
        parameter_patterns: names or globs of parameters in its fields: blocks in which others match are not alike.
        expert_copies: the experts of which every rank has a copy; None if there are none.
        completed: a planner's plan, without what has no use in it.
        host_state: what a plan has on hosts.
        memory_savers: what a planner may decide where memory is short, in the order in which it is tried.
        methods: of compiled programs, by name: each takes a program's parts (:class:`.program_parts.ProgramParts`).
        engines: values of ``backend``, with what makes the engine of a program, and how it is priced.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    operators: Mapping[Any, tuple[object, ...]] = field(default_factory=dict)
    rewrites: tuple[Rewrite, ...] = ()
    precisions: Mapping[str, torch.dtype] = field(default_factory=dict)
    plan_fields: tuple[str, ...] = ()
    check_plan: Callable[[Plan, bool], None] = lambda plan, searched: None
    check_names: Callable[[Program, Plan], None] = lambda program, plan: None
    parameter_patterns: Callable[[Plan], Sequence[str]] = lambda plan: ()
    expert_copies: Callable[[Plan], ExpertCopies | None] = lambda plan: None
    completed: Callable[[Plan], Plan] = lambda plan: plan
    host_state: Callable[[Plan], HostState] = lambda plan: HostState()
    memory_savers: tuple[MemorySaver, ...] = ()
    methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    engines: Mapping[str, EngineKind] = field(default_factory=dict)


def add_feature(feature: Feature) -> Feature:
    """Tell the layers below what a feature says of its operators, and return it.

    Raises:
        ValueError: if something is said twice.
    """
    add_rules(feature.rules)
    add_precisions(feature.precisions)
    add_plan_fields(feature.plan_fields, feature.check_plan)
    add_engines(feature.engines)
    for operator, extensions in feature.operators.items():
        extend(operator, *extensions)
    return feature
