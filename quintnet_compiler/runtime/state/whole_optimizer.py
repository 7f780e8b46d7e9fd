"""An optimizer that sees whole parameters and gradients, for updates that are no functions of single elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from ...core.errors import RunError
from ..launch.calls import frequent

Make = Callable[[Any], torch.optim.Optimizer]
Pairs = Sequence[tuple[nn.Parameter, nn.Parameter]]  # the program's, and what the optimizer has in its place


class WholeTensors(Protocol):
    """Where parameters are whole."""

    @property
    def label(self) -> str:
        """See :func:`..launch.calls.next_label`."""
        ...

    def owner(self, parameter: nn.Parameter) -> int | None:
        """The rank where it is whole; None if all ranks are in this process."""
        ...

    def stand_ins(self, parameters: Sequence[nn.Parameter]) -> dict[int, nn.Parameter]:
        """By id, whole parameters with the values of these; without memory where another rank has them whole."""
        ...

    def collect(self, pairs: Pairs) -> None:
        """Give the second of each pair the values and the gradient of the first."""
        ...

    def spread(self, pairs: Pairs) -> None:
        """Give the first of each pair that has a gradient the values of the second."""
        ...


class WholeOptimizer(torch.optim.Optimizer):
    """What :meth:`quintnet.CompiledProgram.optimizer` returns. ``inner`` is the optimizer that was made.

    Options (``param_groups``) are those of ``inner``: a scheduler may change them. Its state is saved and loaded with
    the program's.
    """

    def __init__(self, parameters: Iterable[Any], make: Make, tensors: WholeTensors) -> None:
        given = list(parameters)
        grouped = bool(given) and isinstance(given[0], Mapping)
        groups = [{**g, "params": list(g["params"])} for g in given] if grouped else [{"params": given}]
        own = [p for group in groups for p in group["params"]]
        self._tensors, made = tensors, tensors.stand_ins(own)
        for group in groups:
            group["params"] = [made[id(p)] for p in group["params"]]
        self.inner = make(groups if grouped else groups[0]["params"])
        of = {id(made[id(p)]): p for p in own}
        known = [[x for x in group["params"] if id(x) in of] for group in self.inner.param_groups]
        self._closed = False
        super().__init__(
            [
                {**group, "params": [of[id(x)] for x in params]}
                for group, params in zip(self.inner.param_groups, known, strict=True)
            ],
            self.inner.defaults,
        )
        self._closed = True
        self._pairs = [(of[id(x)], x) for params in known for x in params]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of ``inner`` on whole tensors; each rank then has its parts of the results.

        Raises:
            RunError: QN113 if there is a closure.
        """
        if closure is not None:
            _refuse("an optimizer of whole parameters was given a closure, which would run other steps in between")
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: x for key, x in outer.items() if key != "params"})
        with frequent("optimizer.step", self._tensors.label):
            self._tensors.collect(self._pairs)
            self.inner.step()
            self._tensors.spread(self._pairs)
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update({key: x for key, x in inner.items() if key != "params"})
        for parameter, whole in self._pairs:
            if whole in self.inner.state:
                self.state[parameter] = self.inner.state[whole]

    def restore(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        """Take over the state of a parameter that is whole here."""
        self.inner.state[self._whole[id(parameter)]] = self.state[parameter] = state

    def here(self, parameter: nn.Parameter) -> bool:
        """Whether this process has the parameter whole, and its state."""
        return not self._whole[id(parameter)].is_meta

    def owner(self, parameter: nn.Parameter) -> int | None:
        """The rank that has the parameter whole, and its state; None if all ranks are in this process."""
        return self._tensors.owner(parameter)

    def home(self, parameter: nn.Parameter) -> torch.device:
        """Where the optimizer has the parameter, and its state."""
        return self._whole[id(parameter)].device

    @property
    def _whole(self) -> dict[int, nn.Parameter]:
        return {id(parameter): whole for parameter, whole in self._pairs}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._closed:
            _refuse("an optimizer of whole parameters has those that it was made with")
        super().add_param_group(param_group)

    def state_dict(self) -> NoReturn:
        """Raises: RunError QN113; each rank has other parameters' state."""
        _refuse("each rank has the state of other whole parameters")

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Raises: RunError QN113, as :meth:`state_dict`."""
        _refuse("each rank has the state of other whole parameters")


def _refuse(message: str) -> NoReturn:
    raise RunError(
        "QN113",
        message,
        fix="step() after program.step(batch); program.save and program.load with optimizer=; another optimizer for "
        "other parameters",
    )
