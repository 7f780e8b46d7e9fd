"""The steps of one program on batches of one size: warmed up, captured and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ...compat.torch import foreach_copy_
from ...runtime.execute.cuda_graphs.graph_segment import unexpanded
from ...runtime.execute.executor import Executor, Run
from ...runtime.launch.preemption import Preemption
from .step_values import DrawnKeys, StepValues

T = TypeVar("T")


class StepCapture(Protocol):
    """Captures work of a device as a graph, for example :class:`.cuda_capture.CudaStepCapture`."""

    @property
    def device_kind(self) -> str:
        """Return the type of device that runs the work."""
        ...

    def warm_up(self, work: Callable[[], T]) -> T:
        """Run work where it will be captured, and return its result."""
        ...

    def capture_step(self, work: Callable[[], object]) -> Callable[[], None]:
        """Return what repeats ``work`` on the same memory. The work itself has no effect on the device."""
        ...


class CaptureError(Exception):
    """A step could not be captured: the reason is its text."""


class CapturedStep:
    """The steps of an executor on batches of one size, after the first one.

    Attributes:
        values: what changes from step to step beside the batch and the state.
        inputs: the places that batches are copied to.
        copied: the places that state is copied to which does not stay at one address.
        warm: whether a step has run where steps are captured.
        seen: the state of the last step; ``addresses``: where it was.
        replay: repeats the captured step; None before the capture.
        results: what each replay writes; ``verdict``: likewise, see :meth:`Executor.conclude`.
    """

    def __init__(
        self, executor: Executor, capture: StepCapture, inputs: Sequence[Tensor], keys: DrawnKeys, options: Run
    ) -> None:
        """Allocate the places of batches like ``inputs``, and of the values that change from step to step."""
        self.executor, self.capture = executor, capture
        self.values = StepValues(keys, executor.device, scaled=options.scale is not None)
        self.inputs = list(map(_place_for, inputs))
        self.copied: dict[str, Tensor] = {}
        self.warm = False
        self.seen: list[Tensor] = []
        self.addresses: list[int] = []
        self.replay: Callable[[], None] | None = None
        self.results: list[Tensor] = []
        self.verdict: Tensor | None = None

    def __call__(self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], options: Run) -> list[Tensor]:
        """Run a step, as :meth:`Executor.step` does.

        Raises:
            CaptureError: if it cannot be captured; nothing was computed.
        """
        self.values.set(options, options.step * self.executor.batches)
        if not self.warm:
            return self._warm_up(state, inputs, options)
        if self._moved(state):
            self.replay = None
        self._copy_in(state, inputs)
        if self.replay is None:
            self._capture(state, options)
        assert self.replay is not None
        self.replay()
        self.executor.conclude(options, self.verdict)
        # users keep outputs, and the next replay overwrites them; new values of the module's state are copied anyway
        outputs = self.executor.program.last.start
        return [*(x.clone() for x in self.results[:outputs]), *self.results[outputs:]]

    def _warm_up(self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], options: Run) -> list[Tensor]:
        self._copy_in(state, inputs)
        self._remember(state)
        results, verdict = self.capture.warm_up(lambda: self._compute(state, options))
        self.executor.conclude(options, verdict)
        self.warm = True
        return results

    def _compute(self, state: Mapping[str, Tensor], options: Run) -> tuple[list[Tensor], Tensor | None]:
        preemption = None if options.preemption is None else Preemption()  # by which nobody is asked
        options = replace(options, keys=self.values.drawn_key, scale=self.values.scale, preemption=preemption)
        return self.executor.compute({**state, **self.copied}, self.inputs, options)

    def _capture(self, state: Mapping[str, Tensor], options: Run) -> None:
        def run_captured() -> None:
            self.results, self.verdict = self._compute(state, options)

        self.results, self.verdict = [], None
        try:
            self.replay = self.capture.capture_step(run_captured)
        except Exception as error:  # of many types: memory, or what CUDA does not permit in a capture
            reason = (str(error).strip().splitlines() or [""])[0][:300]
            raise CaptureError(f"{type(error).__name__}: {reason}") from error

    def _copy_in(self, state: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> None:
        """Copy the batch, and state that moves, to the places that the graph reads."""
        places = [*self.inputs, *self.copied.values()]
        if places:
            sources = [*inputs, *(state[name] for name in self.copied)]
            foreach_copy_(list(map(unexpanded, places)), list(map(unexpanded, sources)))

    def _remember(self, state: Mapping[str, Tensor]) -> None:
        self.seen = list(state.values())
        self.addresses = [x.data_ptr() for x in self.seen]

    def _moved(self, state: Mapping[str, Tensor]) -> bool:
        """Return whether state lies elsewhere than before; what does is copied from now on."""
        seen, addresses, present = self.seen, self.addresses, list(state.values())
        self._remember(state)
        if addresses == self.addresses and all(map(is_, seen, present)):
            return False
        layouts = [(address, x.stride()) for address, x in zip(addresses, seen, strict=True)]
        moved = {
            name: _place_for(x)
            for (name, x), layout in zip(state.items(), layouts, strict=True)
            if (x.data_ptr(), x.stride()) != layout and name not in self.copied
        }
        self.copied |= moved
        return bool(moved)


def _place_for(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
