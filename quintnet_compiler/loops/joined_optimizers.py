"""Several optimizers as one, for a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.errors import CheckpointError
from ..runtime.state.whole_optimizer import WholeOptimizer


def joined(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    """Return one optimizer with the groups and the state of all, not copies; None if there is none.

    Raises:
        CheckpointError: QN603 if two have the same parameter, or one of several has whole parameters.
    """
    if len(optimizers) < 2:
        return optimizers[0] if optimizers else None
    if any(isinstance(optimizer, WholeOptimizer) for optimizer in optimizers):
        raise CheckpointError(
            "QN603",
            "there are several optimizers, and one is of program.optimizer(make)",
            fix="make one optimizer of all parameters, with program.optimizer(make)",
        )
    owners: dict[Tensor, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in owners:
                    raise CheckpointError(
                        "QN603",
                        f"two optimizers have the same parameter {tuple(parameter.shape)}: a checkpoint keeps the "
                        "state of one",
                        fix="give each parameter to one optimizer",
                    )
                owners[parameter] = optimizer
    name = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
    kind: Any = type(name, (_Joined,), {})
    result = kind.__new__(kind)
    result.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    result.state = _States(owners)
    return result  # type: ignore[no-any-return]


class _Joined(torch.optim.Optimizer):
    """An optimizer with only the attributes that a checkpoint reads and writes; it does not step."""


class _States(MutableMapping[Tensor, Any]):
    def __init__(self, owners: dict[Tensor, torch.optim.Optimizer]) -> None:
        self.owners = owners

    def __getitem__(self, parameter: Tensor) -> Any:
        states = self.owners[parameter].state
        if parameter not in states:
            raise KeyError(parameter)
        return states[parameter]

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        self.owners[parameter].state[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self.owners[parameter].state[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for parameter, owner in self.owners.items() if parameter in owner.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)
