"""Pad sequences to a few lengths, so that few programs are compiled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api.compiled_program import CompiledProgram
from ..compat.torch import pytree
from ..core.errors import CompileError, InputError
from ..core.precision import rounding_of_losses
from ..ir.batch_form import plain_batch
from ..ir.plan import precision_of

IDS, MASK = "input_ids", "attention_mask"
PADDING: Mapping[Any, float] = MappingProxyType(  # integers [rows, length] under the names that transformers gives them
    {IDS: 0, MASK: 0, "token_type_ids": 0, "position_ids": 0, "labels": -100}
)
Values = Mapping[Any, float | None]


def pad_to_bucket(
    batch: Any, buckets: int | Sequence[int] = 64, *, values: Values | None = None
) -> dict[str, Any] | tuple[Any, ...]:
    """Pad the sequences of a batch at their ends to the next of a few lengths.

    Sequences are tensors ``[rows, length, ...]`` that ``values`` names, and in a dict with ``input_ids`` integers
    ``[rows, length]`` under transformers' names (``attention_mask``, ``token_type_ids``, ``position_ids`` with 0,
    ``labels`` with -100). A model computes the same loss then if it leaves out what is padded, as transformers' models
    do with ``attention_mask`` and labels of -100 (and causal models with such labels alone).

    Args:
        batch: a dict or a tuple, with the same lengths on every rank.
        buckets: lengths are rounded up to a multiple of it; or all lengths that there may be.
        values: what sequences are padded with, by their key (or position, in a tuple); None for a tensor that is no
            sequence, whatever its shape.

    Returns:
        A dict or a tuple; tensors that need no padding are those of ``batch``.

    Raises:
        CompileError: QN108 for buckets that are not positive; if nothing says what is a sequence, or whether a tensor
            with several dims is one.
        InputError: QN102 if sequences have different lengths, or are longer than the longest bucket.
    """
    plain = plain_batch(batch)
    items: dict[Any, Any] = dict(plain) if isinstance(plain, dict) else dict(enumerate(plain))
    padding = _padding(items, values or {})
    length = _length(items, padding)
    missing = _bucket(length, buckets) - length
    _refuse_unnamed(items, padding)
    padded = {key: _padded(x, missing, padding.get(key)) for key, x in items.items()}
    return padded if isinstance(plain, dict) else tuple(padded.values())


@dataclass
class PaddedBatches:
    """Padding of a program's training batches. The first one that becomes longer is evaluated both ways."""

    program: CompiledProgram
    buckets: int | Sequence[int]
    values: Values | None = None
    local: bool = False
    proven: bool = False

    def __call__(self, batch: Any) -> Any:
        """Pad a batch; raise CompileError QN108 if padding changes the loss, and as :func:`pad_to_bucket`."""
        padded = pad_to_bucket(batch, self.buckets, values=self.values)
        leaves, padded_leaves = (pytree.tree_leaves(tree) for tree in (plain_batch(batch), padded))
        if not self.proven and any(x is not y for x, y in zip(leaves, padded_leaves, strict=True)):
            self._prove(batch, padded)
            self.proven = True
        return padded

    def _prove(self, batch: Any, padded: Any) -> None:
        whole, filled = (self.program.evaluate(each, batch_is_local=self.local) for each in (batch, padded))
        rounds = precision_of(self.program.plan).rounds
        near = rounding_of_losses(torch.bfloat16 if rounds else whole.dtype)
        if not torch.allclose(filled, whole, rtol=near, atol=near, equal_nan=True):
            raise CompileError(
                "QN108",
                f"padded to a bucket, the loss of a batch is {float(filled):.6g}, and {float(whole):.6g} without: the "
                "model does not leave out what is padded",
                fix="give the model a mask, labels that do not count (-100), or leave buckets out",
            )


def _padding(items: Mapping[Any, Any], values: Values) -> Values:
    """Return the padding value of each tensor, None for those that are no sequences."""
    unknown = [key for key in values if key not in items]
    if unknown:
        raise CompileError(
            "QN108",
            f"values names {', '.join(map(repr, unknown))}, and the batch has {', '.join(map(repr, items))}",
            fix="name the keys of the batch, or positions in a tuple",
        )
    usual = {key: PADDING[key] for key, x in items.items() if key in PADDING and _is_ids(key, x)}
    usual = usual if IDS in usual else {}
    length = items[IDS].shape[1] if IDS in usual else None
    return {key: value for key, value in usual.items() if items[key].shape[1] == length} | dict(values)


def _is_ids(key: Any, x: Any) -> bool:
    """Return whether a tensor has a number for each position; masks may have any dtype."""
    return isinstance(x, Tensor) and x.dim() == 2 and (key == MASK or not x.is_floating_point())


def _length(items: Mapping[Any, Any], padding: Values) -> int:
    """Return the length of all sequences."""
    shapes = {key: tuple(items[key].shape) for key, value in padding.items() if value is not None}
    if not shapes:
        raise CompileError(
            "QN108",
            f"nothing says what of the batch ({', '.join(map(repr, items))}) is a sequence, and what pads it",
            fix="name each: values={0: 0, 1: -100} for a tuple, values={'x': 0} for a dict; of a Trainer: "
            "bucket_values={...}",
        )
    lengths = {shape[1] if len(shape) > 1 else 0 for shape in shapes.values()}
    if len(lengths) > 1 or 0 in lengths:
        raise InputError(
            "QN102", f"the sequences of the batch are {shapes}", fix="name tensors [rows, length, ...] of one length"
        )
    return lengths.pop()


def _refuse_unnamed(items: Mapping[Any, Any], padding: Values) -> None:
    for key, x in items.items():
        unknown = key not in padding
        if unknown and isinstance(x, Tensor) and x.dim() > 1:
            raise CompileError(
                "QN108",
                f"nothing says whether {key!r} of the batch, {tuple(x.shape)}, is a sequence of the length of others",
                fix=f"say what pads it, values={{{key!r}: 0}}, or that it is none, values={{{key!r}: None}}; of a "
                "Trainer: bucket_values={...}",
            )
        if unknown and isinstance(x, (tuple, list, Mapping)):
            raise CompileError(
                "QN108",
                f"{key!r} of the batch is a {type(x).__name__}, and sequences are padded in a flat tuple or dict",
                fix="pad sequences in the loader's collate_fn",
            )


def _padded(x: Any, missing: int, value: float | None) -> Any:
    if not missing or value is None:
        return x
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing), value=value)


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
