"""Decide whether a difference is rounding: run program and module in float64, and each operator by itself.

If a model is ill-conditioned (a ReLU at 0, a BatchNorm over two numbers), two right computations in 32 bits may differ
by any amount. The program is right then if (1) the same graph in float64 equals the module in float64, and (2) each of
its operators gives in 32 bits what it gives in float64 for the same inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.torch import TorchDispatchMode, pytree, schema
from ..core.annotations import is_getitem
from .module_sides import Sides
from .module_step import module_step, tensors_of
from .reference import differs
from .swapped_values import double
from .unsplit_step import UnsplitStep
from .verify import LIMITS, Comparison

CONSTANTS_ERROR = 1e-6  # allowed in float64 for constants that one side rounds to 32 bits
SENSITIVITY_FACTOR = 100.0  # an error of more than this multiple of the effect of rounding parameters is no rounding
DOUBLED = frozenset({torch.float32, torch.bfloat16, torch.float16})


def exact_differences(sides: Sides, most: float = float("inf")) -> list[Comparison]:
    """Return the tensors that differ in float64 between the same graph and the module in place.

    Both compute in float64 where the module has one of the dtypes that its own operators return. A dtype that only the
    program has stays.

    Constants that are rounded to 32 bits on one side may differ by ``CONSTANTS_ERROR``. If float64 is ill-conditioned,
    too, a tensor may differ by ``SENSITIVITY_FACTOR`` times the effect of rounding in float64 on it in the module, but
    never by more than ``most``.

    Raises:
        Whatever the module or an operator raises in float64.
    """
    dtypes = DOUBLED & sides.theirs.dtypes
    with double(sides.owner):
        batch = _in_float64(sides.batch)
        theirs = module_step(sides.owner, batch, sides.masks, within=Float64(dtypes))
        step = replace(sides.step, in_float64=dtypes)
        exact = replace(sides, step=step, batch=batch, theirs=theirs, dtype=torch.float64)
        different = [comparison for comparison in exact.compare() if comparison.error > CONSTANTS_ERROR]
        if not different:
            return []
        noise = exact.sensitivity(within=Float64(dtypes))
    allowed = {key: min(SENSITIVITY_FACTOR * error, most) for key, error in noise.items()}
    return [c for c in different if c.error > allowed.get((c.what, c.name), 0.0)]


def wrong_operators(sides: Sides) -> list[fx.Node]:
    """Return the nodes whose results differ from those of the same operator in float64 on the same values.

    Only the first node of each distinct operator is compared. A result may differ by what its dtype allows, or by the
    effect of rounding its inputs.
    """
    checker = _EachOperator(replace(sides.step, in_float64=DOUBLED))
    sides.step.run_step(sides.owner.tensors, tensors_of(sides.batch), lambda *_: None, checker.watch)
    return checker.wrong


class Float64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which operators return float64 where code names one of ``dtypes``, or makes a tensor of the default."""

    def __init__(self, dtypes: frozenset[torch.dtype]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes = dtypes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        new_kwargs = dict(kwargs or {})
        for name, dtype in new_kwargs.items():
            if isinstance(dtype, torch.dtype) and dtype in self.dtypes:
                new_kwargs[name] = torch.float64
        if self._makes_the_default(func, args, new_kwargs):
            new_kwargs["dtype"] = torch.float64
        return func(*args, **new_kwargs)

    def _makes_the_default(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operator without a tensor or dtype among its arguments returns one of the dtypes."""
        takes = any(argument.name == "dtype" for argument in schema(func).arguments)
        if not takes or kwargs.get("dtype") is not None:
            return False
        if any(isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs))):
            return False
        like = func(*args, **{**kwargs, "device": "meta", "pin_memory": None})
        return isinstance(like, Tensor) and like.dtype in self.dtypes


@dataclass
class _EachOperator:
    """A comparison of each distinct operator of a step with the same one in float64."""

    exact: UnsplitStep
    doubled: dict[fx.Node, Any] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    wrong: list[fx.Node] = field(default_factory=list)

    def watch(self, node: fx.Node, value: Any) -> None:
        """Record the value of a node, and compare it."""
        self.doubled[node] = _in_float64(value)
        if node.op != "call_function" or is_getitem(node) or (kind := self._kind(node)) in self.seen:
            return
        self.seen.add(kind)
        limits = [LIMITS.get(x.dtype, 0.0) for x in _real(value)]
        results, expected = _real(self.doubled[node]), _real(self._exact(node, self.doubled))
        if all(differs(a, b) <= limit for a, b, limit in zip(results, expected, limits, strict=True)):
            return
        eps = max(torch.finfo(x.dtype).eps for x in _real(value))
        perturbed = {used: _rounded(self.doubled[used], eps) for used in node.all_input_nodes}
        for x, right, other, limit in zip(results, expected, _real(self._exact(node, perturbed)), limits, strict=True):
            if differs(x, right) > max(limit, SENSITIVITY_FACTOR * differs(other, right)):  # a sum may be all rounding
                self.wrong.append(node)
                return

    def _kind(self, node: fx.Node) -> str:
        """Return the operator, its arguments, and the layouts of tensors: equal for equal computations."""

        def form(used: fx.Node) -> str:
            tensors = [x for x in pytree.tree_leaves(self.doubled[used]) if isinstance(x, Tensor)]
            return str([(x.dtype, x.shape, x.stride()) for x in tensors])

        return f"{node.target} {fx.map_arg((node.args, node.kwargs), form)}"

    def _exact(self, node: fx.Node, inputs: Mapping[fx.Node, Any]) -> Any:
        return self.exact.value(node, inputs, {}, iter(()))


def _in_float64(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.double() if x.dtype in DOUBLED else x, tree)


def _rounded(tree: Any, eps: float) -> Any:
    """Return float64 values, each changed as another rounding might have done."""
    generator = torch.Generator().manual_seed(0)

    def other(x: Tensor) -> Tensor:
        if x.dtype is not torch.float64:
            return x
        signs = torch.randint(0, 2, x.shape, generator=generator).to(x.device) * 2 - 1
        return x * (1 + signs * eps)

    return pytree.tree_map_only(Tensor, other, tree)


def _real(tree: Any) -> list[Tensor]:
    """Return the floating-point tensors of a tree."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]
