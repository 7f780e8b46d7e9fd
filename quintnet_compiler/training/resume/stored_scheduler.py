"""Store a scheduler's state with all its types, and compare it with a scheduler before that gets it."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ...checkpoint.reading.plain_values import require_alike
from ...checkpoint.values import from_json, to_json
from ...core.errors import CheckpointError
from ...weights.files import shown
from .stored_checks import unfit

_KEYS = frozenset({"class", "groups", "state"})
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type)


class StoredScheduler:
    """The state of a scheduler in checkpoints.

    Values keep their types. Functions, classes and the optimizer itself are those of the run that resumes, as a file
    has no code. Objects that the state has (other schedulers, a policy of the user's) are stored by their
    ``state_dict``, or by their attributes, and the objects of the run that resumes get these.

    Args:
        scheduler: has ``state_dict`` and ``load_state_dict``.
        optimizer: whose rates it sets.

    Raises:
        CheckpointError: QN603 if its state has something that a checkpoint cannot hold.
    """

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Find functions and objects in the state of a new scheduler."""
        self.scheduler, self.optimizer, self.kind = scheduler, optimizer, _kind(scheduler)
        self._own: dict[str, Any] = {}  # functions and objects of its state, by path
        to_json(self._state(), "the scheduler's state", self._noted)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON.

        Raises:
            CheckpointError: QN603 if it has something that a checkpoint cannot hold.
        """
        state = to_json(self._state(), "the scheduler's state", self._compared)
        return {"class": self.kind, "groups": len(self.optimizer.param_groups), "state": state}

    def require(self, stored: Mapping[str, Any], where: str) -> None:
        """Refuse a state of :meth:`to_json` that the scheduler cannot get.

        Raises:
            CheckpointError: QN602, naming the difference.
        """
        if stored.keys() == _KEYS:
            self._require_same_kind(stored)
        try:
            state = self._read(stored, set_objects=False)
        except CheckpointError:
            raise
        except Exception as error:  # of any library that was given wrong values
            raise unfit(f"{where}: {type(error).__name__}: {shown(str(error))}") from None
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise unfit(f"{where} is no dict of names")
        for name in state.keys() - (own := self._state()).keys():  # it may get attributes later
            if name in vars(self.scheduler) or callable(inspect.getattr_static(self.scheduler, name, None)):
                raise unfit(f"{where}.{shown(name)} is not of the scheduler's state")
        if type(self.scheduler).__module__.startswith("torch.optim."):
            _require_torchs_values(state, own, where)

    def set_state(self, stored: Mapping[str, Any]) -> None:
        """Give the scheduler a state that :meth:`require` accepts."""
        self.scheduler.load_state_dict(self._read(stored, set_objects=True))

    def _state(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = self.scheduler.state_dict()
        except Exception as error:
            raise CheckpointError(
                "QN603",
                f"{type(self.scheduler).__name__}.state_dict() fails: {type(error).__name__}: {error}",
                fix="give it functions, or objects whose attributes can be read",
            ) from error
        return state

    def _read(self, stored: Mapping[str, Any], *, set_objects: bool) -> Any:
        if stored.keys() != _KEYS:
            return dict(stored)  # as earlier versions wrote it
        return from_json(stored["state"], lambda path, note: self._object(path, note, set_objects=set_objects))

    def _require_same_kind(self, stored: Mapping[str, Any]) -> None:
        groups, text, saved = len(self.optimizer.param_groups), "", shown(f"{stored['class']}")
        if stored["class"] != self.kind:
            text = f"the scheduler is a {self.kind}, and the checkpoint has the state of a {saved}"
        elif stored["groups"] != groups:
            text = f"the optimizer has {groups} groups, and had {shown(str(stored['groups']))} when it was saved"
        if text:
            fix = "make the scheduler and the optimizer's groups as they were; or give the Trainer another folder"
            raise CheckpointError("QN602", text, fix=fix)

    # -- functions and objects

    def _noted(self, path: str, x: Any) -> Any:
        """Return JSON for a function or object, and remember it."""
        self._own[path] = x
        return self._note(path, x, self._noted)

    def _compared(self, path: str, x: Any) -> Any:
        """Return JSON for a function or object that the scheduler had at first, too; None for another one."""
        own = self._own.get(path)
        alike = type(own) is type(x) and (own == x or not self._is_reference(x))
        return self._note(path, x, self._compared) if alike else None

    def _note(self, path: str, x: Any, put_other: Any) -> Any:
        if self._is_reference(x):
            return [_name(x)]
        if (state := _state_of(x)) is None:
            return None
        what = f"the scheduler's state: {path.strip(':').replace(':', '.')}"
        return [_name(x), to_json(state, what, lambda inner, part: put_other(f"{path}{inner}", part))]

    def _object(self, path: str, note: Any, *, set_objects: bool) -> Any:
        """Return the scheduler's own function or object, with the attributes that it had if ``set_objects``."""
        own, (name, *content) = self._own.get(path), note
        if own is None or _name(own) != name or bool(content) == self._is_reference(own):
            here = "nothing" if own is None else _name(own)
            key = shown(path.strip(":").replace(":", "."))
            raise unfit(f"the scheduler's state has {shown(str(name))} as {key}, and here is {here}")
        if not content:
            return own
        state = from_json(content[0], lambda inner, part: self._object(f"{path}{inner}", part, set_objects=set_objects))
        if set_objects and _has_state(own):
            own.load_state_dict(state)
        elif set_objects:
            vars(own).update(state)
        return own

    def _is_reference(self, x: Any) -> bool:
        """Return whether only the name of ``x`` is stored."""
        return isinstance(x, _CODE) or x is self.optimizer or x is self.scheduler


def _kind(scheduler: Any) -> str:
    """Return the name of a scheduler's class, with those of the schedulers that it has."""
    inner: list[str] = []
    for value in getattr(scheduler, "__dict__", {}).values():
        parts = value if isinstance(value, list | tuple) else [value]
        inner += [_kind(part) for part in parts if isinstance(part, LRScheduler) and part is not scheduler]
    return type(scheduler).__name__ + (f"({', '.join(inner)})" if inner else "")


def _name(x: Any) -> str:
    """Return the qualified name of a function or class, or of an object's class."""
    while isinstance(x, functools.partial):
        x = x.func
    kind: Any = x if isinstance(x, _CODE) else type(x)
    return f"{kind.__module__}.{kind.__qualname__}"


def _state_of(x: Any) -> Any:
    """Return what an object has to be restored with; None if that is not known."""
    if isinstance(x, torch.optim.Optimizer | nn.Module):
        return None
    if _has_state(x):
        return x.state_dict()
    names = ("__reduce_ex__", "__reduce__", "__new__", "__getstate__")
    plain = all(getattr(type(x), name) is getattr(object, name) for name in names) and hasattr(x, "__dict__")
    slots = any(vars(base).get("__slots__") for base in type(x).__mro__)
    return dict(vars(x)) if type(x) is types.SimpleNamespace or (plain and not slots) else None


def _has_state(x: Any) -> bool:
    return all(callable(getattr(x, name, None)) for name in ("state_dict", "load_state_dict"))


def _require_torchs_values(state: Mapping[str, Any], own: Mapping[str, Any], where: str) -> None:
    """Compare the fields of one of torch's classes with those of a new scheduler.

    None of its lists grows. What is in dicts may be the user's, and has any values.
    """
    kinds = {name: _outline(value, fixed=True) for name, value in own.items()}
    require_alike({name: _outline(value, fixed=False) for name, value in state.items()}, kinds, where)
    for name in ("last_epoch", "_step_count"):
        if state.get(name, 0) < 0:
            raise unfit(f"{where}.{name} is {state[name]}")


def _outline(value: Any, *, fixed: bool) -> Any:
    """Return ``value`` with empty dicts, and lists as tuples if their lengths are ``fixed``."""
    if isinstance(value, Mapping):
        return {}
    if isinstance(value, list | tuple):
        items = [_outline(item, fixed=fixed) for item in value]
        return tuple(items) if fixed else items
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
