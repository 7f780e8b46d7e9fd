"""An optimizer that sees whole parameters and gradients, for updates that are no functions of single elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from ...core.errors import RunError
from ..launch.calls import frequent
from .plain_update import Make, plain_updates

Pairs = Sequence[tuple[nn.Parameter, nn.Parameter]]  # the program's, and what the optimizer has in its place


class WholeTensors(Protocol):
    """Where parameters are whole."""

    @property
    def label(self) -> str:
        """See :func:`..launch.calls.next_label`."""
        ...

    @property
    def apart(self) -> bool:
        """Whether ranks are processes, each of which has some parameters whole."""
        ...

    def owner(self, parameter: nn.Parameter) -> int | None:
        """The rank where it is whole; None if all ranks are in this process."""
        ...

    def here(self, parameter: nn.Parameter) -> bool:
        """Return whether this process has it whole."""
        ...

    def told(self, text: str) -> tuple[str, ...]:
        """Every rank's text."""
        ...

    def stand_ins(self, parameters: Sequence[nn.Parameter]) -> dict[int, nn.Parameter]:
        """By id, whole parameters with the values of these; where another rank has them whole, of one element that is
        expanded, on the device where they would be."""
        ...

    def collect(self, pairs: Pairs) -> None:
        """Give the second of each pair the values and the gradient of the first, if that has a gradient."""
        ...

    def fetch(self, pairs: Pairs) -> None:
        """Give the second of each pair the values of the first."""
        ...

    def spread(self, pairs: Pairs) -> None:
        """Give the first of each pair the values of the second."""
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
        self._make, self._groups = make, [dict(group) for group in groups] if grouped else None
        self._proven = False
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
            RunError: QN113 if there is a closure, or if the first update of a parameter is not that of a plain copy.
        """
        if closure is not None:
            _refuse("an optimizer of whole parameters was given a closure, which would run other steps in between")
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: x for key, x in outer.items() if key != "params"})
        with frequent("optimizer.step", self._tensors.label):
            self._tensors.collect(self._pairs)
            self._step_inner()
            self._tensors.spread([pair for pair in self._pairs if pair[0].grad is not None])
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update({key: x for key, x in inner.items() if key != "params"})
        for parameter, whole in self._pairs:
            if whole in self.inner.state:
                self.state[parameter] = self.inner.state[whole]

    def _step_inner(self) -> None:
        """Step ``inner``. The first step is compared with plain copies, where ranks have other parameters.

        Raises:
            RunError: QN113 on every rank, before any rank gets its parts.
        """
        if self._proven or not self._tensors.apart:
            self.inner.step()
            return
        whole = {id(x) for parameter, x in self._pairs if self._tensors.here(parameter)}
        updates = plain_updates(self._make, self._groups, self.inner, lambda p: id(p) in whole)
        state = torch.get_rng_state()
        self.inner.step()
        drawn = not torch.equal(state, torch.get_rng_state())
        trouble = _DRAWN if drawn else next((text for update in updates if (text := update.difference())), "")
        told = next((text for text in self._tensors.told(trouble) if text), "")
        if told:
            raise RunError("QN113", told, fix=f"{_FIX}; or train without tp, pp and zero, with the optimizer itself")
        self._proven = True

    def train(self) -> None:
        """As ``inner.train()``, if it has that (optimizers without a schedule)."""
        self._change_mode("train")

    def eval(self) -> None:
        """As ``inner.eval()``, if it has that: parameters take the values that ``inner`` evaluates with."""
        self._change_mode("eval")

    @torch.no_grad()
    def _change_mode(self, mode: str) -> None:
        change = getattr(self.inner, mode, None)
        if change is None:
            return
        with frequent(f"optimizer.{mode}", self._tensors.label):
            self._tensors.fetch(self._pairs)
            change()
            self._tensors.spread(self._pairs)

    def restore(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        """Take over the state of a parameter that is whole here."""
        self.inner.state[self._whole[id(parameter)]] = self.state[parameter] = state

    def loaded(self) -> None:
        """Every rank calls this when states were restored: a plain copy, to compare with, would not have these."""
        self._proven = True

    def here(self, parameter: nn.Parameter) -> bool:
        """Whether this process has the parameter whole, and its state."""
        return self._tensors.here(parameter)

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

    def state_dict(self) -> dict[str, Any]:
        """As of ``inner``, where all ranks are in this process.

        Raises:
            RunError: QN113 where they are not: each rank has other parameters' state.
        """
        self._require_one_process()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over what :meth:`state_dict` of such an optimizer gave.

        Raises:
            RunError: QN113, as :meth:`state_dict`.
        """
        self._require_one_process()
        self.inner.load_state_dict(state_dict)
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update({key: x for key, x in inner.items() if key != "params"})
        for parameter, whole in self._pairs:
            if whole in self.inner.state:
                self.state[parameter] = self.inner.state[whole]

    def _require_one_process(self) -> None:
        if self._tensors.apart:
            _refuse("each rank has the state of other whole parameters")


_DRAWN = (
    "the optimizer has drawn random numbers: each rank draws them for the parameters that it has whole, so the update "
    "is not that of the unsplit module"
)
_FIX = "an update must be a function of one parameter, its gradient and its state"


def _refuse(message: str) -> NoReturn:
    raise RunError(
        "QN113",
        message,
        fix="step() after program.step(batch); program.save and program.load with optimizer=; another optimizer for "
        "other parameters",
    )
