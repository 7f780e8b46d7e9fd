"""A pass over validation data, whose last batch may have any number of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..api.compiled_program import CompiledProgram
from ..compat.torch import pytree
from ..core.errors import InputError
from ..ir.batch_form import batch_size_of, plain_batch
from .measures import Metric


def validate(program: CompiledProgram, batches: Iterable[Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Means over all rows (or over all labels that count, where labels are classes).

    Raises:
        InputError: QN102 if there are no batches; QN106 if a model that computes its own loss, from something else than
            ``labels`` of classes, gets a batch that does not divide over data ranks.
    """
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)

    def add(name: str, total: float, count: float) -> None:
        sums[name] += total
        counts[name] += count

    for batch in batches:
        given = plain_batch(batch)
        if program.loss_fn is None or isinstance(given, dict):
            labels = _classes(given)
            count = float(batch_size_of(batch)) if labels is None else _counted(labels)
            add("loss", count * float(program.evaluate(_filled(program, given))), count)
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
    found = program(*_more_rows(inputs, -rows % program.mesh.data_ways))
    return pytree.tree_map(lambda x: x[:rows] if isinstance(x, Tensor) else x, found)


def _filled(program: CompiledProgram, batch: Any) -> Any:
    """With rows that divide: more of the first one, whose labels do not count."""
    rows = batch_size_of(batch)
    more = -rows % program.mesh.data_ways
    if not more or _classes(batch) is None:
        return batch
    found = _more_rows(batch, more)
    found["labels"][rows:] = -100
    return found


def _more_rows(batch: Any, count: int) -> Any:
    rows = batch_size_of(batch)

    def fill(x: Any) -> Any:
        return torch.cat([x, x[:1].expand(count, *x.shape[1:])]) if isinstance(x, Tensor) and len(x) == rows else x

    return pytree.tree_map(fill, batch) if count else batch


def _classes(batch: Any) -> Tensor | None:
    labels = batch.get("labels") if isinstance(batch, dict) else None
    return labels if isinstance(labels, Tensor) and labels.dtype is torch.int64 else None


def _counted(labels: Tensor) -> float:
    return float((labels != -100).sum()) if labels.dtype is torch.int64 else float(len(labels))


def _device_of(outputs: Any) -> torch.device:
    return next((x.device for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)), torch.device("cpu"))
