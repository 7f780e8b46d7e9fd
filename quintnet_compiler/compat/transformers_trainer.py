"""What transformers' Trainer does in private methods, beside those that :mod:`quintnet_compiler.loops` replaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["labels_counted", "save_random_states"]


def labels_counted(trainer: Any, batch: Mapping[str, Any]) -> Tensor | None:
    """How many labels a Trainer says that a batch has, which for GPT-2 are more than its loss is a sum of; None if the
    model takes no such number. Instead: the number that the loss counts."""
    count = trainer._get_num_items_in_batch([batch], trainer.args.device)
    return None if count is None else torch.as_tensor(count, dtype=torch.float32)


def save_random_states(trainer: Any, folder: str) -> None:
    """Write the states of Python's, NumPy's and torch's random numbers, as a Trainer of one process does; instead: a
    file of our own."""
    from transformers import Trainer

    Trainer._save_rng_state(trainer, folder)
