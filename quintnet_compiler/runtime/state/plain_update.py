"""The update of one parameter by an optimizer of its own, to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the update, relative; for 16 bits:
NEAR_16 = 5e-2
ROUNDINGS = 4  # of a parameter's own values, by which an update may differ too
Make = Callable[[Any], torch.optim.Optimizer]


@dataclass
class PlainUpdate:
    """What a plain copy of a parameter is after one step of an optimizer that has it alone."""

    parameter: nn.Parameter
    before: Tensor
    after: Tensor

    def difference(self) -> str:
        """In what the parameter differs now, for people; "" if in rounding alone."""
        change, wanted = self.parameter.detach() - self.before, self.after - self.before
        near = NEAR.get(self.parameter.dtype, NEAR_16)
        most = float(wanted.abs().max()) if wanted.numel() else 0.0
        error = float((change - wanted).abs().max()) if wanted.numel() else 0.0
        rounding = (
            ROUNDINGS * torch.finfo(self.before.dtype).eps * float(self.before.abs().max()) if wanted.numel() else 0
        )
        if error <= near * most + rounding:
            return ""
        here = float(change.abs().max())
        return (
            f"a parameter {tuple(self.before.shape)} changed by at most {here:.3g}, and a plain copy with an optimizer "
            f"of its own by {most:.3g}; they differ by {error:.3g}"
        )


def plain_updates(
    make: Make, groups: list[dict[str, Any]] | None, inner: torch.optim.Optimizer, here: Callable[[nn.Parameter], bool]
) -> list[PlainUpdate]:
    """For each group of ``inner`` and number of dims, the update of the smallest parameter that is here and has a
    gradient. Nothing changes; where ``make`` does not take one parameter alone, there is none."""
    updates = []
    with torch.random.fork_rng(devices=[]):
        for parameter, group in _smallest(inner, here):
            alone = _alone(make, groups, parameter, group)
            if alone is not None:
                updates.append(alone)
    return updates


def _smallest(
    inner: torch.optim.Optimizer, here: Callable[[nn.Parameter], bool]
) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    for group in inner.param_groups:
        kinds: dict[int, nn.Parameter] = {}
        for p in group["params"]:
            if here(p) and p.grad is not None and p.numel() < kinds.get(p.dim(), p).numel() + (p.dim() not in kinds):
                kinds[p.dim()] = p
        yield from ((p, group) for p in kinds.values())


def _alone(
    make: Make, groups: list[dict[str, Any]] | None, parameter: nn.Parameter, group: Mapping[str, Any]
) -> PlainUpdate | None:
    assert parameter.grad is not None
    before = parameter.detach().clone()
    twin = nn.Parameter(before.clone(), requires_grad=parameter.requires_grad)
    twin.grad = parameter.grad.detach().clone()
    options = {key: copy.deepcopy(x) for key, x in group.items() if key != "params"}
    given: Any = [twin]
    if groups is not None:
        own = next(each for each in groups if any(p is parameter for p in each["params"]))
        given = [{**copy.deepcopy({key: x for key, x in own.items() if key != "params"}), "params": [twin]}]
    try:
        optimizer = make(given)
        (place,) = (each for each in optimizer.param_groups if any(p is twin for p in each["params"]))
    except Exception:  # of whatever kind: it is made for all parameters together
        return None
    place.update(options)
    with torch.no_grad():
        optimizer.step()
    return PlainUpdate(parameter, before, twin.detach())
