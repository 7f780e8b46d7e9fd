"""The update of a plain copy of a parameter by an optimizer that has nothing else, as a reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

RELATIVE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative to the largest change of an update
RELATIVE_TOLERANCE_16_BITS = 5e-2
ROUNDING_ERRORS = 4  # of the parameter's values, by which an update may differ in addition
Make = Callable[[Any], torch.optim.Optimizer]


@dataclass
class PlainUpdate:
    """A parameter before an update, and a plain copy of it after the update."""

    parameter: nn.Parameter
    before: Tensor
    after: Tensor

    def describe_difference(self) -> str:
        """Return a message about the difference of the parameter from the copy; "" if it is rounding alone."""
        if not self.before.numel():
            return ""
        change, expected = self.parameter.detach() - self.before, self.after - self.before
        tolerance = RELATIVE_TOLERANCE.get(self.parameter.dtype, RELATIVE_TOLERANCE_16_BITS)
        largest = float(expected.abs().max())
        error = float((change - expected).abs().max())
        rounding = ROUNDING_ERRORS * torch.finfo(self.before.dtype).eps * float(self.before.abs().max())
        if error <= tolerance * largest + rounding:
            return ""
        observed = float(change.abs().max())
        return (
            f"a parameter {tuple(self.before.shape)} changed by at most {observed:.3g}, and a plain copy with an "
            f"optimizer of its own by {largest:.3g}; they differ by {error:.3g}"
        )


def plain_updates(
    make: Make,
    groups: list[dict[str, Any]] | None,
    inner: torch.optim.Optimizer,
    is_whole: Callable[[nn.Parameter], bool],
) -> list[PlainUpdate]:
    """Return reference updates of some parameters, without changing anything.

    They are, for each group of ``inner`` and number of dims, that of the smallest whole parameter with a gradient.
    There is none where ``make`` does not take a single parameter.
    """
    updates = []
    with torch.random.fork_rng(devices=[]):
        for parameter, group in _smallest(inner, is_whole):
            update = _plain_update(make, groups, parameter, group)
            if update is not None:
                updates.append(update)
    return updates


def _smallest(
    inner: torch.optim.Optimizer, is_whole: Callable[[nn.Parameter], bool]
) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    for group in inner.param_groups:
        by_dims: dict[int, nn.Parameter] = {}
        for p in group["params"]:
            smallest = by_dims.get(p.dim())
            if is_whole(p) and p.grad is not None and (smallest is None or p.numel() < smallest.numel()):
                by_dims[p.dim()] = p
        yield from ((p, group) for p in by_dims.values())


def _plain_update(
    make: Make, groups: list[dict[str, Any]] | None, parameter: nn.Parameter, group: Mapping[str, Any]
) -> PlainUpdate | None:
    assert parameter.grad is not None
    initial = parameter.detach().clone()
    copied = nn.Parameter(initial.clone(), requires_grad=parameter.requires_grad)
    copied.grad = parameter.grad.detach().clone()
    options = {key: copy.deepcopy(x) for key, x in group.items() if key != "params"}
    argument: Any = [copied]
    if groups is not None:
        original = next(each for each in groups if any(p is parameter for p in each["params"]))
        argument = [{**copy.deepcopy({key: x for key, x in original.items() if key != "params"}), "params": [copied]}]
    try:
        optimizer = make(argument)
        (own_group,) = (each for each in optimizer.param_groups if any(p is copied for p in each["params"]))
    except Exception:  # of any type: the optimizer needs all parameters together
        return None
    own_group.update(options)
    with torch.no_grad():
        optimizer.step()
    return PlainUpdate(parameter, initial, copied.detach())
