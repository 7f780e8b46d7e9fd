"""Random generators of a loader: those of this process, and those that it holds itself."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
States = Mapping[str, Any]

MAX_DEPTH = 8  # of objects between a loader and a generator that it holds
MAX_ITEMS = 64  # longer lists and dicts are searched only if they begin with an object,
MAX_PARTS = 1_000  # and have at most so many
MAX_OBJECTS = 10_000  # of a search
_PLAIN = (Tensor, nn.Module, np.ndarray, types.ModuleType, str, bytes, int, float, complex, bool, type(None), type)
_RUNNING = frozenset({"_iterator"})  # of DataLoader: the iteration that goes on


class RandomStates:
    """The generators that a loader may draw from.

    Args:
        loader: searched for generators in samplers, datasets, transforms and closures of functions.
    """

    def __init__(self, loader: object) -> None:
        self.own = {path: x for path, x in reachable(loader) if isinstance(x, Generator)}

    def now(self) -> dict[str, Any]:
        """Return copies of all states."""
        states: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "random": random.getstate(),
            "numpy": np.random.get_state(),
            "own": {path: _state(generator) for path, generator in self.own.items()},
        }
        if (device := _device_in_use()) is not None:
            states["device"] = device.get_rng_state()
        return states

    def restore(self, states: States) -> None:
        """Set every generator that is here to its state."""
        torch.set_rng_state(states["torch"])
        random.setstate(states["random"])
        np.random.set_state(states["numpy"])
        for path in states["own"].keys() & self.own.keys():
            _set_state(self.own[path], states["own"][path])
        device = _device_in_use()
        if "device" in states and device is not None:
            device.set_rng_state(states["device"])


def _device_in_use() -> Any:
    """Return torch's module of this process's accelerator, if its generator was used."""
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    used = getattr(module, "is_initialized", None)
    return module if used is not None and used() and hasattr(module, "get_rng_state") else None


def _state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def reachable(root: object) -> Iterator[tuple[str, object]]:
    """Yield each object that can be reached from ``root``, with the first path to it; not what generators hold."""
    seen: set[int] = set()
    waiting: list[tuple[str, object, int]] = [("", root, 0)]
    while waiting and len(seen) < MAX_OBJECTS:
        path, x, depth = waiting.pop(0)
        if id(x) in seen or isinstance(x, _PLAIN) or depth > MAX_DEPTH:
            continue
        seen.add(id(x))
        if isinstance(x, random.SystemRandom):
            continue
        yield path, x
        if isinstance(x, Generator):
            continue
        waiting += [(f"{path}.{name}", part, depth + 1) for name, part in _parts(x) if name not in _RUNNING]


def _parts(x: object) -> list[tuple[str, object]]:
    """Return the objects that an object holds, by name."""
    parts: list[tuple[str, object]] = []
    if isinstance(x, (list, tuple, set, frozenset)):
        return [(str(i), item) for i, item in enumerate(x)] if _has_objects(x) else []
    if isinstance(x, Mapping):
        return [(str(key), item) for key, item in x.items()] if _has_objects(x.values()) else []
    if isinstance(x, functools.partial):
        return [("func", x.func), ("args", x.args), ("keywords", x.keywords)]
    for name in ("__self__", "__func__", "__defaults__", "__kwdefaults__", "__wrapped__"):
        if (part := getattr(x, name, None)) is not None:
            parts.append((name, part))
    for i, cell in enumerate(getattr(x, "__closure__", None) or ()):
        try:
            parts.append((f"cell{i}", cell.cell_contents))
        except ValueError:  # an empty cell
            continue
    own = getattr(x, "__dict__", None)
    parts += [(name, part) for name, part in own.items() if type(name) is str] if isinstance(own, dict) else []
    for name in _slots(type(x)):
        if (part := getattr(x, name, None)) is not None:
            parts.append((name, part))
    return parts


def _has_objects(items: Collection[object]) -> bool:
    plain = (*_PLAIN, list, tuple, dict)
    return len(items) <= MAX_ITEMS or (len(items) <= MAX_PARTS and not isinstance(next(iter(items)), plain))


def _slots(kind: type) -> list[str]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]
