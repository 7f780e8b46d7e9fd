"""Private names of torch: what ``torch.utils.checkpoint`` keeps, and which operators autograd's nodes stand for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as checkpoints
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch.utils.checkpoint import _checkpoint_hook, noop_context_fn

__all__ = [
    "CheckpointOptions",  # the options of a checkpoint; instead: a tuple of these three
    "options_of", "saves_tensors", "sequence_number", "sequence_number_of", "without_checkpoints",
]  # fmt: skip

# The number of the next node of autograd's graph; instead: making a node, and asking it for its number.
sequence_number = _get_sequence_nr

_PLAIN = type(noop_context_fn()[1])  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class CheckpointOptions:
    """The options of a checkpoint.

    ``stops``: whether the second run ends once the last tensor is saved that the backward reads; ``same_numbers``:
    whether it draws the random numbers of the first; ``selective``: whether a mode of the user's decides what it runs.
    """

    stops: bool
    same_numbers: bool
    selective: bool


def options_of(hooks: torch.autograd.graph.saved_tensors_hooks) -> CheckpointOptions | None:
    """Return the options of a checkpoint that is not reentrant, by the hooks that it enters; None for other hooks.

    Instead: a replacement of :func:`torch.utils.checkpoint.checkpoint` wherever a module has imported it.
    """
    if not isinstance(hooks, _checkpoint_hook):
        return None
    frame = _variable(hooks.pack_hook, "frame")
    selective = not isinstance(_variable(frame.recompute_fn, "recompute_context"), _PLAIN)
    same_numbers = bool(_variable(frame.recompute_fn, "preserve_rng_state"))
    return CheckpointOptions(bool(frame.early_stop), same_numbers, selective)


def _variable(function: Any, name: str) -> Any:
    """Return the value of a variable that a function closes over."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def sequence_number_of(node: Any) -> int:
    """Return the number of a node of autograd's graph, which runs in a backward before all smaller ones."""
    return int(node._sequence_nr())


def saves_tensors(node: Any) -> bool:
    """Return whether a node of autograd's graph reads tensors that were saved; instead: an own graph with our own
    hooks."""
    return any(name.startswith("_raw_saved") for name in dir(node))


@contextlib.contextmanager
def without_checkpoints(replace: Callable[[Any, Any], Any]) -> Iterator[list[str]]:
    """Inside, ``torch.utils.checkpoint`` calls its function once, and keeps what autograd saves. ``replace(ours,
    theirs)`` is what the process calls meanwhile. Yields a list with an entry for each call. Instead: the module of
    which somebody has removed them."""
    calls: list[str] = []
    reentrant = checkpoints.CheckpointFunction.apply
    other = "_checkpoint_without_reentrant_generator"
    theirs = getattr(checkpoints, other)

    def at_once(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        calls.append("reentrant")
        return function(*args)

    def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
        calls.append("not reentrant")
        yield

    with (
        mock.patch.object(checkpoints.CheckpointFunction, "apply", staticmethod(replace(at_once, reentrant))),
        mock.patch.object(checkpoints, other, replace(nothing, theirs)),
    ):
        yield calls
