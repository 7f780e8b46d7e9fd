"""Sequences padded to a few lengths, so that few programs are compiled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..core.errors import CompileError, InputError
from ..ir.batch_form import plain_batch

PADDING: Mapping[Any, float] = {"labels": -100}  # what cross entropy does not count; all else is padded with 0


def pad_to_bucket(
    batch: Any, buckets: int | Sequence[int] = 64, *, values: Mapping[Any, float] | None = None
) -> dict[str, Any] | tuple[Any, ...]:
    """Pad the sequences of a batch at their ends to the next of a few lengths.

    Every tensor ``[rows, length, ...]`` is padded, where ``length`` is that of ``input_ids``, or of the first tensor
    with two dims. A model computes the same loss then if it leaves out what is padded, as transformers' models do with
    ``attention_mask`` and labels of -100 (and causal models with such labels alone).

    Args:
        batch: a dict or a tuple, with the same lengths on every rank.
        buckets: lengths are rounded up to a multiple of it; or all lengths that there may be.
        values: what tensors are padded with, by their key (or position, in a tuple); by default -100 for ``labels`` and
            0 for all others.

    Returns:
        A dict or a tuple; tensors that need no padding are those of ``batch``.

    Raises:
        CompileError: QN108 for buckets that are not positive.
        InputError: QN102 if no tensor has two dims, or the batch is longer than the longest bucket.
    """
    given = plain_batch(batch)
    items: dict[Any, Any] = dict(given) if isinstance(given, dict) else dict(enumerate(given))
    first = items.get("input_ids", next((x for x in items.values() if isinstance(x, Tensor) and x.dim() > 1), None))
    if not isinstance(first, Tensor) or first.dim() < 2:
        raise InputError("QN102", "no tensor of the batch is [rows, length, ...]", fix="pad batches of sequences only")
    length = first.shape[1]
    missing, fill = _bucket(length, buckets) - length, {**PADDING, **(values or {})}

    def padded(key: Any, x: Any) -> Any:
        if not missing or not isinstance(x, Tensor) or x.dim() < 2 or x.shape[1] != length:
            return x
        return F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing), value=fill.get(key, 0))

    found = {key: padded(key, x) for key, x in items.items()}
    return found if isinstance(given, dict) else tuple(found.values())


def _bucket(length: int, buckets: int | Sequence[int]) -> int:
    lengths = [buckets] if isinstance(buckets, int) else sorted(buckets)
    if not lengths or lengths[0] < 1:
        raise CompileError("QN108", f"buckets are {buckets}", fix="use a number above 0, or several")
    if isinstance(buckets, int):
        return -(-length // buckets) * buckets
    if length > lengths[-1]:
        raise InputError(
            "QN102",
            f"a batch of sequences of {length}, and the longest bucket is {lengths[-1]}",
            fix="add a longer bucket, or truncate the sequences",
        )
    return lengths[bisect_left(lengths, length)]
