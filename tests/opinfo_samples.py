"""PyTorch's own database of operators, as functions of float tensors: a few small samples of each."""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

LARGEST = 2000  # elements of a sample's tensors
LOOKED_AT = 24  # of an entry's samples; those that are taken are spread over them
# What the database's functions call a small size; 4 can be split over two ranks, 5 and 3 cannot.
SIZES = {"S": 4, "M": 8, "L": 16, "XS": 2}
LIMIT = 1e-9  # of what is largest in a tensor
_UNINITIALISED = ("empty", "resize_", "resize_as_")


@dataclass(frozen=True)
class Sample:
    """``floats``: the float tensors among the arguments, in order; ``trained``: which of them have gradients.
    ``outs``: what the function makes of them, as :func:`results` gives it."""

    number: int
    floats: tuple[Tensor, ...]
    trained: tuple[int, ...]
    outs: tuple[Tensor, ...]
    function: Any
    leaves: tuple[Any, ...]
    spec: Any

    def __call__(self, floats: list[Tensor]) -> list[Tensor]:
        return results(_call(self.function, self.leaves, self.spec, floats))


@dataclass(frozen=True)
class NoSample:
    """Why there is nothing to compare."""

    reason: str


def database() -> list[Any]:
    # the database's module imports it, and nothing here uses it
    if "expecttest" not in sys.modules and find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def samples(op: Any, count: int) -> list[Sample] | NoSample:
    """Up to ``count`` samples, or why there are none."""
    if torch.float64 not in op.supported_dtypes("cpu"):
        return NoSample("no float64 on CPU")
    if op.name.startswith(_UNINITIALISED) or "empty" in op.name:
        return NoSample("uninitialised memory")
    if "segment_reduce" in op.name:  # with arriving gradients of another memory format, in torch 2.13
        return NoSample("eager PyTorch's own backward writes outside its memory")
    found: list[Sample] = []
    reasons: list[str] = []
    taken = _given(op)
    step = max(len(taken) // count, 1)
    first, rest = taken[::step], [s for i, s in enumerate(taken) if i % step]
    for number, given in enumerate(itertools.chain(first, rest)):
        made = _sample(op, given, number)
        if isinstance(made, Sample):
            found.append(made)
        else:
            reasons.append(made.reason)
        if len(found) == count:
            break
    return found or NoSample(max(reasons, key=reasons.count, default="no small sample"))


def _given(op: Any) -> list[Any]:
    for sizes in (SIZES, {}):
        torch.manual_seed(0)
        try:
            with _small(sizes):
                return list(itertools.islice(op.sample_inputs("cpu", torch.float64, requires_grad=False), LOOKED_AT))
        except Exception:  # some functions write a size as a number
            continue
    return []


@contextlib.contextmanager
def _small(sizes: dict[str, int]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith(("torch.testing._internal.opinfo", "torch.testing._internal.common_methods")):
                has = {size: n for size, n in sizes.items() if isinstance(vars(module).get(size), int)}
                stack.enter_context(patch.multiple(module, **has)) if has else None
        yield


def _sample(op: Any, given: Any, number: int) -> Sample | NoSample:
    leaves, spec = pytree.tree_flatten((given.input, given.args, given.kwargs))
    if any(isinstance(x, Tensor) and (x.layout is not torch.strided or x.is_nested) for x in leaves):
        return NoSample("not strided")
    if any(isinstance(x, Tensor) and x.numel() > LARGEST for x in leaves):
        return NoSample("large")
    floats = tuple(x.detach().contiguous() for x in leaves if _is_float(x))
    if not floats:
        return NoSample("takes no float tensor")
    reason = ""
    for trained in (tuple(range(len(floats))), (0,), ()):
        try:
            outs = _twice(op.op, leaves, spec, floats, trained)
        except Exception as error:  # not everything that is float has a gradient
            reason = f"fails: {type(error).__name__}"
            continue
        if outs is None:
            return NoSample("draws random numbers")
        if not outs:
            return NoSample("returns no tensor")
        return Sample(number, floats, trained, outs, op.op, tuple(leaves), spec)
    return NoSample(reason)


def _twice(
    function: Any, leaves: list[Any], spec: Any, floats: tuple[Tensor, ...], trained: tuple[int, ...]
) -> tuple[Tensor, ...] | None:
    """Results; None if they are others with another seed, and so not determined. (The database sets a seed of its own
    around functions that draw; here it sets none.)"""
    seen: list[tuple[Tensor, ...]] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        given = [x.clone().requires_grad_(i in trained) for i, x in enumerate(floats)]
        with warnings.catch_warnings(), patch.object(torch, "manual_seed"):
            warnings.simplefilter("ignore")
            outs = results(_call(function, leaves, spec, [x * 1 for x in given]))
            ends = [out.sum() for out in outs if out.requires_grad]
            if ends:
                torch.autograd.grad(sum(ends[1:], ends[0]), [given[i] for i in trained], allow_unused=True)
        seen.append(tuple(out.detach() for out in outs))
    same = len(seen[0]) == len(seen[1]) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num(0.25), b.nan_to_num(0.25)) for a, b in zip(*seen, strict=True)
    )
    return seen[0] if same else None


def _call(function: Any, leaves: Any, spec: Any, floats: list[Tensor]) -> Any:
    rest = iter(floats)
    given, args, kwargs = pytree.tree_unflatten([next(rest) if _is_float(x) else x for x in leaves], spec)
    return function(given, *args, **kwargs)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.float64


def results(made: Any) -> list[Tensor]:
    """The tensors of a result, as float64: complex numbers as pairs, others converted."""
    outs = [out for out in pytree.tree_leaves(made) if isinstance(out, Tensor) and out.numel()]
    pairs = (torch.view_as_real(out.resolve_conj()) if out.is_complex() else out for out in outs)
    return [out if out.dtype is torch.float64 else out.to(torch.float64) for out in pairs]


def gap(have: Tensor | None, want: Tensor | None) -> str:
    """How far two tensors are from each other; nothing where they are equal."""
    if have is None or want is None:
        other = want if have is None else have
        return "" if other is None or not bool(other.any()) else "a gradient where there should be none, or none"
    finite = want.isfinite()
    size = max(float(want[finite].abs().max()) if bool(finite.any()) else 0.0, 1.0)
    if torch.allclose(have, want, rtol=0.0, atol=LIMIT * size, equal_nan=True):
        return ""
    return f"off by {float((have - want).abs().nan_to_num(torch.inf).max()) / size:.2g}"
