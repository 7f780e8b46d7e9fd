"""Assign samples to batches by a seed and the number of samples seen, so that a run can resume anywhere."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from ..core.errors import InputError


class BatchSampler(Sampler[list[int]]):
    """Batches of indices for ``DataLoader(dataset, batch_sampler=...)``, whose order does not depend on the layout.

    Each epoch has its own order, which depends on ``seed`` and the number of the epoch alone. ``start_at`` says how
    many samples were seen so far, whatever the batch size was: iteration resumes there, without reading what comes
    before. The last samples of an epoch that do not fill a batch are left out.

    Args:
        samples: how many the dataset has.
        batch_size: rows of the global batch.
        part: (index, count): give this part of each global batch, for ``step(..., batch_is_local=True)``.

    Raises:
        InputError: QN106 if a batch is larger than the data, or does not divide into parts.
    """

    def __init__(
        self, samples: int, batch_size: int, *, seed: int = 0, shuffle: bool = True, part: tuple[int, int] = (0, 1)
    ) -> None:
        index, count = part
        if not 0 < batch_size <= samples or batch_size % count or not 0 <= index < count:
            raise InputError(
                "QN106",
                f"batches of {batch_size} out of {samples} samples, part {index} of {count}",
                fix="use a batch size that is at most the number of samples and a multiple of the parts",
            )
        self.samples, self.batch_size, self.seed, self.shuffle, self.part = samples, batch_size, seed, shuffle, part
        self.seen = 0

    def start_at(self, seen: int) -> None:
        """Begin the next iteration after ``seen`` samples, counted over all epochs."""
        self.seen = seen

    @property
    def epoch(self) -> int:
        """Return the epoch of the next iteration, from 0."""
        return self.seen // self.samples

    def __len__(self) -> int:
        """Return the number of batches in the next iteration."""
        return (self.samples - self.seen % self.samples) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.samples)
        if self.shuffle:
            # each epoch has another seed, far from those of others
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
            order = torch.randperm(self.samples, generator=generator)
        index, count = self.part
        rows = self.batch_size // count
        for first in range(self.seen % self.samples, self.samples - self.batch_size + 1, self.batch_size):
            yield order[first + index * rows : first + (index + 1) * rows].tolist()

    def after(self, seen: int) -> int:
        """Return ``seen``, or the start of the next epoch if this one has no whole batch left."""
        remaining = self.samples - seen % self.samples
        return seen if remaining >= self.batch_size else seen + remaining
