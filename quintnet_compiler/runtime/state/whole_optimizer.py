"""An optimizer on whole parameters and gradients, for updates that are not elementwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from ...compat.torch_codegen import SHIPPED
from ...core.errors import RunError
from ..launch.calls import frequent
from .plain_update import Make, plain_updates

Pairs = Sequence[tuple[nn.Parameter, nn.Parameter]]  # the program's parameter, and the optimizer's in its place


class WholeTensors(Protocol):
    """Collects whole parameters on the ranks that own them."""

    @property
    def label(self) -> str:
        """Return the label of collective calls, see :func:`..launch.calls.next_label`."""
        ...

    @property
    def apart(self) -> bool:
        """Return whether ranks are separate processes, each of which owns some whole parameters."""
        ...

    def owner(self, parameter: nn.Parameter) -> int | None:
        """Return the rank where the parameter is whole; None if all ranks are in this process."""
        ...

    def here(self, parameter: nn.Parameter) -> bool:
        """Return whether this process has the parameter whole."""
        ...

    def told(self, text: str) -> tuple[str, ...]:
        """Return the texts of all ranks."""
        ...

    def stand_ins(self, parameters: Sequence[nn.Parameter]) -> dict[int, nn.Parameter]:
        """Return whole parameters with the values of these, by ``id()`` of these.

        Those that another rank owns are one expanded element, on the device where the parameter would be.
        """
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
    """The optimizer that :meth:`quintnet.CompiledProgram.optimizer` returns. ``inner`` is the user's optimizer.

    Options (``param_groups``) are those of ``inner``; a scheduler may change them. The state is saved and loaded with
    the program.
    """

    def __init__(self, parameters: Iterable[Any], make: Make, tensors: WholeTensors) -> None:
        """Make the inner optimizer on whole parameters in place of ``parameters``, which may be groups."""
        listed = list(parameters)
        grouped = bool(listed) and isinstance(listed[0], Mapping)
        groups = [{**g, "params": list(g["params"])} for g in listed] if grouped else [{"params": listed}]
        originals = [p for group in groups for p in group["params"]]
        self._tensors, stand_ins = tensors, tensors.stand_ins(originals)
        for group in groups:
            group["params"] = [stand_ins[id(p)] for p in group["params"]]
        self.inner = make(groups if grouped else groups[0]["params"])
        self._make, self._groups = make, [dict(group) for group in groups] if grouped else None
        self._proven = False
        original = {id(stand_ins[id(p)]): p for p in originals}
        own_params = [[x for x in group["params"] if id(x) in original] for group in self.inner.param_groups]
        self._closed = False
        super().__init__(
            [
                {**group, "params": [original[id(x)] for x in params]}
                for group, params in zip(self.inner.param_groups, own_params, strict=True)
            ],
            self.inner.defaults,
        )
        self._closed = True
        self._pairs = [(original[id(x)], x) for params in own_params for x in params]
        self._set_own_state()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step ``inner`` on whole tensors, and give each rank its parts of the results.

        Raises:
            RunError: QN113 if there is a closure, or if the first update of a parameter is not that of a plain copy.
        """
        if closure is not None:
            _refuse("an optimizer of whole parameters was given a closure, which would run other steps in between")
        self._set_inner_options()
        self._set_inner_state()
        with frequent("optimizer.step", self._tensors.label):
            self._tensors.collect(self._pairs)
            self._step_inner()
            self._tensors.spread([pair for pair in self._pairs if pair[0].grad is not None])
        self._set_own_options()
        self._set_own_state()

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
        drawn = not SHIPPED.equal(state, torch.get_rng_state())
        own_message = (
            _DRAWN if drawn else next((text for update in updates if (text := update.describe_difference())), "")
        )
        message = next((text for text in self._tensors.told(own_message) if text), "")
        if message:
            raise RunError("QN113", message, fix=f"{_FIX}; or train without tp, pp and zero, with the optimizer itself")
        self._proven = True

    def train(self) -> None:
        """Call ``inner.train()``, if there is one (schedule-free optimizers)."""
        self._change_mode("train")

    def eval(self) -> None:
        """Call ``inner.eval()``, if there is one: parameters take the values that ``inner`` evaluates with."""
        self._change_mode("eval")

    @torch.no_grad()
    def _change_mode(self, mode: str) -> None:
        change = getattr(self.inner, mode, None)
        if change is None:
            return
        self._set_inner_options()
        self._set_inner_state()
        with frequent(f"optimizer.{mode}", self._tensors.label):
            self._tensors.fetch(self._pairs)
            change()
            self._tensors.spread(self._pairs)
        self._set_own_options()

    def _set_inner_options(self) -> None:
        """Give ``inner`` the options of groups, which a scheduler may have changed."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: x for key, x in outer.items() if key != "params"})

    def _set_own_options(self) -> None:
        """Take over the options of groups that ``inner`` has changed."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update({key: x for key, x in inner.items() if key != "params"})

    def _set_inner_state(self) -> None:
        """Give ``inner`` the state of each parameter, which a loop may have replaced or removed."""
        for parameter, whole in self._pairs:
            set_state(self.inner, whole, self.state.get(parameter))

    def _set_own_state(self) -> None:
        """Take over the state of each parameter that ``inner`` has."""
        for parameter, whole in self._pairs:
            set_state(self, parameter, self.inner.state.get(whole))

    def restore(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        """Set the state of a parameter that this process has whole; empty: it has none."""
        set_state(self, parameter, state)
        set_state(self.inner, self._whole[id(parameter)], state)

    def loaded(self) -> None:
        """Skip the comparison of the first step after states were restored: a plain copy would not have them."""
        self._proven = True

    def here(self, parameter: nn.Parameter) -> bool:
        """Return whether this process has the whole parameter and its state."""
        return self._tensors.here(parameter)

    def owner(self, parameter: nn.Parameter) -> int | None:
        """Return the rank that has the whole parameter and its state; None if all ranks are in this process."""
        return self._tensors.owner(parameter)

    def home(self, parameter: nn.Parameter) -> torch.device:
        """Return the device of the whole parameter and its state."""
        return self._whole[id(parameter)].device

    @property
    def _whole(self) -> dict[int, nn.Parameter]:
        return {id(parameter): whole for parameter, whole in self._pairs}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._closed:
            _refuse("an optimizer of whole parameters has those that it was made with")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of ``inner``, where all ranks are in this process.

        Raises:
            RunError: QN113 where they are not: each rank has the state of other parameters.
        """
        self._require_one_process()
        self._set_inner_options()
        self._set_inner_state()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the result of :meth:`state_dict` of such an optimizer.

        Raises:
            RunError: QN113, as :meth:`state_dict`.
        """
        self._require_one_process()
        self.inner.load_state_dict(state_dict)
        self._set_own_options()
        self._set_own_state()

    def _require_one_process(self) -> None:
        if self._tensors.apart:
            _refuse("each rank has the state of other whole parameters")


def set_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: dict[str, Any] | None) -> None:
    """Set a parameter's state; without any, an optimizer makes it anew."""
    if state:
        optimizer.state[parameter] = state
    else:
        optimizer.state.pop(parameter, None)


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
