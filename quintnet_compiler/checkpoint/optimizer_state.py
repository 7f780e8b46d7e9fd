"""An optimizer's state by the names of parameters: what torch's own state_dict numbers, which another layout counts
differently."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..compat.distributed import dtensor_over
from ..core.empty_storage import is_of_other_ranks
from ..core.errors import CheckpointError, CheckpointWarning
from ..runtime.state.whole_optimizer import WholeOptimizer, set_state
from ..weights.files import shown
from .parts import ParameterPlace, SavedPart, local_of
from .reading.plain_values import require_options
from .reading.state_shapes import SavedState, StateShapes
from .values import decoded, encoded, path_of, plain

Note = Mapping[str, Any]  # JSON


def tensors_and_note(optimizer: Optimizer, places: Mapping[str, ParameterPlace]) -> tuple[dict[str, SavedPart], Note]:
    """Return the tensors of an optimizer's state, as ``parameter/path`` (:mod:`.values`), and everything else.

    Raises:
        CheckpointError: QN603 for parameters or values that a checkpoint cannot hold.
    """
    tensors: dict[str, SavedPart] = {}
    values: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for name, group in _named(optimizer, places, "QN603"):
        place = places[name]
        options[name] = {key: plain(x, f"option {key} of {name}") for key, x in group.items() if key != "params"}

        def put(path: str, key: str, x: Tensor, name: str = name) -> None:
            tensors[f"{name}/{path}"] = _part(x, places[name], f"{key} of {name}", optimizer)

        if state_values := encoded_state(name, optimizer.state.get(place.parameter, {}), put):
            values[name] = state_values
    return tensors, {"class": _kind(optimizer), "options": options, "values": values, "groups": _groups(optimizer)}


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return for each group its options, and whether it has parameters on this rank."""
    notes = []
    for index, group in enumerate(optimizer.param_groups):
        options = {key: plain(x, f"option {key} of group {index}") for key, x in group.items() if key != "params"}
        notes.append({"options": options, "here": any(not is_of_other_ranks(p) for p in group["params"])})
    return notes


def encoded_state(name: str, state: Mapping[Any, Any], put: Callable[[str, str, Tensor], None]) -> dict[str, Any]:
    """Return a parameter's state as JSON, but its tensors: they are passed to ``put``, with their path and their key.

    Raises:
        CheckpointError: QN603 for keys or values that a checkpoint cannot hold.
    """
    values = {}
    for key, x in state.items():
        if not isinstance(key, str):
            text = f"the optimizer's state of {name} has the key {key!r}"
            raise CheckpointError("QN603", text, fix="use texts as keys")

        def give(path: str, x: Tensor, key: str = key) -> None:
            put(path, key, x)

        value = encoded(x, path_of(key), f"{key} of {name}", give)
        if not isinstance(x, Tensor):
            values[key] = value
    return values


