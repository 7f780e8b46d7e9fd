"""A pass over validation data, whose last batch may have any number of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..capture import batch_size_of, plain_batch
from ..compiled import CompiledProgram
from ..errors import InputError
from .measures import Metric


def validate(program: CompiledProgram, batches: Iterable[Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Means over all rows (or over all labels that count, where labels are classes).

    Raises:
        InputError: QN102 if there are no batches, QN106 if a model that computes its own loss gets a batch that does
            not divide over data ranks.
    """
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)

    def add(name: str, total: float, count: float) -> None:
        sums[name] += total
        counts[name] += count

    for batch in batches:
        given = plain_batch(batch)
        if program.loss_fn is None or isinstance(given, dict):
            rows = batch_size_of(batch)
            add("loss", rows * float(program.evaluate(batch)), rows)
            continue
        *inputs, labels = given
        outputs = _outputs(program, tuple(inputs))
        with torch.no_grad():
            loss = program.loss_fn(outputs, labels.to(_device_of(outputs)))
            count = _counted(labels)
            add("loss", count * float(loss), count)
            for name, metric in metrics.items():
                add(name, *metric(outputs, labels.to(_device_of(outputs))))
    if not counts:
        raise InputError("QN102", "the validation data has no batches", fix="give val_loader at least one batch")
    return {name: total / max(counts[name], 1.0) for name, total in sums.items()}


def _outputs(program: CompiledProgram, inputs: tuple[Any, ...]) -> Any:
    """The model's outputs for any number of rows: filled up with the first one, whose outputs are dropped."""
    rows = batch_size_of(inputs)
    more = -rows % program.mesh.data_ways

    def fill(x: Any) -> Any:
        return torch.cat([x, x[:1].expand(more, *x.shape[1:])]) if isinstance(x, Tensor) and len(x) == rows else x

    found = program(*(pytree.tree_map(fill, inputs) if more else inputs))
    return pytree.tree_map(lambda x: x[:rows] if isinstance(x, Tensor) else x, found) if more else found


def _counted(labels: Tensor) -> float:
    return float((labels != -100).sum()) if labels.dtype is torch.int64 else float(len(labels))


def _device_of(outputs: Any) -> torch.device:
    return next((x.device for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)), torch.device("cpu"))
