"""A module's own parameters as the program's: where they are, and what they offer beside plain ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import getitem, is_, methodcaller
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...compat.distributed import local_tensor
from ...compat.torch import plain_function, same_implementation, without_torch_function
from ...core.errors import RunError
from ...ir.distributed_program import StateSpec
from ..transport.host_copies import PLAIN, host_room

_AGAIN = "compile the changed module"
_ADDRESS = methodcaller("data_ptr")


class WholeTensor(Tensor):
    """A plain tensor that is whole here, with what DTensors offer: code that asks for it is the same on every layout.
    Gradients and what a state dict holds are such."""

    __torch_function__ = plain_function

    def full_tensor(self) -> Tensor:
        """All of it."""
        return self.view_as(self)

    def to_local(self) -> Tensor:
        """What this process holds: all of it."""
        return self.view_as(self)

    def detach(self) -> Tensor:
        return super().detach().as_subclass(WholeTensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()


class WholeParameter(nn.Parameter):
    """A plain parameter, all of whose ranks are in this process; offers what :class:`WholeTensor` does."""

    __torch_function__ = plain_function
    full_tensor = WholeTensor.full_tensor
    to_local = WholeTensor.to_local

    def detach(self) -> Tensor:
        return super().detach().as_subclass(WholeTensor)


class ReplacedParameter(nn.Parameter):
    """What a parameter is after another one took its place in the module: an optimizer that still has it would train
    nothing, so its gradient cannot be asked for.

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
    """``x`` itself if it is a parameter, on ``device`` (``host``: in memory of its host), else a new one in its memory;
    for one on the meta device a new one whose memory has no values."""
    found = x if isinstance(x, nn.Parameter) else nn.Parameter(x.detach(), requires_grad=trainable)
    if found.is_meta:
        room = host_room(found.shape, found.dtype, device) if host else torch.empty_like(found, device=device)
        found = nn.Parameter(room, requires_grad=found.requires_grad)
    else:
        found = cast(nn.Parameter, pinned(found, device) if host else moved(found, device))
    if type(found) is nn.Parameter:
        found.__class__ = WholeParameter
    return found


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A module's own tensor on another device: the same object where PyTorch can do that, so that whoever has it (an
    optimizer, say) keeps it; a new one where it cannot, as with ``nn.Module.to``."""
    return x if x.device == device else _over(x, x.data.to(device))


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """As :func:`moved`, to memory of the host that ``device`` copies from."""
    if x.device.type == "cpu" and (device.type in PLAIN or x.is_pinned()):
        return x
    return _over(x, torch.empty_like(x, device="cpu", pin_memory=device.type not in PLAIN).copy_(x.data))


def _over(x: Tensor, there: Tensor) -> Tensor:
    """``x`` over the memory of ``there``, if it can be."""
    there = there.detach()
    if same_implementation(x, there):
        x.data = there
        return x
    return nn.Parameter(there, x.requires_grad) if isinstance(x, nn.Parameter) else there


def local_of(x: Tensor) -> Tensor:
    """What this process holds of a parameter or a gradient."""
    return local_tensor(x) if isinstance(x, DTensor) else x


def has_values(x: Tensor) -> bool:
    """Whether all of a tensor is in this process."""
    return not x.is_meta and not isinstance(x, DTensor)


def like(x: Tensor, kind: type[Tensor]) -> Tensor:
    """``x`` with the methods of ``kind``, if that is not a DTensor's."""
    return x if isinstance(x, (kind, DTensor)) else x.as_subclass(kind)


