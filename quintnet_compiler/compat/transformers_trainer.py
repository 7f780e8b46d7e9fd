"""What transformers' Trainer does in private methods, beside those that :mod:`quintnet_compiler.loops` replaces."""

from __future__ import annotations

from typing import Any

__all__ = ["save_random_states"]


def save_random_states(trainer: Any, folder: str) -> None:
    """Write the states of Python's, NumPy's and torch's random numbers, as a Trainer of one process does; instead: a
    file of our own."""
    from transformers import Trainer

    Trainer._save_rng_state(trainer, folder)
