"""The engine of ``backend="graph"``: TorchInductor's segments, and one graph around all of a step."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from ...core.errors import BackendWarning
from ...runtime.execute.engines import Inductor
from ...runtime.execute.executor import Executor, Run
from .captured_step import CapturedStep, CaptureError, StepCapture
from .obstacles import obstacle
from .step_values import DrawnKeys

MAX_SIZES = 16  # of batches, for which a program has graphs


@dataclass(frozen=True)
class WholeStepEngine(Inductor):
    """Runs segments as :class:`Inductor` does, and captures each whole step as one graph.

    Attributes:
        capture: captures the work of a step.
    """

    capture: StepCapture = field(kw_only=True)

    def whole_steps(self, executor: Executor) -> WholeSteps:
        """Return what runs the steps of an executor."""
        return WholeSteps(executor, self)

    def tell_once(self, reason: str) -> None:
        """Warn, once for each reason, that steps run without a graph."""
        if reason not in self.warned:
            self.warned.add(reason)
            text = f"a step cannot be one CUDA graph, and runs in segments, as with inductor: {reason}"
            warnings.warn(BackendWarning(text), stacklevel=2)


@dataclass
class WholeSteps:
    """The steps of one executor: a graph for each size of batch.

    The first step of a size runs in segments, the second warms up, the third is captured, and later ones are replayed.

    Attributes:
        captured: what runs the steps after the first one, by what their graph depends on.
        refused: whether there are no graphs; None while that is unknown.
    """

    executor: Executor
    engine: WholeStepEngine
    captured: dict[Hashable, CapturedStep] = field(default_factory=dict)
    refused: bool | None = None

    def __call__(self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], options: Run) -> list[Tensor]:
        """Run a step, as :meth:`Executor.step` does."""
        if self.refused is None:
            self._decide()
        if self.refused or (options.preemption is not None and options.preemption.asked):
            return self.executor.step(state, inputs, options)
        key = _decided_by(inputs, options)
        captured = self.captured.get(key)
        if captured is None:
            return self._first(key, state, inputs, options)
        try:
            return captured(state, inputs, options)
        except CaptureError as error:
            self._refuse(str(error))
            return self.executor.step(state, inputs, options)

    def _decide(self) -> None:
        reason = obstacle(
            self.executor.program, self.executor.part, self.executor.device, self.engine.capture.device_kind
        )
        self.refused = reason is not None
        if reason is not None:
            self._refuse(reason)
        elif self.executor.gradients is not None:
            self.executor.gradients.stay()

    def _refuse(self, reason: str) -> None:
        self.refused = True
        self.captured.clear()
        self.engine.tell_once(reason)

    def _first(
        self, key: Hashable, state: Mapping[str, Tensor], inputs: Sequence[Tensor], options: Run
    ) -> list[Tensor]:
        """Run the first step of a size, and note which random numbers it draws."""
        if len(self.captured) == MAX_SIZES:
            self.engine.tell_once(f"more than {MAX_SIZES} sizes of batches have a graph already")
            return self.executor.step(state, inputs, options)
        keys = DrawnKeys(options.step * self.executor.batches)
        results = self.executor.step(state, inputs, replace(options, keys=keys))
        self.captured[key] = CapturedStep(self.executor, self.engine.capture, inputs, keys, options)
        return results


def _decided_by(inputs: Sequence[Tensor], options: Run) -> Hashable:
    """Return what a graph depends on, beside the program and the places of its state."""
    layouts = tuple((x.shape, x.stride(), x.dtype) for x in inputs)
    return layouts, options.check_finite, options.preemption is None, options.scale is None
