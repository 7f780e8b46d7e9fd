"""Hooks of a module whose parameters are parts on each rank, and the record of the program that split it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.errors import RunError
from ..state.module_parameters import Slots
from ..state.true_part import StoredPart
from .backend import Backend


class CutWhatIsLoaded:
    """A load_state_dict hook that cuts whole tensors to this rank's parts, and leaves out those of other stages."""

    def __init__(self, cuts: Mapping[str, StoredPart]) -> None:
        self.cuts = cuts

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key, parameter in module._parameters.items():
            if isinstance(parameter, DTensor) and key in self.cuts and prefix + key in state:
                state[prefix + key] = self.cuts[key](state[prefix + key], parameter)
            elif parameter is not None and parameter.is_meta:
                state[prefix + key] = parameter


def leave_out_others(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Drop parameters of other stages from a state dict (a state_dict hook), unless it has ``keep_vars=True``."""
    for key in module._parameters:
        x = state.get(prefix + key)
        if isinstance(x, Tensor) and x.is_meta and not isinstance(x, nn.Parameter):
            del state[prefix + key]


def refuse_call(module: nn.Module, _: Any) -> None:
    """Raise QN113 (a forward pre-hook) unless the module has whole parameters, as a copy and a traced one have."""
    if any(isinstance(p, DTensor) or (p.is_meta and p.numel()) for p in module.parameters()):
        raise RunError(
            "QN113",
            f"the {type(module).__name__} was called, and this rank has parts of its parameters",
            fix="call the program: program(x) for outputs, program.evaluate(batch) for the loss",
        )


@dataclass
class Home:
    """The owner of a module's split parameters, stored with the module, so that its other programs train the same ones.

    Attributes:
        primary: The compiled program that split them.
        backend: Holds them.
        slots: Where modules keep them.
        handles: Of the hooks of the modules.
        closed: Whether the modules have whole parameters again.
    """

    primary: Any
    backend: Backend
    slots: Slots
    handles: list[Any]
    closed: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobody, ()  # a copy of the module is nobody's

    def backend_for(self, slots: Slots) -> Backend:
        """Return the backend with the parameters, for a further program that reads ``slots``.

        Raises:
            RunError: QN113 if these are not the same tensors.
        """
        self.slots.look()
        mine, theirs = self.slots.tensors, slots.tensors
        other = next((name for name in theirs if mine.get(name, theirs[name]) is not theirs[name]), None)
        if other is not None:
            refuse_other(f"{other} of this program is not that of the module's first program")
        for root in slots.modules.values():
            if root.__dict__.get(_HOME) is not self:  # another module with the same parts
                root.__dict__[_HOME] = self
                self.handles.append(root.register_forward_pre_hook(refuse_call))
        return self.backend

    def leave(self, tensors: Mapping[str, Tensor]) -> None:
        """Undo :func:`attach_split_parameters`: modules get these whole parameters."""
        self.closed = True
        for handle in self.handles:
            handle.remove()
        old = self.slots.tensors
        self.slots.replace_tensors({n: nn.Parameter(x, requires_grad=old[n].requires_grad) for n, x in tensors.items()})
        for root in self.slots.modules.values():
            for module in root.modules():
                module.__dict__.pop(_HOME, None)


_HOME = "_quintnet_home"


def _nobody() -> None:
    return None


def home_of(module: nn.Module) -> Home | None:
    """Return the owner of this module's split parameters, or None.

    It is a program of the module, or of another module that shares submodules with it.
    """
    return next((home for part in module.modules() if (home := part.__dict__.get(_HOME)) is not None), None)


def split_parameter(module: nn.Module) -> str | None:
    """Return the name of the first parameter of a module that is a DTensor, if there is one."""
    return next((name for name, x in module.named_parameters() if isinstance(x, DTensor)), None)


def refuse_split(tensors: Mapping[str, Tensor]) -> None:
    """Raise RunError QN113 if a parameter is a DTensor already."""
    split = next((name for name, x in tensors.items() if isinstance(x, DTensor)), None)
    if split is not None:
        raise RunError(
            "QN113",
            f"{split} is a DTensor already, and no program of this module has split it",
            fix="pass the module with plain parameters, before fully_shard or parallelize_module",
        )


def attach_split_parameters(slots: Slots, primary: Any, backend: Backend) -> None:
    """Give modules the hooks of split parameters, and record the program that split them."""
    cuts = backend.cuts()
    if not cuts:
        return
    home = Home(primary, backend, slots, [])
    by_owner: dict[int, dict[str, StoredPart]] = {}
    for name, owner, key in slots.entries():
        if name in cuts:
            by_owner.setdefault(id(owner), {})[key] = cuts[name]
    for root in slots.modules.values():
        home.handles.append(root.register_forward_pre_hook(refuse_call))
        for module in root.modules():
            if module._parameters:
                hook = CutWhatIsLoaded(by_owner.get(id(module._parameters), {}))
                home.handles += [
                    module.register_load_state_dict_pre_hook(hook),  # type: ignore[no-untyped-call]
                    module.register_state_dict_post_hook(leave_out_others),  # type: ignore[no-untyped-call]
                ]
                module.__dict__[_HOME] = home
        root.__dict__[_HOME] = home


_CLOSE = "call close() of the program that split the module first, or compile a copy that was made before"


def refuse_other(message: str, fix: str = _CLOSE) -> NoReturn:
    """Raise RunError QN113 for a second program of a module that cannot share the first one's parameters."""
    raise RunError("QN113", message, fix=fix)
