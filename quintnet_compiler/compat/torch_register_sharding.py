"""Private names of torch: the functions that ``register_sharding`` of DTensor was given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

__all__ = ["registered_shardings", "spec_of_whole"]

_MODULE = "torch.distributed.tensor.experimental._register_sharding"


def registered_shardings() -> dict[OpOverload, Callable[..., Any]]:
    """Return the functions that ``register_sharding`` was given, by operator; instead: nothing, DTensor keeps them."""
    if _MODULE not in sys.modules:  # nobody can have called it, and DTensor takes long to import
        return {}
    from torch.distributed.tensor import DTensor

    strategies: Any = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    return {
        operator: strategy.args[0]
        for operator, strategy in strategies.items()
        if isinstance(strategy, partial) and strategy.func.__module__ == _MODULE
    }


def spec_of_whole(x: Tensor) -> Any:
    """Return what such a function gets for a tensor; instead: nothing, DTensor makes them."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    mesh: Any = None  # only a call on DTensors has one
    return DTensorSpec(mesh, (Replicate(),), TensorMeta(x.shape, x.stride(), x.dtype))
