"""How an executor's steps run: as the executor runs them, or as its engine, which takes whole steps, does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from .executor import Executor, Run


class StepFunction(Protocol):
    """Runs a step, as :meth:`.executor.Executor.step` does."""

    def __call__(self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], options: Run) -> list[Tensor]:
        """Return the results of a step."""
        ...


@runtime_checkable
class EngineOfSteps(Protocol):
    """An engine that runs whole steps in its own way, beside generated functions."""

    def whole_steps(self, executor: Executor) -> StepFunction:
        """Return what runs the steps of an executor."""
        ...


def step_function(executor: Executor) -> StepFunction:
    """Return what runs the steps of an executor, as its engine has it."""
    engine = executor.engine
    return engine.whole_steps(executor) if isinstance(engine, EngineOfSteps) else executor.step
