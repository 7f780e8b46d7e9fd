"""Which keys of a folder of torch.distributed.checkpoint are the model's and which the optimizer's.

``{"model": ..., "optimizer": ...}`` becomes ``model.0.weight`` and ``optimizer.state.0.weight.exp_avg``; within another
object's state, ``app.model.0.weight``; torchtitan has the model's names at the top.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ...core.errors import CheckpointError
from ...weights.files import shown
from .contents import OptimizerContents
from .dcp_metadata import Paths

STATE, GROUPS = "state.", "param_groups."
STEP = "train_state.step"  # torchtitan's, as what is below, too
BESIDE = ("train_state.", "lr_scheduler.", "dataloader.", "optimizer.", "rng_state")  # the last two: Megatron-core's


@dataclass(frozen=True)
class DcpKeys:
    """The prefixes of the model's and of the optimizer's keys (None: there is no optimizer), and these keys."""

    model: str
    optimizer: str | None
    model_keys: frozenset[str]
    optimizer_keys: frozenset[str]

    @property
    def keys(self) -> frozenset[str]:
        return self.model_keys | self.optimizer_keys


def layout_of(items: Mapping[str, Any], model_key: str | None, own: str) -> DcpKeys:
    """See :class:`DcpKeys`. ``own``: a key that is neither's.

    Raises:
        CheckpointError: QN602 if there are several optimizers, or no key is the model's.
    """
    optimizer = _optimizer_prefix(items)
    theirs = frozenset() if optimizer is None else _beginning(items, optimizer + STATE, optimizer + GROUPS)
    tensors = [key for key, x in items.items() if isinstance(x, TensorStorageMetadata)]
    rest = [key for key in tensors if key not in theirs and key != own and not key.startswith(BESIDE)]
    begin = f"{optimizer}{STATE}"
    stated = [key.removeprefix(begin) for key in theirs if key.startswith(begin)]
    model = _model_prefix(rest, stated, model_key, own in items)
    mine = frozenset(key for key in rest if key.startswith(model))
    if not mine:
        raise CheckpointError(
            "QN602",
            f"no tensor is under the model's key {shown(model)!r}; keys: {', '.join(map(shown, sorted(items)[:5]))}",
            fix="give the key that the model had in the state dict that was saved: --model-key KEY",
        )
    return DcpKeys(model, optimizer, mine, theirs)


def _optimizer_prefix(keys: Iterable[str]) -> str | None:
    """Return what the optimizer's keys begin with; None if there is no optimizer.

    Raises:
        CheckpointError: QN602 if there are several.
    """
    prefixes = sorted({key[: key.index(GROUPS)] for key in keys if f".{GROUPS}" in f".{key}"})
    if len(prefixes) > 1:
        listed = ", ".join(shown(prefix.rstrip(".")) for prefix in prefixes)
        message = f"there are several optimizers: {listed}"
        raise CheckpointError("QN602", message, fix="save them to folders of their own")
    return prefixes[0] if prefixes else None


def _model_prefix(keys: Collection[str], stated: Collection[str], model_key: str | None, is_own: bool) -> str:
    """Return what the model's keys begin with: as the user says, as this package writes it, or else as they show."""
    if model_key is not None:
        return f"{model_key}." if model_key else ""
    return "model." if is_own else _prefix(keys, stated)


def _beginning(keys: Iterable[str], *prefixes: str) -> frozenset[str]:
    return frozenset(key for key in keys if key.startswith(prefixes))


def _prefix(keys: Collection[str], stated: Collection[str]) -> str:
    """Return the prefix of the model's keys. ``stated``: a parameter's name, a dot, what the optimizer keeps of it."""
    usual = [prefix for prefix in ("app.model.", "model.", "") if any(key.startswith(prefix) for key in keys)]
    if not stated:
        return next((prefix for prefix in usual if all(key.startswith(prefix) for key in keys)), "")
    for prefix in reversed(usual):
        names = {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}
        if all(_name_in(names, text) is not None for text in stated):
            return prefix
    return usual[0] if usual else ""


def _name_in(names: Collection[str], text: str) -> str | None:
    """Return the longest of ``names`` that ``text`` begins with, and then has a dot."""
    at = len(text)
    while (at := text.rfind(".", 0, at)) > 0:
        if text[:at] in names:
            return text[:at]
    return None


def optimizer_of(
    layout: DcpKeys, values: Mapping[str, Any], names: Collection[str], paths: Paths, kind: str
) -> OptimizerContents | None:
    """Return the optimizer's state and options by parameter.

    Raises:
        CheckpointError: QN602 for state of what is no parameter, as where an optimizer's own ``state_dict`` was saved,
            which numbers parameters.
    """
    if layout.optimizer is None:
        return None
    state: dict[str, dict[Any, Any]] = {}
    flat: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key in sorted(layout.optimizer_keys):
        rest, value = key.removeprefix(layout.optimizer), values[key]
        if rest.startswith(STATE):
            name = _required(names, rest.removeprefix(STATE))
            _put(state.setdefault(name, {}), _inner(rest[len(STATE) + len(name) + 1 :], paths.get(key, ())), value)
            continue
        rest = rest.removeprefix(GROUPS)
        parameter = _name_in(names, rest)
        number, _, option = rest.partition(".")
        if parameter is not None:
            flat.setdefault(parameter, {})[rest[len(parameter) + 1 :]] = value
        elif number.isdecimal():
            groups.setdefault(number, {})[option] = value
        else:
            _required(names, rest)
    options = {}
    for group in groups.values():
        for name in group.pop("params", ()):
            options[_required(names, f"{name}.")] = group
    listed = {name: {key: _listed(x) for key, x in kept.items()} for name, kept in state.items()}
    return OptimizerContents(kind, listed, {**options, **flat})


def _required(names: Collection[str], text: str) -> str:
    name = _name_in(names, text)
    if name is None:
        raise CheckpointError(
            "QN602",
            f"the optimizer has {shown(text.rstrip('.'))}, which belongs to no parameter of the checkpoint",
            fix="save get_optimizer_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict, which has "
            "names where optimizer.state_dict() has numbers; or say where the model is: --model-key KEY",
        )
    return name


def _inner(rest: str, path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return the keys of a value within a parameter's state: as the file says, else those between dots."""
    for at in range(len(path)):
        if ".".join(map(str, path[at:])) == rest:
            return path[at:]
    return tuple(rest.split("."))


def _put(into: dict[Any, Any], keys: tuple[str | int, ...], value: Any) -> None:
    for key in keys[:-1]:
        into = into.setdefault(key, {})
    into[keys[-1]] = value


def _listed(x: Any) -> Any:
    """Return ``x`` with nested dicts of the keys 0, 1, ... turned into lists."""
    if not isinstance(x, dict):
        return x
    items = {key: _listed(item) for key, item in x.items()}
    numbers = list(range(len(items)))
    return [items[i] for i in numbers] if items and sorted(items, key=str) == sorted(numbers, key=str) else items
