"""A pass over validation data, by the program's own evaluation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..api.compiled_program import CompiledProgram
from ..compat.torch import pytree
from ..core.errors import CompileError, InputError
from ..ir.batch_form import plain_batch
from .measures import Metric

LossWeight = Callable[[Any], float]
LABELS = "labels"  # the key of a dict whose value metrics compare outputs with


def validate(
    program: CompiledProgram,
    batches: Iterable[Any],
    metrics: Mapping[str, Metric],
    loss_weight: LossWeight | None = None,
) -> dict[str, float]:
    """Return the loss of all batches as if they were one, and the mean of each metric.

    See :meth:`CompiledProgram.evaluate_together`. A metric is its sum over all batches, divided by the sum of its
    counts.

    Args:
        program: The compiled program.
        batches: Of validation.
        metrics: By name.
        loss_weight: The weight of a batch's loss; then the loss is the weighted mean of ``program.evaluate``.

    Raises:
        CompileError: QN108 if losses of batches cannot be put together, or metrics have no labels.
        InputError: QN102 if there are no batches.
    """
    total = program.loss_total() if loss_weight is None else _WeightedMean(program, loss_weight)
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    for batch in batches:
        total.add(batch)
        if metrics:
            outputs, labels = _outputs_and_labels(program, batch)
            for name, metric in metrics.items():
                value, count = metric(outputs, labels)
                sums[name] += float(value)
                counts[name] += float(count)
    values = {name: sums[name] / counts[name] if counts[name] else math.nan for name in sums}
    return {"loss": float(total.loss()), **values}


def require_validation(
    program: CompiledProgram, metrics: Mapping[str, Metric], loss_weight: LossWeight | None = None
) -> None:
    """Raise the errors of :func:`validate` now, if validation batches are like those of training.

    Raises:
        CompileError: QN108.
    """
    batch = program.latest_batch
    if batch is None:
        return
    if loss_weight is None:
        program.require_parts(batch)
    if metrics:
        _labels(batch)


class _WeightedMean:
    """The mean of losses with the user's weights."""

    def __init__(self, program: CompiledProgram, weight: LossWeight) -> None:
        self.program, self.weight = program, weight
        self.sum = self.count = 0.0

    def add(self, batch: Any) -> None:
        weight = float(self.weight(batch))
        loss = float(self.program.evaluate(batch))
        self.sum += weight * loss if weight else 0.0
        self.count += weight

    def loss(self) -> float:
        if not self.count:
            raise InputError(
                "QN102",
                "the validation data has no batches, or their weights are 0",
                fix="give val_loader at least one batch with a weight above 0",
            )
        return self.sum / self.count


def _outputs_and_labels(program: CompiledProgram, batch: Any) -> tuple[Any, Any]:
    plain, labels = plain_batch(batch), _labels(batch)
    if isinstance(plain, dict):
        outputs = program(**plain)
    else:
        outputs = program(*(plain[:-1] if program.loss_fn is not None else plain))
    device = next((x.device for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)), torch.device("cpu"))
    return outputs, pytree.tree_map_only(Tensor, lambda x: x.to(device), labels)


def _labels(batch: Any) -> Any:
    """Return the labels of a batch.

    Raises:
        CompileError: QN108 for a dict without ``labels``.
    """
    plain = plain_batch(batch)
    if not isinstance(plain, dict):
        return plain[-1]
    if LABELS not in plain:
        raise CompileError(
            "QN108",
            f"metrics compare outputs with {LABELS!r}, and the batch has {', '.join(map(str, plain))}",
            fix=f"name the labels {LABELS!r}, or leave metrics out",
        )
    return plain[LABELS]
