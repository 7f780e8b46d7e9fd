"""How this package defines operators of its own: all of them are in one library, ``torch.ops.quintnet``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..compat.torch import OpOverload, schema

_library = torch.library.Library("quintnet", "DEF")  # type: ignore[no-untyped-call]


def define_operator(schema: str, shape: Callable[..., Any], compute: Callable[..., Any] | None = None) -> OpOverload:
    """Define an operator of this package.

    ``shape`` returns an empty result; ``compute`` the result, where no transport or rank is needed for it.
    """
    _library.define(schema)  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    torch.library.register_fake(f"quintnet::{name}", shape, lib=_library)
    if compute is not None:
        _library.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    overload: OpOverload = getattr(torch.ops.quintnet, name).default
    return overload


def define_composite(schema: str, function: Callable[..., Tensor]) -> OpOverload:
    """Define an operator that is one node in a graph and ``function`` wherever it runs, gradients included."""
    _library.define(schema)  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    _library.impl(name, function, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    overload: OpOverload = getattr(torch.ops.quintnet, name).default
    return overload


def differentiate(operator: OpOverload, keep: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Give an operator a derivative, as :func:`torch.library.register_autograd` has it; ``keep``: its setup_context."""
    torch.library.register_autograd(str(schema(operator).name), backward, setup_context=keep, lib=_library)


def resized(x: Tensor, dim: int, times: int = 1, over: int = 1) -> Tensor:
    """Return an empty tensor like ``x``, ``times`` as large in ``dim``, or one of ``over`` parts of it."""
    return x.new_empty([n * times // over if d == dim else n for d, n in enumerate(x.shape)])
