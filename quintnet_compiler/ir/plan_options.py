"""Decisions of a plan as keyword arguments: what ``compile(..., zero=3)`` takes, and how that is read."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar

from ..core.axes import DataAxis

P = ParamSpec("P")
R = TypeVar("R")


class PlanOptions(TypedDict, total=False):
    """The fields of :class:`.plan.Plan` but ``version`` and ``mesh``, as type checkers and editors see them."""

    microbatches: int | None
    schedule: str | None
    virtual_stages: int | None
    sequence_parallel: bool | None
    parameters: Mapping[str, Mapping[str, str]] | None
    stages: Sequence[str] | None
    context: Literal["all_gather", "ulysses", "ring"] | None
    context_load_balance: bool | None
    experts: Sequence[DataAxis] | None
    zero: Literal[0, 1, 2, 3] | None
    zero_axes: Sequence[DataAxis] | None
    reshard_after_forward: bool | None
    overlap: bool | None
    async_tp: bool | None
    recompute: Literal["none", "selective", "full", "auto"] | None
    activation_memory_budget: float | None
    precision: Literal["model", "bf16", "fp16"] | None
    loss_scale: float | None
    reduce_dtype: Literal["parameter", "float32", "bfloat16"] | None
    sum_dtype: Literal["value", "float32"] | None
    seed: int | None
    unknown_ops: Literal["error", "replicate"] | None


def decided(function: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What ``function`` was given, for :meth:`.plan.Plan.changed`; an option that is None is left out.

    Raises:
        TypeError: as Python does for an argument that a function does not have.
    """
    for name in options:
        if name not in PlanOptions.__annotations__:
            close = difflib.get_close_matches(name, PlanOptions.__annotations__, n=1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
    given = {name: value for name, value in options.items() if value is not None}
    return {name: tuple(x) if isinstance(x, Sequence) and not isinstance(x, str) else x for name, x in given.items()}


def lists_options(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose signature (in ``help`` and notebooks) has an argument for each option instead of one for
    all."""
    own = inspect.signature(function)
    kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    hints = {name: getattr(hint, "__forward_arg__", hint) for name, hint in PlanOptions.__annotations__.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    listed = [inspect.Parameter(name, keyword, default=None, annotation=hint) for name, hint in hints.items()]
    function.__dict__["__signature__"] = own.replace(parameters=[*kept, *listed])
    return function
