"""Adds up the parts of a loss over batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core.errors import CompileError, InputError
from ...core.precision import rounding_of_losses
from ...ir.loss_parts import LossPart, LossParts, number_at
from .split import FIX


@dataclass
class PartTotals:
    """The loss of the batches that were added, as if they were one batch."""

    totals: list[Any] = field(default_factory=list)  # for each part: (sum, count), or a value
    parts: LossParts | None = None

    def add(self, parts: LossParts, results: Sequence[Tensor], sizes: Mapping[str, int]) -> None:
        """Add a batch. ``results``: the loss and the parts; ``sizes``: of the batch, by name.

        Raises:
            InputError: QN102 if what belongs to no row is not as in the batches before.
            CompileError: QN111 if the parts do not give the loss.
        """
        batch = [_batch_value(part, results, parts, sizes) for part in parts.parts]
        loss, combined = _wide(results[0]), _combined(parts, batch)
        near = max(rounding_of_losses(x.dtype) for x in results if x.is_floating_point())
        if bool(SHIPPED.isfinite(combined)) and not torch.allclose(combined, loss, rtol=near, atol=near):
            raise CompileError("QN111", f"the parts of a loss give {float(combined)}, and the loss is {float(loss)}")
        if self.parts is None:
            self.totals = batch
        elif [part.kind for part in parts.parts] != [part.kind for part in self.parts.parts]:
            raise InputError("QN102", "the loss of this batch is computed in another way than that of those before")
        else:
            self.totals = [_added(*pair) for pair in zip(parts.parts, self.totals, batch, strict=True)]
        self.parts = parts

    def loss(self) -> Tensor:
        """A scalar in float64.

        Raises:
            InputError: QN102 if there were no batches.
        """
        if self.parts is None:
            raise InputError("QN102", "the validation data has no batches", fix="give val_loader at least one batch")
        return _combined(self.parts, self.totals)


def _wide(x: Tensor) -> Tensor:
    """On the CPU; floating-point numbers in float64."""
    host = x.detach().cpu()
    return host.double() if host.is_floating_point() else host.clone()


def _batch_value(part: LossPart, results: Sequence[Tensor], parts: LossParts, sizes: Mapping[str, int]) -> Any:
    if part.output is None:
        return number_at(part.size, sizes, parts.symbols)
    value = _wide(results[part.output])
    if part.kind != "mean":
        return value
    if part.count_output is not None:
        count = float(results[part.count_output])
    else:
        count = number_at(part.count, sizes, parts.symbols)
    return (value * count if count else SHIPPED.zeros_like(value)), count


def _added(part: LossPart, total: Any, batch: Any) -> Any:
    if part.kind == "mean":
        return _sum(part, total[0], batch[0]), total[1] + batch[1]
    if part.kind in ("sum", "additive size"):
        return _sum(part, total, batch)
    same = SHIPPED.equal(total, batch) if isinstance(total, Tensor) else total == batch
    if not same:
        raise _differs(part)
    return total


def _sum(part: LossPart, total: Any, batch: Any) -> Any:
    if isinstance(total, Tensor) and total.shape != batch.shape:
        raise _differs(part)
    return total + batch


def _differs(part: LossPart) -> InputError:
    return InputError(
        "QN102",
        f"the loss computes with {part.name}, which belongs to no row, and is not the same in all batches",
        fix=FIX,
    )


def _combined(parts: LossParts, values: Sequence[Any]) -> Tensor:
    numbers = [
        value[0] / value[1] if part.kind == "mean" else _as_size(value) if part.output is None else value
        for part, value in zip(parts.parts, values, strict=True)
    ]
    loss: Tensor = parts.combine(*(x.clone() if isinstance(x, Tensor) else x for x in numbers))
    return loss.double()


def _as_size(value: float) -> float | int:
    return int(value) if value == int(value) else value
