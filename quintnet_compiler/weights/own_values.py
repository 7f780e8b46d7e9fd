"""Initial values by a module's own code: its reset functions, or the function that builds it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.torch import resets_itself
from ..compat.transformers import initialize_again
from ..core.errors import CompileError
from .names import is_hugging_face
from .recording import Recording
from .tape import MemoryPlace, refuse_initialisation

_FIX = (
    "program.initialize(build), where build() makes the module, or values by name: "
    "program.initialize({name: f}) with f(tensor)"
)


@dataclass(frozen=True)
class OwnValues:
    """Values that can be computed tensor by tensor. ``places``: of each name. ``changed``: names that the code gives
    values to; the others are known only if they had some."""

    recording: Recording
    places: Mapping[str, MemoryPlace]
    changed: frozenset[str]

    def require(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], wanted: Iterable[str]) -> None:
        """Require a value of each of these tensors, of this shape and dtype.

        Raises:
            CompileError: QN604 with each that has none, or another shape or dtype.
        """
        problems = []
        places = {name: self.places[name] for name in wanted if name in self.places}
        unknown = self.recording.tape.unknown(place.memory for place in places.values())
        for name in sorted(wanted):
            shape, dtype = shapes[name]
            if name not in places or places[name].memory in unknown:
                problems.append(f"nothing gives values to {name}")
            elif (places[name].size, places[name].dtype) != (shape, dtype):
                has = f"{places[name].size} {places[name].dtype}"
                problems.append(f"{name} is {has} there, and {shape} {dtype} in the program")
        if unknown - {place.memory for place in places.values()}:
            problems.append("values are computed from memory to which nothing was written")
        if problems:
            more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise CompileError("QN604", "\n  ".join(problems[:8]) + more, fix=_FIX)

    def values(self, wanted: Iterable[str], seed: int) -> Iterator[tuple[str, Tensor]]:
        """These tensors, one at a time, whole and on the CPU."""
        return self.recording.tape.values({name: self.places[name] for name in wanted}, seed)


def values_of_reset(modules: Mapping[str, nn.Module]) -> OwnValues:
    """Return what the modules' own reset functions give to their parameters and buffers.

    These are ``init_weights`` of a Hugging Face model, else ``reset_parameters`` of each module, its children's first,
    as ``module.apply`` calls it.

    Args:
        modules: by the prefix of their tensors' names.

    Raises:
        CompileError: QN604 if the functions cannot be followed.
    """
    memo: dict[int, Any] = {}
    for module in modules.values():
        for x in (*module.parameters(), *module.buffers()):
            memo[id(x)] = _blank(x)
    try:
        copies = {prefix: copy.deepcopy(module, memo) for prefix, module in modules.items()}
    except (TypeError, RuntimeError) as error:
        refuse_initialisation(f"the module cannot be copied, to see what its reset functions do: {error}", _FIX)
    recording = Recording()
    with recording.on():
        for module in copies.values():
            _reset(module)
    return _found(recording, copies)


def values_of_build(build: Callable[[], nn.Module]) -> OwnValues:
    """Return what the function that builds a module gives to its tensors, also to those that are no parameters.

    Raises:
        CompileError: QN604 if it cannot be followed.
    """
    recording = Recording()
    with recording.on():
        module = build()
    if not isinstance(module, nn.Module):
        refuse_initialisation(f"build() gave a {type(module).__name__}", "give a function that returns the module")
    return _found(recording, {"": module})


def _blank(x: Tensor) -> Tensor:
    empty = torch.empty(x.shape, dtype=x.dtype, device="meta")
    if not isinstance(x, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=x.requires_grad)
    vars(parameter).update(vars(x))
    return parameter


def _reset(module: nn.Module) -> None:
    if is_hugging_face(module):
        initialize_again(module)
        return
    for child in module.children():
        _reset(child)
    reset = resets_itself(module)
    if reset is not None:
        reset()


def _found(recording: Recording, modules: Mapping[str, nn.Module]) -> OwnValues:
    tensors: dict[str, Tensor] = {}
    for prefix, root in modules.items():
        for path, module in root.named_modules(remove_duplicate=False):
            for key, x in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
                if isinstance(x, Tensor):
                    tensors[".".join(filter(None, (prefix, path, key)))] = x
    places = {name: recording.place(x) for name, x in tensors.items()}
    written = {memory for call in recording.tape.calls for memory in call.made | call.writes}
    return OwnValues(recording, places, frozenset(n for n, place in places.items() if place.memory in written))
