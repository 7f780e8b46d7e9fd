"""Writes to the state of random number generators that forward makes, and that a program would not."""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.utils.checkpoint
from torch import Tensor

from ..compat.torch import draws_random_numbers
from ..compat.torch_func import nodes_of_trace
from ..core import replaced
from ..core.code_origin import PACKAGE, TORCH
from ..core.errors import CompileError, Where
from ..core.replaced import for_this_thread

_RECORDERS = (__file__, str(replaced.__file__))
# A second run draws what the first one drew, as in a program; what traces parts of forward restores the state.
_HOUSEKEEPING = (str(torch.utils.checkpoint.__file__), str(Path(TORCH) / "_dynamo" / "utils.py"), PACKAGE)
_OF_CUDA = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")
_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (random, "seed"),
    (random, "setstate"),
    (numpy.random, "seed"),
    (numpy.random, "set_state"),
    *((module, name) for module in (torch.cuda, torch.cuda.random) for name in _OF_CUDA),
)


@dataclass
class GeneratorWrites:
    """The calls in forward that write to the state of a generator of the process.

    Attributes:
        user_frame: returns the innermost frame of a stack that is the user's.
        user_line: returns its line.
        calls: the name and the line of each.
        states: what forward has read, and how many random operators had been traced by then.
    """

    user_frame: Callable[[types.FrameType], types.FrameType | None]
    user_line: Callable[[types.FrameType], str]
    calls: list[tuple[str, str]] = field(default_factory=list)
    states: list[tuple[Tensor, int]] = field(default_factory=list)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the writes of this thread's forward, instead of making them, while inside."""
        generator = self._recorded(torch.default_generator, "torch.default_generator")
        of_cuda = enumerate(torch.cuda.default_generators)
        generators = tuple(self._recorded(each, f"torch.cuda.default_generators[{index}]") for index, each in of_cuda)
        with contextlib.ExitStack() as stack:
            for module, name in _FUNCTIONS:
                theirs = getattr(module, name)
                ours = partial(self.write, f"{module.__name__}.{name}", theirs, _nothing)
                stack.enter_context(mock.patch.object(module, name, for_this_thread(ours, theirs)))
            for module in (torch, torch.random):
                stack.enter_context(mock.patch.object(module, "default_generator", generator))
            stack.enter_context(mock.patch.object(torch.cuda, "default_generators", generators))
            yield

    def refuse_first(self) -> None:
        """Raise CompileError QN110 for the first write, if there is one."""
        if not self.calls:
            return
        call, line = self.calls[0]
        raise CompileError(
            "QN110",
            f"the forward pass calls {call}; a program's random numbers depend on its own seed, the step and their "
            "position alone",
            where=Where("", line),
            fix="draw what must be the same in each step outside, and keep it in a buffer",
        )

    def write(self, name: str, theirs: Callable[..., Any], result: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Record what forward writes, and return ``result()``; make any other write."""
        frames = self._frames_of_call(sys._getframe(1))
        if not frames:
            return theirs(*args, **kwargs)
        if not any(map(self._is_restored, args)):
            self.calls.append((_name_of(frames) or name, self.user_line(frames[-1])))
        return result()

    def read(self, state: Tensor) -> Tensor:
        """Note, and return, a state that forward reads."""
        self.states.append((state, _count_draws()))
        return state

    def _frames_of_call(self, frame: types.FrameType) -> list[types.FrameType]:
        """Return the frames of a call from the innermost to the user's; [] if it is housekeeping that nobody wrote."""
        last = self.user_frame(frame)
        frames: list[types.FrameType] = []
        here: types.FrameType | None = frame
        while here is not None and here is not last:
            if here.f_code.co_filename not in _RECORDERS:
                frames.append(here)
            here = here.f_back
        written = last is not None and not any(x.f_code.co_filename.startswith(_HOUSEKEEPING) for x in frames)
        return [*frames, last] if last is not None and written else []

    def _is_restored(self, state: Any) -> bool:
        """Return whether nothing was drawn since forward read this state, so that writing it changes nothing."""
        return any(state is x and drawn == _count_draws() for x, drawn in self.states)

    def _recorded(self, generator: torch.Generator, label: str) -> torch.Generator:
        recorded = _RecordedGenerator(generator.device)
        results = {"manual_seed": lambda: recorded, "seed": generator.initial_seed}
        for name in ("manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state"):
            theirs = getattr(generator, name)
            ours = partial(self.write, f"{label}.{name}", theirs, results.get(name, _nothing))
            setattr(recorded, name, for_this_thread(ours, theirs))
        read = for_this_thread(lambda: self.read(generator.get_state()), generator.get_state)
        setattr(recorded, "get_state", read)  # noqa: B010
        for name in ("initial_seed", "get_offset", "clone_state", "graphsafe_get_state"):
            setattr(recorded, name, getattr(generator, name))
        return recorded


class _RecordedGenerator(torch.Generator):
    """Stands for a generator of the process, with methods of its own as attributes."""


def _nothing() -> None:
    """Return what calls return that only write."""


def _name_of(frames: list[types.FrameType]) -> str:
    """Return the name of the function that the user's line calls, if it is one of torch."""
    names = [(str(frame.f_globals["__name__"]), frame.f_code.co_name) for frame in frames[:-1]]
    public = [f"{module}.{name}" for module, name in names if module.startswith("torch.") and "._" not in module]
    return public[-1] if public else ""


def _count_draws() -> int:
    return sum(draws_random_numbers(node.target) for node in nodes_of_trace())


def own_generator(where: Where) -> CompileError:
    """Return the error of a draw from a generator that is an object."""
    return CompileError(
        "QN105",
        "the model draws from a generator of its own, whose numbers would differ between layouts",
        where=where,
        fix="generator=None: numbers are a function of the plan's seed, the step and the position",
    )
