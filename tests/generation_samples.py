"""Calls of attention to pages, as :mod:`.operator_samples` has them of others."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from quintnet_compiler.features.text_generation.ops import paged_attention

from .one_operator import Input, Sample, call
from .operator_samples import by_target, const


def _paged_attention() -> list[Sample]:
    q, few, kept = const(6, 4, 2, 4), const(6, 2, 2, 4), const(6, 10, 2, 2, 4)
    wide, own, broad = const(6, 4, 2, 6), const(6, 10, 2, 4, 4), const(2, 10, 2, 4, 6)
    table, places = Input((6, 3), _pages, grad=False), Input((6, 2), _places, grad=False)
    return [
        call(paged_attention, q, q, q, own, own, table, places, 0.5, 0),
        call(paged_attention, q, few, few, kept, kept, table, places, 0.5, 3),
        call(paged_attention, q, q, wide, const(2, 10, 2, 4, 4), broad, table, places, 0.3, 0),
    ]


def _pages(dice: Generator, shape: tuple[int, ...]) -> Tensor:
    """Each of three rows in a pool has pages of its own."""
    return 1 + torch.arange(shape[1]) + torch.arange(shape[0])[:, None] % 3 * shape[1]


def _places(dice: Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 4, (shape[0], 1), generator=dice) + torch.arange(shape[1])


GENERATION_SAMPLES = by_target(_paged_attention())