def decoded_state(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a parameter's state from what :func:`encoded_state` gave. ``tensors``: by path."""
    state = {key: decoded(x, tensors.__getitem__) for key, x in values.items()}
    return state | {unquote(path): x for path, x in tensors.items() if ":" not in path}


def _part(x: Tensor, place: ParameterPlace, what: str, optimizer: Optimizer) -> SavedPart:
    if isinstance(optimizer, WholeOptimizer):
        return SavedPart.whole(x.detach())
    if tuple(x.shape) == tuple(place.shape):
        return place.part(local_of(x))
    if x.dim() == 0 or tuple(place.parameter.shape) == tuple(local_of(place.parameter).shape):
        return SavedPart.whole(local_of(x))
    raise CheckpointError(
        "QN603",
        f"the optimizer keeps {what} as {tuple(x.shape)}, and the parameter, {tuple(place.shape)}, is split: no other "
        "layout could read it",
        fix="make it with program.optimizer(make), which keeps whole state",
    )


def merged(notes: Sequence[Note]) -> Note:
    """Merge the notes of all ranks, each of its own parameters; equal options are written once.

    ``groups``: which options each group had, if all ranks have as many groups.
    """
    options: list[Any] = []
    of: dict[str, int] = {}
    values: dict[str, Any] = {}

    def number(group_options: Mapping[str, Any]) -> int:
        if group_options not in options:
            options.append(group_options)
        return options.index(group_options)

    for note in notes:
        values |= note["values"]
        for name, group_options in note["options"].items():
            of[name] = number(group_options)
    merged_note = {"class": notes[0]["class"], "options": options, "of": of, "values": values}
    if all("groups" in note for note in notes) and len({len(note["groups"]) for note in notes}) == 1:
        columns = zip(*(note["groups"] for note in notes), strict=True)
        chosen = [next((group for group in column if group["here"]), column[0]) for column in columns]
        merged_note["groups"] = [number(group["options"]) for group in chosen]
    return merged_note


def _saved_options(note: Note, name: str, group: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the options that the checkpoint has for a parameter.

    Raises:
        CheckpointError: QN602 if it has none, or has those of another kind of optimizer.
    """
    if name not in note["of"]:
        raise CheckpointError("QN602", f"the checkpoint's optimizer does not have {name}")
    options: dict[str, Any] = note["options"][note["of"][name]]
    if not note["class"] and options.keys() != group.keys() - {"params"}:
        others = ", ".join(sorted(options.keys() ^ (group.keys() - {"params"})))
        raise CheckpointError("QN602", f"the options of a {kind} are others than the checkpoint's: {shown(others)}")
    return options


def restored(
    optimizer: Optimizer,
    places: Mapping[str, ParameterPlace],
    note: Note,
    saved: Mapping[str, TensorStorageMetadata],
    others: Mapping[int, str] = MappingProxyType({}),
) -> tuple[dict[str, SavedPart], Callable[[], None]]:
    """Return memory to read ``saved`` tensors into, and what then makes them (and all else) the optimizer's state.

    ``others``: names of parameters that other ranks have, by id.

    Raises:
        CheckpointError: QN602 if it is not the state of such an optimizer for these parameters.
    """
    kind = _kind(optimizer)
    if note["class"] not in ("", kind):  # empty: converted from a format that does not say it
        raise CheckpointError(
            "QN602", f"the optimizer is a {kind}, and the checkpoint has that of a {shown(note['class'])}"
        )
    used = {_memory(place.parameter) for place in places.values()}
    load = _OptimizerLoad(optimizer, places, note, saved, used, StateShapes(_inner(optimizer)))
    for name, group in _named(optimizer, places, "QN602"):
        load.plan_parameter(name, group)
    _require_all_wanted(note, places, optimizer)
    load.plan_absent_groups(others)
    return load.targets, load.finish


@dataclass(frozen=True)
class _OptimizerLoad:
    """A load of an optimizer's state: planned first, and set when its tensors have been read.

    Attributes:
        used: addresses of memory that no other tensor may be read into.
        targets: memory for the saved tensors, by their stored names.
        states: of each parameter on this rank, by its name.
        first_names: the first parameter of each group on this rank, by the group's id.
        changes: groups, and the options that they are to have.
        unsaid: indices of groups whose options the checkpoint does not say.
    """

    optimizer: Optimizer
    places: Mapping[str, ParameterPlace]
    note: Note
    saved: Mapping[str, TensorStorageMetadata]
    used: set[int]
    shapes: StateShapes
    targets: dict[str, SavedPart] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    first_names: dict[int, str] = field(default_factory=dict)
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    unsaid: list[int] = field(default_factory=list)

    @cached_property
    def _paths(self) -> Mapping[str, Sequence[str]]:
        """Return the paths of saved tensors, by parameter."""
        paths = defaultdict[str, list[str]](list)
        for name, _, path in (stored_name.rpartition("/") for stored_name in self.saved):
            paths[name].append(path)
        return paths

    def plan_parameter(self, name: str, group: dict[str, Any]) -> None:
        """Compare a parameter's saved state with the optimizer, and plan to set it and its group's options."""
        options = _saved_options(self.note, name, group, _kind(self.optimizer))
        self._plan_options(name, group, options)
        place, paths = self.places[name], self._paths.get(name, ())
        saved_state = SavedState(name, options, _sizes(name, paths, self.saved), place.shape)
        state = self.optimizer.state.get(place.parameter, {})
        self.shapes.require_fitting(saved_state, place.parameter, state)
        if isinstance(self.optimizer, WholeOptimizer) and not self.optimizer.here(place.parameter):
            return
        self.shapes.note_unknown(saved_state, state)
        tensors = {path: self._target(name, path, group) for path in paths}
        self.states[name] = _decoded(name, self.note, tensors)
        self.shapes.require_complete(saved_state, self.states[name].keys())

    def _plan_options(self, name: str, group: dict[str, Any], options: dict[str, Any]) -> None:
        """Plan a group's options, once; those of its other parameters have to be the same."""
        first = self.first_names.setdefault(id(group), name)
        if first == name:
            require_options(_inner(self.optimizer), options, group)
            self.changes.append((group, options))
        elif self.note["options"][self.note["of"][first]] != options:
            raise CheckpointError(
                "QN602",
                f"{first} and {name} are in one group of the optimizer, and had different options when it was saved",
                fix="make the optimizer's groups as they were",
            )

    def _target(self, name: str, path: str, group: Mapping[str, Any]) -> Tensor:
        """Return memory for a tensor of a parameter's state: the optimizer's own, if nothing else is in it."""
        place, optimizer = self.places[name], self.optimizer
        old = optimizer.state.get(place.parameter, {}).get(unquote(path)) if ":" not in path else None
        free = old if isinstance(old, Tensor) and _memory(old) not in self.used else None
        home = optimizer.home(place.parameter) if isinstance(optimizer, WholeOptimizer) else None
        stored_name = f"{name}/{path}"
        tensor, self.targets[stored_name] = _room(place, self.saved[stored_name], group, free, home)
        self.used.add(_memory(tensor))
        return tensor

    def plan_absent_groups(self, others: Mapping[int, str]) -> None:
        """Plan the options of groups that have no parameters on this rank."""
        for index, group in enumerate(self.optimizer.param_groups):
            if id(group) in self.first_names:
                continue
            options = _remote_options(self.optimizer, index, self.note, others)
            if options is None:
                self.unsaid.append(index)
                continue
            require_options(_inner(self.optimizer), options, group)
            self.changes.append((group, options))

    def finish(self) -> None:
        """Give the optimizer its options, and the state that has been read."""
        self.shapes.warn_of_unknown()
        for index in self.unsaid:
            text = f"group {index} of the optimizer has no parameters on this rank, and the checkpoint does not say"
            warnings.warn(CheckpointWarning(f"{text} what options such a group had: it keeps its own"), stacklevel=2)
        if isinstance(self.optimizer, WholeOptimizer):
            self.optimizer.loaded()
        for group, options in self.changes:
            for key, x in options.items():
                _set(group, key, x)
        for name, state in self.states.items():
            if isinstance(self.optimizer, WholeOptimizer):
                self.optimizer.restore(self.places[name].parameter, state)
            else:
                set_state(self.optimizer, self.places[name].parameter, state)


def _require_all_wanted(note: Note, places: Mapping[str, ParameterPlace], optimizer: Optimizer) -> None:
    """Raise QN602 if the saved optimizer trained parameters of this rank that this one does not."""
    here = {name for name, _ in _named(optimizer, places, "QN602")}
    if left := sorted((note["of"].keys() & places.keys()) - here):
        raise CheckpointError(
            "QN602",
            f"the checkpoint's optimizer has {', '.join(left[:10])}, and this one does not",
            fix="make the optimizer of the same parameters, or leave optimizer= out",
        )


def _sizes(name: str, paths: Sequence[str], saved: Mapping[str, TensorStorageMetadata]) -> dict[str, torch.Size]:
    """Return the size of each tensor that is a value of a parameter's state, by its key."""
    return {unquote(path): saved[f"{name}/{path}"].size for path in paths if ":" not in path}


def _remote_options(optimizer: Optimizer, index: int, note: Note, others: Mapping[int, str]) -> dict[str, Any] | None:
    """Return the saved options of a group without parameters on this rank; None if the checkpoint does not say.

    They are those of its parameters on other ranks, else those of the group that was in its place.

    Raises:
        CheckpointError: QN602 if there were more or fewer groups.
    """
    group = optimizer.param_groups[index]
    names = [others[id(p)] for p in group["params"] if id(p) in others]
    number = next((note["of"][name] for name in names if name in note["of"]), None)
    if number is None and "groups" not in note:
        return None
    if number is None and len(note["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            "QN602",
            f"the optimizer has {len(optimizer.param_groups)} groups, and had {len(note['groups'])} when it was saved; "
            f"group {index} has no parameters on this rank, so which one it was is not known",
            fix="make the optimizer's groups as they were",
        )
    options: dict[str, Any] = note["options"][note["groups"][index] if number is None else number]
    return options


def _decoded(name: str, note: Note, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a parameter's state.

    Raises:
        CheckpointError: QN602 if the checkpoint does not have what it says.
    """
    try:
        return decoded_state(note["values"].get(name, {}), tensors)
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        text = f"state.json: optimizer.values.{shown(name)} cannot be read: {type(error).__name__}: {shown(str(error))}"
        raise CheckpointError("QN602", text, fix="load a checkpoint that has not been changed") from None


def _inner(optimizer: Optimizer) -> Optimizer:
    return optimizer.inner if isinstance(optimizer, WholeOptimizer) else optimizer


def _kind(optimizer: Optimizer) -> str:
    return type(_inner(optimizer)).__name__


def _named(
    optimizer: Optimizer, places: Mapping[str, ParameterPlace], code: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    names = {id(place.parameter): name for name, place in places.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if is_of_other_ranks(parameter):  # of another pipeline stage, whose ranks have its state
                continue
            if id(parameter) not in names:
                raise CheckpointError(
                    code,
                    f"the optimizer has a parameter {tuple(parameter.shape)} that is not this program's",
                    fix="make it with program.parameters()",
                )
            yield names[id(parameter)], group


def _room(
    place: ParameterPlace,
    meta: TensorStorageMetadata,
    group: Mapping[str, Any],
    old: Tensor | None,
    home: torch.device | None,
) -> tuple[Tensor, SavedPart]:
    """Return memory to read a tensor into: what the optimizer has, ``old``, where that is alike, as there may be none
    for both. ``home``: the device on which an optimizer of whole parameters has them."""
    parameter, dtype = place.parameter, meta.properties.dtype
    own = local_of(parameter)
    if home is not None or tuple(meta.size) != tuple(place.shape):
        # a count of steps: torch keeps it beside the parameter only where a kernel reads it there
        there = group.get("capturable") or group.get("fused") or meta.size
        x = _like(old, meta.size, dtype, (home or own.device) if there else torch.device("cpu"))
        return x, SavedPart.whole(x)
    if not isinstance(parameter, DTensor):
        x = _like(old, own.shape, dtype, own.device)
        return x, place.part(x)
    spread = parameter.device_mesh, parameter.placements
    alike = isinstance(old, DTensor) and (old.device_mesh, old.placements) == spread
    local = _like(local_of(old) if alike and old is not None else None, own.shape, dtype, own.device)
    tensor = dtensor_over(local, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
    return tensor, place.part(local)


def _like(old: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``old``, if it is such a tensor, else a new one."""
    usable = type(old) is Tensor and old.is_contiguous() and not old.requires_grad
    if old is not None and usable and (old.shape, old.dtype, old.device) == (torch.Size(shape), dtype, device):
        return old
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


def _memory(x: Tensor) -> int:
    return local_of(x).untyped_storage().data_ptr()


def _set(group: dict[str, Any], key: str, x: Any) -> None:
    old = group.get(key)
    if isinstance(old, Tensor):
        old.fill_(x)
    else:
        group[key] = tuple(x) if isinstance(old, tuple) else x
