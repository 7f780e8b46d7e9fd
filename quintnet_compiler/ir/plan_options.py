"""Decisions of a plan as keyword arguments, ``compile(..., zero=3)``, and as texts, ``--set zero=3``."""

from __future__ import annotations

import collections.abc
import difflib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, get_args, get_origin, get_type_hints, is_typeddict

from ..core.axes import DataAxis

P = ParamSpec("P")
R = TypeVar("R")
Offloaded = Literal["activations", "parameters", "optimizer"]  # what host memory can hold for a device


class ExpectationOptions(TypedDict, total=False):
    """The fields of :class:`.expectations.Expectations`."""

    documents: Sequence[int]
    hot_rows: float | None
    expert_imbalance: float


class PlanOptions(TypedDict, total=False):
    """The fields of :class:`.plan.Plan` but ``version`` and ``mesh``, as keyword arguments."""

    microbatches: int | None
    batch_statistics: Literal["batch", "microbatch"] | None
    schedule: str | None
    virtual_stages: int | None
    sequence_parallel: bool | None
    parameters: Mapping[str, Mapping[str, str]] | None
    stages: Sequence[str] | None
    context: Literal["all_gather", "ulysses", "ring"] | None
    context_load_balance: bool | None
    attention_tile_bytes: int | None
    experts: Sequence[DataAxis] | None
    hot_experts: Mapping[str, Sequence[int]] | None
    zero: Literal[0, 1, 2, 3] | None
    zero_axes: Sequence[DataAxis] | None
    reshard_after_forward: bool | None
    overlap: bool | None
    async_tp: bool | None
    recompute: Literal["none", "selective", "full", "auto"] | None
    activation_memory_budget: float | None
    offload: Sequence[Offloaded] | None
    offload_folder: str | None
    loss_chunks: int | None
    precision: Literal["model", "bf16", "fp16", "fp8"] | None
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"] | None
    fp8_skip: Sequence[str] | None
    loss_scale: float | None
    reduce_dtype: Literal["parameter", "float32", "bfloat16"] | None
    sum_dtype: Literal["value", "float32"] | None
    bucket_mib: float | None
    seed: int | None
    expect: ExpectationOptions | None
    unknown_ops: Literal["error", "replicate"] | None


def decided(function: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that ``function`` received, for :meth:`.plan.Plan.changed`, without those that are None.

    Raises:
        TypeError: as Python does for an argument that a function does not have.
    """
    for name in options:
        if name not in PlanOptions.__annotations__:
            close = difflib.get_close_matches(name, PlanOptions.__annotations__, n=1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
    options_set = {name: value for name, value in options.items() if value is not None}
    return {
        name: tuple(x) if isinstance(x, Sequence) and not isinstance(x, str) else x for name, x in options_set.items()
    }


def lists_options(function: Callable[P, R]) -> Callable[P, R]:
    """Give ``function`` a signature (in ``help`` and notebooks) with an argument for each option."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    hints = {name: getattr(hint, "__forward_arg__", hint) for name, hint in PlanOptions.__annotations__.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    listed = [inspect.Parameter(name, keyword, default=None, annotation=hint) for name, hint in hints.items()]
    function.__dict__["__signature__"] = signature.replace(parameters=[*parameters, *listed])
    return function


def read_options(texts: Sequence[str]) -> dict[str, Any]:
    """Read options from texts ``name=value``, each value as the type that :class:`PlanOptions` has for it.

    Elements of a list are separated by commas; ``parameters``, ``hot_experts`` and ``expect`` are JSON.

    Raises:
        ValueError: for a name or a value that is not possible, with those that are.
    """
    kinds, options = get_type_hints(PlanOptions), dict[str, Any]()
    for text in texts:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not sign:
            raise ValueError(f"{text!r} is not NAME=VALUE; write for example zero=3")
        if name not in kinds:
            close = difflib.get_close_matches(name, kinds, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ValueError(f"there is no option {name!r}; {hint}the options are {', '.join(kinds)}")
        if name in options:
            raise ValueError(f"{name} is given twice")
        kind = next(argument for argument in get_args(kinds[name]) if argument is not type(None))
        try:
            options[name] = _value(kind, value)
        except ValueError:
            raise ValueError(f"{name}={value}: {name} is {_possible(kind)}") from None
    return options


def _value(kind: Any, text: str) -> Any:
    """Read ``text`` as a value of ``kind``.

    Raises:
        ValueError: if it is none.
    """
    if get_origin(kind) is collections.abc.Mapping or is_typeddict(kind):
        return json.loads(text)
    if get_origin(kind) is collections.abc.Sequence:
        return tuple(_value(get_args(kind)[0], part.strip()) for part in text.split(",") if part.strip())
    if kind in (int, float, str):
        return kind(text)
    choices = _choices(kind)
    if text.lower() not in choices:
        raise ValueError(text)
    return choices[text.lower()]


def _choices(kind: Any) -> dict[str, Any]:
    return {"true": True, "false": False} if kind is bool else {str(value): value for value in get_args(kind)}


def _possible(kind: Any) -> str:
    """Return which texts :func:`_value` accepts, for people."""
    if is_typeddict(kind):
        return 'JSON, such as {"documents": [4096, 512]}'
    if get_origin(kind) is collections.abc.Mapping:
        nested = get_origin(get_args(kind)[1]) is collections.abc.Mapping
        example = '"*.up_proj.weight": {"tp": "S(0)"}' if nested else '"layers.3.mlp.experts.*": [3, 17]'
        return f"JSON, such as {{{example}}}"
    if get_origin(kind) is collections.abc.Sequence:
        return f"a list, separated by commas; each element is {_possible(get_args(kind)[0])}"
    if kind in (int, float, str):
        return {int: "an integer", float: "a number", str: "a text"}[kind]
    return f"one of {', '.join(_choices(kind))}"
