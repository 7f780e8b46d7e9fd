"""Private methods of transformers' Trainer, which :mod:`quintnet_compiler.loops` replaces.

They are the places where its checkpoints are written and read, and where it clips; instead: a copy of its loop.
"""

from __future__ import annotations

from typing import Any

__all__ = ["REPLACED", "save_random_states"]

REPLACED = (
    "_clip_grad_norm",
    "_get_grad_norm",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_move_model_to_device",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
    "_wrap_model",
)


def save_random_states(trainer: Any, folder: str) -> None:
    """Write the states of Python's, NumPy's and torch's random numbers, as a Trainer of one process does."""
    from transformers import Trainer

    Trainer._save_rng_state(trainer, folder)