class Slots:
    """Where modules keep tensors of a program, and what there was when it was last looked at.

    Asking whether all is as it was takes 20 microseconds for 150 tensors: no loop is in Python.
    """

    def __init__(self, modules: Mapping[str, nn.Module], state: Mapping[str, StateSpec]) -> None:
        self.modules = modules
        self.names: list[str] = []
        self._owners: list[dict[str, Tensor]] = []
        self._keys: list[str] = []
        for name, spec in state.items():
            path, _, key = name.rpartition(".")
            owner = _owner(modules, path) if spec.kind in ("parameter", "buffer") else None
            home = None if owner is None else owner._parameters if spec.kind == "parameter" else owner._buffers
            if home is not None and home.get(key) is not None:
                self.names.append(name)
                self._owners.append(home)  # type: ignore[arg-type]
                self._keys.append(key)
        self._add_ties()
        self.look()

    def _add_ties(self) -> None:
        """The other places of parameters that have several."""
        names = {id(owner[key]): name for name, owner, key in self.places() if isinstance(owner[key], nn.Parameter)}
        known = {(id(owner), key) for _, owner, key in self.places()}
        for root in self.modules.values():
            for module in root.modules():
                for key, x in module._parameters.items():
                    if id(x) in names and (id(module._parameters), key) not in known:
                        self.names.append(names[id(x)])
                        self._owners.append(module._parameters)  # type: ignore[arg-type]
                        self._keys.append(key)

    def look(self) -> None:
        """Remember what is there now."""
        self._there = list(map(getitem, self._owners, self._keys))
        self._locals = [local_of(x) for x in self._there]
        self._memory = list(map(_ADDRESS, self._locals))
        self._dtensors = [x for x in self._there if isinstance(x, DTensor)]
        self._parts = list(map(local_tensor, self._dtensors))

    @property
    def same(self) -> bool:
        """Whether every tensor is the object that it was, in the memory where it was."""
        try:
            now = list(map(getitem, self._owners, self._keys))
        except KeyError:
            return False
        with without_torch_function():
            return (
                all(map(is_, now, self._there))
                and all(map(is_, map(local_tensor, self._dtensors), self._parts))
                and list(map(_ADDRESS, self._locals)) == self._memory
            )

    def changed(self) -> dict[str, Tensor]:
        """The tensors that are others now, or elsewhere.

        Raises:
            RunError: QN112 for one that is gone, and for places that share one where they did not, or do not any more.
        """
        found: dict[str, Tensor] = {}
        of: dict[int, str] = {}
        now: dict[str, Tensor] = {}
        for i, (name, owner, key) in enumerate(zip(self.names, self._owners, self._keys, strict=True)):
            x = owner.get(key)
            if x is None:
                raise RunError("QN112", f"{name} was removed", fix=_AGAIN)
            if of.setdefault(id(x), name) != name:
                raise RunError("QN112", f"{of[id(x)]} and {name} are one tensor now, and were two", fix=_AGAIN)
            if name in now and now[name] is not x:
                raise RunError("QN112", f"two places shared {name}, and have a tensor each now", fix=_AGAIN)
            now[name] = x
            mine = local_of(x)
            if x is not self._there[i] or mine is not self._locals[i] or mine.data_ptr() != self._memory[i]:
                found[name] = x
        return found

    def places(self) -> Iterator[tuple[str, dict[str, Tensor], str]]:
        """Each tensor's name, and the dict and the key that it has in its module."""
        yield from zip(self.names, self._owners, self._keys, strict=True)

    @property
    def now(self) -> dict[str, Tensor]:
        """What is there now."""
        return {name: owner[key] for name, owner, key in self.places() if key in owner}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What was there when it was last looked at."""
        return dict(zip(self.names, self._there, strict=True))

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Put these parameters where modules have others, and buffers where they have some without values or
        on another device."""
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
                        setattr(module, key, replaced[id(x)])  # some modules keep lists of them beside
                        retire(x)
        self.look()

    def assign(self, buffers: Mapping[str, Tensor]) -> None:
        """Put these buffers where modules have others."""
        for name, x in buffers.items():
            path, _, key = name.rpartition(".")
            owner = _owner(self.modules, path)
            assert owner is not None, f"no module has {name}"
            owner._buffers[key] = x
        self.look()


def retire(old: nn.Parameter) -> None:
    """Free a parameter in whose place the module has another one."""
    if type(old) in (nn.Parameter, WholeParameter):
        old.__class__ = ReplacedParameter
        if not old.is_meta:
            old.data = torch.empty(0, dtype=old.dtype, device=old.device)


def check_fits(name: str, x: Tensor, spec: StateSpec, device: torch.device) -> None:
    """Raises: RunError QN112 if a tensor that the module has now is not what the program was made for."""
    now = f"{tuple(x.shape)} {x.dtype} on {x.device.type}"
    then = f"{tuple(spec.shape)} {spec.dtype} on {device.type}"
    if now != then:
        raise RunError(
            "QN112",
            f"{name} is {now} now, and the program was compiled for {then}",
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
