"""The record of all that a feature gives to the compiler, and the function that adds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.precision import add_precisions
from ..ir.plan import Plan
from ..ir.program import Program
from ..ops.extensions import extend
from ..ops.rules.notation import Rule
from ..ops.rules.table import add_rules


@dataclass(frozen=True)
class Rewrite:
    """A pass of a feature, from program to program: it runs where every dtype is decided, and nothing is split yet.

    Attributes:
        kind: the class of the pass.
        decides: what it decides, in a line.
        make: the pass for a plan; None if the plan has no use for it.
        check: proves a rewrite from the programs before and after. Raises CompileError.
        notes: what a plan leaves as it is, and why, in lines, from the program after the rewrite.
    """

    kind: type
    decides: str
    make: Callable[[Plan], Callable[[Program], Program] | None]
    check: Callable[[Program, Program], None]
    notes: Callable[[Program, Plan], tuple[str, ...]]

    def checks(self, old: Program, new: Program) -> list[tuple[Callable[..., None], tuple[Program, Program]]]:
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
        plan_fields: the fields of plans that it alone reads.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    operators: Mapping[Any, tuple[object, ...]] = field(default_factory=dict)
    rewrites: tuple[Rewrite, ...] = ()
    precisions: Mapping[str, torch.dtype] = field(default_factory=dict)
    plan_fields: tuple[str, ...] = ()


def add_feature(feature: Feature) -> Feature:
    """Tell the layers below what a feature says of its operators, and return it.

    Raises:
        ValueError: if something is said twice.
    """
    add_rules(feature.rules)
    add_precisions(feature.precisions)
    for operator, extensions in feature.operators.items():
        extend(operator, *extensions)
    return feature
