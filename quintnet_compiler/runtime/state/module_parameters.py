"""A module's own parameters as the program's parameters: where modules keep them, and their additional methods."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from operator import getitem, is_, methodcaller
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...compat.distributed import local_tensor
from ...compat.torch import plain_function, same_implementation, without_torch_function
from ...compat.torch_codegen import SHIPPED
from ...core.errors import RunError
from ...ir.distributed_program import StateSpec
from ..transport.host_copies import PLAIN, host_room

_RECOMPILE = "compile the changed module"
_ADDRESS = methodcaller("data_ptr")
_MAKES_PARAMETERS = nn.Parameter.__new__.__code__
_DICTS = types.MappingProxyType({"parameter": "_parameters", "buffer": "_buffers"})  # where modules keep these


class WholeTensor(Tensor):
    """A whole tensor with the methods of DTensors, so that code is the same on every layout.

    Gradients and the tensors of a state dict are such.
    """

    __torch_function__ = plain_function

    def full_tensor(self) -> Tensor:
        """Return the tensor, which is whole."""
        return self.view_as(self)

    def to_local(self) -> Tensor:
        """Return this process's part: the whole tensor."""
        return self.view_as(self)

    def detach(self) -> Tensor:
        return super().detach().as_subclass(WholeTensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()


class WholeParameter(nn.Parameter):
    """A parameter with the methods of :class:`WholeTensor`; all ranks are in this process."""

    __torch_function__ = plain_function
    full_tensor = WholeTensor.full_tensor
    to_local = WholeTensor.to_local

    def detach(self) -> Tensor:
        """Return a tensor; a parameter for ``nn.Parameter(x)``, which asks for one of the type of ``x``."""
        kind = WholeParameter if sys._getframe(1).f_code is _MAKES_PARAMETERS else WholeTensor
        return super().detach().as_subclass(kind)


class ReplacedParameter(nn.Parameter):
    """A parameter that was replaced in the module. An optimizer that still has it would train nothing, so it has no
    gradient.

    Raises:
        RunError: QN113 by ``grad``.
    """

    __torch_function__ = plain_function

    @property
    def grad(self) -> NoReturn:  # type: ignore[override]
        raise RunError(
            "QN113",
            "a parameter was asked for its gradient that the module does not have any more: compile made it a part "
            "of this rank",
            fix="make the optimizer after quintnet.compile(model, mesh, batch): AdamW(model.parameters())",
        )


def whole_parameter(x: Tensor, device: torch.device, *, trainable: bool, host: bool = False) -> nn.Parameter:
    """Return ``x`` as a parameter on ``device``, or with ``host`` in memory of its host.

    A parameter is moved and returned itself; for another tensor, a new parameter shares its memory. One on the meta
    device is replaced by a new one with uninitialized memory.
    """
    parameter = x if isinstance(x, nn.Parameter) else nn.Parameter(x.detach(), requires_grad=trainable)
    if parameter.is_meta:
        if host:
            memory = host_room(parameter.shape, parameter.dtype, device)
        else:
            memory = SHIPPED.empty_like(parameter, device=device)
        parameter = nn.Parameter(memory, requires_grad=parameter.requires_grad)
    else:
        parameter = cast(nn.Parameter, pinned(parameter, device) if host else move_tensor(parameter, device))
    if type(parameter) is nn.Parameter:
        parameter.__class__ = WholeParameter
    return parameter


def move_tensor(x: Tensor, device: torch.device) -> Tensor:
    """Move a module's own tensor to another device.

    It stays the same object where PyTorch supports that, so that references to it (of an optimizer, for example) stay
    valid; elsewhere it becomes a new one, as with ``nn.Module.to``.
    """
    return x if x.device == device else _with_memory(x, x.data.to(device))


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """Move a module's own tensor, as :func:`move_tensor` does, to host memory from which ``device`` copies."""
    if x.device.type == "cpu" and (device.type in PLAIN or x.is_pinned()):
        return x
    return _with_memory(x, SHIPPED.empty_like(x, device="cpu", pin_memory=device.type not in PLAIN).copy_(x.data))


def _with_memory(x: Tensor, memory: Tensor) -> Tensor:
    """Return ``x`` itself with other ``memory``, or a new tensor where PyTorch cannot do that."""
    memory = memory.detach()
    if same_implementation(x, memory):
        x.data = memory
        return x
    return nn.Parameter(memory, x.requires_grad) if isinstance(x, nn.Parameter) else memory


def local_of(x: Tensor) -> Tensor:
    """Return this process's part of a parameter or a gradient."""
    return local_tensor(x) if isinstance(x, DTensor) else x


def has_values(x: Tensor) -> bool:
    """Return whether all of a tensor is in this process."""
    return not x.is_meta and not isinstance(x, DTensor)


def like(x: Tensor, kind: type[Tensor]) -> Tensor:
    """Return ``x`` as an instance of ``kind``; a DTensor unchanged."""
    return x if isinstance(x, (kind, DTensor)) else x.as_subclass(kind)


class Slots:
    """The slots of modules that hold a program's tensors, and the tensors that :meth:`look` saw last.

    ``same`` takes 20 microseconds for 150 tensors, because it has no Python loop.
    """

    def __init__(self, modules: Mapping[str, nn.Module], state: Mapping[str, StateSpec]) -> None:
        """Look for the tensors of ``state`` in ``modules``, which have the prefixes of their names as keys."""
        self.modules = modules
        self.names: list[str] = []
        self._homes: list[tuple[nn.Module, str]] = []  # of each slot: the module, and which of its dicts
        self._owners: list[dict[str, Tensor]] = []  # these dicts
        self._keys: list[str] = []
        self._add_slots(state)
        self._add_ties()
        self.look()

    def _add_slots(self, state: Mapping[str, StateSpec]) -> None:
        for name, spec in state.items():
            path, _, key = name.rpartition(".")
            module = _owner(self.modules, path) if spec.kind in _DICTS else None
            if module is not None and getattr(module, _DICTS[spec.kind]).get(key) is not None:
                self._add_slot(name, module, _DICTS[spec.kind], key)

    def _add_slot(self, name: str, module: nn.Module, kind: str, key: str) -> None:
        self.names.append(name)
        self._homes.append((module, kind))
        self._owners.append(getattr(module, kind))
        self._keys.append(key)

    def add_state(self, state: Mapping[str, StateSpec]) -> None:
        """Add the tensors of a further program, as they are now; what was seen of others stays as it was."""
        count = len(self.names)
        self._add_slots(state)
        self._find_dicts()
        self._see([owner[key] for owner, key in zip(self._owners[count:], self._keys[count:], strict=True)])

    def _add_ties(self) -> None:
        """Add the further slots of tied parameters."""
        names = {id(owner[key]): name for name, owner, key in self.entries() if isinstance(owner[key], nn.Parameter)}
        places = {(id(owner), key) for _, owner, key in self.entries()}
        for root in self.modules.values():
            for module in root.modules():
                for key, x in module._parameters.items():
                    if id(x) in names and (id(module._parameters), key) not in places:
                        self._add_slot(names[id(x)], module, _DICTS["parameter"], key)

    def _find_dicts(self) -> None:
        """Find the dicts in which modules keep their tensors now: somebody may have replaced them."""
        self._owners = [getattr(module, kind) for module, kind in self._homes]
        homes = {id(owner): (*home, owner) for home, owner in zip(self._homes, self._owners, strict=True)}
        self._dicts = tuple(zip(*homes.values(), strict=True)) or ((), (), ())

    def look(self) -> None:
        """Remember the present tensors."""
        self._find_dicts()
        self._seen: list[Tensor] = []
        self._locals: list[Tensor] = []
        self._memory: list[int] = []
        self._dtensors: list[DTensor] = []
        self._parts: list[Tensor] = []
        self._see(list(map(getitem, self._owners, self._keys)))

    def _see(self, tensors: list[Tensor]) -> None:
        """Remember these tensors, with their memory, behind those that were seen."""
        parts = list(map(local_of, tensors))
        dtensors = [x for x in tensors if isinstance(x, DTensor)]
        self._seen += tensors
        self._locals += parts
        self._memory += map(_ADDRESS, parts)
        self._dtensors += dtensors
        self._parts += map(local_tensor, dtensors)

    @property
    def same(self) -> bool:
        """Return whether every tensor is still the same object in the same memory."""
        modules, kinds, dicts = self._dicts
        if not all(map(is_, map(getattr, modules, kinds), dicts)):
            return False
        try:
            now = list(map(getitem, self._owners, self._keys))
        except KeyError:
            return False
        with without_torch_function():
            return (
                all(map(is_, now, self._seen))
                and all(map(is_, map(local_tensor, self._dtensors), self._parts))
                and list(map(_ADDRESS, self._locals)) == self._memory
            )

    def changed(self) -> dict[str, Tensor]:
        """Return the tensors that were replaced, or have other memory, since the last look.

        Raises:
            RunError: QN112 for one that was removed, and for slots that were tied or untied.
        """
        self._find_dicts()
        changed: dict[str, Tensor] = {}
        names: dict[int, str] = {}
        now: dict[str, Tensor] = {}
        for i, (name, owner, key) in enumerate(zip(self.names, self._owners, self._keys, strict=True)):
            x = owner.get(key)
            if x is None:
                raise RunError("QN112", f"{name} was removed", fix=_RECOMPILE)
            if names.setdefault(id(x), name) != name:
                raise RunError("QN112", f"{names[id(x)]} and {name} are one tensor now, and were two", fix=_RECOMPILE)
            if name in now and now[name] is not x:
                raise RunError("QN112", f"two places shared {name}, and have a tensor each now", fix=_RECOMPILE)
            now[name] = x
            local = local_of(x)
            if x is not self._seen[i] or local is not self._locals[i] or local.data_ptr() != self._memory[i]:
                changed[name] = x
        return changed

    def entries(self) -> Iterator[tuple[str, dict[str, Tensor], str]]:
        """Yield each tensor's name, and its dict and key in its module."""
        yield from zip(self.names, self._owners, self._keys, strict=True)

    @property
    def current_tensors(self) -> dict[str, Tensor]:
        """Return the present tensors by name."""
        self._find_dicts()
        return {name: owner[key] for name, owner, key in self.entries() if owner.get(key) is not None}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the last look by name."""
        return dict(zip(self.names, self._seen, strict=True))

    def replace_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put these parameters in the place of others, and these buffers in the place of those on other devices."""
        self._find_dicts()
        replaced: dict[int, nn.Parameter] = {}
        for name, owner, key in zip(self.names, self._owners, self._keys, strict=True):
            new, old = tensors.get(name), owner[key]
            if isinstance(new, nn.Parameter) and new is not old:
                replaced[id(old)] = new
            elif new is not None and old.device != new.device and not isinstance(old, nn.Parameter):
                owner[key] = new
        for root in self.modules.values():
            for module in root.modules():
                for key, x in list(module._parameters.items()):
                    if x is not None and id(x) in replaced:
                        setattr(module, key, replaced[id(x)])  # by setattr: some modules also keep lists of them
                        retire(x)
        self.look()

    def assign(self, buffers: Mapping[str, Tensor]) -> None:
        """Put these buffers in the place of others."""
        for name, x in buffers.items():
            path, _, key = name.rpartition(".")
            owner = _owner(self.modules, path)
            assert owner is not None, f"no module has {name}"
            owner._buffers[key] = x
        self.look()


def retire(old: nn.Parameter) -> None:
    """Free the memory of a parameter that was replaced in the module."""
    if type(old) in (nn.Parameter, WholeParameter):
        old.__class__ = ReplacedParameter
        if not old.is_meta:
            old.data = torch.empty(0, dtype=old.dtype, device=old.device)


def check_fits(name: str, x: Tensor, spec: StateSpec, device: torch.device) -> None:
    """Check that a tensor of the module has the shape, dtype and device that the program was compiled for.

    Raises:
        RunError: QN112 if it has not.
    """
    actual = f"{tuple(x.shape)} {x.dtype} on {x.device.type}"
    expected = f"{tuple(spec.shape)} {spec.dtype} on {device.type}"
    if actual != expected:
        raise RunError(
            "QN112",
            f"{name} is {actual} now, and the program was compiled for {expected}",
            fix="compile the changed module again (in another dtype or shape it needs another program)",
        )


def _owner(modules: Mapping[str, nn.Module], path: str) -> nn.Module | None:
    for prefix, module in modules.items():
        if not prefix or path == prefix or path.startswith(f"{prefix}."):
            try:
                return module.get_submodule(path.removeprefix(prefix).removeprefix("."))
            except AttributeError:
                continue
    return None
