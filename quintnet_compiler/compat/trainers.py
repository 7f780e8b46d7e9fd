"""Private names of the Trainers of transformers and Lightning that :mod:`quintnet_compiler.loops` needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["labels_counted", "lightning_precision", "prepared", "save_random_states"]


def labels_counted(trainer: Any, batch: Mapping[str, Any]) -> Tensor | None:
    """Return a Trainer's count of the labels of a batch (float32); None if the model takes no such number.

    For GPT-2 it is larger than the number of terms of the loss. Instead: the number that the loss counts.
    """
    count = trainer._get_num_items_in_batch([batch], trainer.args.device)
    return None if count is None else torch.as_tensor(count, dtype=torch.float32)


def save_random_states(trainer: Any, folder: str) -> None:
    """Write the generator states of Python, NumPy and torch as a Trainer of one process does; instead: our own file."""
    from transformers import Trainer

    Trainer._save_rng_state(trainer, folder)


def prepared(trainer: Any, batch: Any) -> dict[str, Any]:
    """Return a batch as a Trainer prepares it, or a subclass that has its own way; instead: moving it to the device."""
    return dict(trainer._prepare_inputs(batch))


def lightning_precision(trainer: Any) -> str:
    """Return the precision that Lightning's Trainer was given; instead: none, no public name has it."""
    return str(getattr(trainer._accelerator_connector, "_precision_flag", "32-true"))
