"""Run a user's module and leave everything as it was: state, attributes, gradients, random numbers."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.torch import TorchDispatchMode, pytree, schema, storage_key
from ..guards.python_objects import ObjectSnapshot
from ..runtime.state.module_parameters import local_of

_CONTAINERS = (dict, OrderedDict, list, set)  # hooks of modules are ordered
_OWN = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class ModuleChanges:
    """Changes of a run.

    Attributes:
        tensors: tensors by name, before and after.
        attributes: attributes, by the path of the module.
        draws: the generators from which random numbers were drawn (``"python"``, ``"numpy"``, ``"torch"``).
    """

    tensors: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()


class Untouched:
    """A context that undoes all changes of modules when it is left.

    Memory is copied when it is written; buffers, which kernels may write to without saying so, at once. ``objects``
    reach further Python state, such as a loss function.

    Attributes:
        changes: the changes, after the context is left.
        dtypes: the dtypes of all floating-point results of operators.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        tensors: Mapping[str, Tensor],
        objects: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.parts = {id(m): (path, m) for module in modules for path, m in module.named_modules()}
        self.tensors = dict(tensors)
        seen = {id(x) for x in tensors.values()}
        for module in modules:
            for name, x in (*module.named_parameters(), *module.named_buffers()):
                if id(x) not in seen:
                    self.tensors[name] = x
        self.objects = {**{"loss_fn" if i else "": module for i, module in enumerate(modules)}, **objects}
        self.buffers = {id(x) for module in modules for x in module.buffers()}
        self.changes = ModuleChanges()
        self.dtypes: frozenset[torch.dtype] = frozenset()
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> Untouched:
        self.stack.enter_context(random_numbers_kept(self.tensors.values()))
        self.drawn = _random_states()
        self.reached = ObjectSnapshot.of(self.objects)
        self.settings = {key: _settings(module) for key, (_, module) in self.parts.items()}
        self.trainable = [(x, x.requires_grad) for x in self.tensors.values()]
        self.gradients = [(x, x.grad) for x in self.tensors.values() if x.is_leaf]
        self.memory = {name: x.detach() for name, x in self.tensors.items() if not x.is_meta}
        self.kept = _CopyOnWrite([x for x in self.tensors.values() if not x.is_meta])
        for x in self.tensors.values():
            if id(x) in self.buffers:
                self.kept.keep_copy(x)
        self.stack.enter_context(self.kept)
        return self

    def __exit__(self, *_: object) -> None:
        self.kept.watching = False
        try:
            now = _random_states()
            drawn = tuple(name for name, state in self.drawn.items() if not _same_state(state, now[name]))
            self.dtypes = frozenset(self.kept.dtypes)
            changed, settings = self._restore_tensors(), list(self._restore_settings())
            self.changes = ModuleChanges(changed, tuple(dict.fromkeys(settings + self.reached.restore())), drawn)
        finally:
            self.reached.restore()
            for x, flag in self.trainable:
                if x.requires_grad != flag:
                    x.requires_grad_(flag)
            for x, grad in self.gradients:
                if x.grad is not grad:
                    x.grad = grad
            self.stack.close()

    def _restore_tensors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Put back the values of tensors; return those that changed, before and after."""
        changed = dict(self._replaced_tensors())
        for name, x in self.tensors.items():
            now, original = x.detach(), self.kept.original(x)
            memory = self.memory.get(name)
            if memory is not None and local_of(x).data_ptr() != local_of(memory).data_ptr():  # .data was assigned
                x.data = memory
                original = memory.clone() if original is None else original
            if original is None or _same(original, now):
                continue
            changed[name] = original, now.clone()
            with torch.no_grad():
                x.detach().copy_(original)
        return changed

    def _replaced_tensors(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Yield parameters and buffers that are other tensors now, with other values: before and after."""
        names = {id(x): name for name, x in self.tensors.items()}
        for key, (path, module) in self.parts.items():
            for kind in ("_buffers", "_parameters"):
                old_tensors = self.settings[key][1][kind]
                for name, x in vars(module)[kind].items():
                    old = old_tensors.get(name)
                    if x is old or not isinstance(x, Tensor) or not isinstance(old, Tensor):
                        continue
                    original = self.kept.original(old)
                    original = old.detach().clone() if original is None else original
                    if not _same(original, x):
                        yield names.get(id(old), f"{path}.{name}" if path else name), (original, x.detach())

    def _restore_settings(self) -> Iterator[str]:
        for key, (path, module) in self.parts.items():
            was, inner = self.settings[key]
            now = vars(module)
            for name in [
                n for n in {**was, **now} if n not in _OWN and now.get(n, _MISSING) is not was.get(n, _MISSING)
            ]:
                same = type(now.get(name)) in (bool, int, float, str) and now.get(name) == was.get(name, _MISSING)
                if not same:
                    yield f"{path}.{name}" if path else name
                if name in was:
                    now[name] = was[name]
                else:
                    del now[name]
            for name, content in inner.items():
                held = was[name]
                if not _equal_content(held, content):
                    if name not in _OWN:
                        yield f"{path}.{name}" if path else name
                    held.clear()
                    held.extend(content) if isinstance(held, list) else held.update(content)


_MISSING = object()


def _settings(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    own = dict(vars(module))
    return own, {name: value.copy() for name, value in own.items() if type(value) in _CONTAINERS}


def _equal_content(held: Any, content: Any) -> bool:
    if len(held) != len(content):
        return False
    if isinstance(held, dict):
        return all(a is b and held[a] is content[b] for a, b in zip(held, content, strict=True))
    if isinstance(held, set):
        return bool(held == content)
    return all(a is b for a, b in zip(held, content, strict=True))


class _CopyOnWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies memory of some tensors before it is written for the first time."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watched: dict[int, list[Tensor]] = {}
        for x in tensors:
            self.watched.setdefault(_memory(x), []).append(x)
        self.copies: dict[int, Tensor] = {}
        self.dtypes: set[torch.dtype] = set()
        self.watching = True

    def keep_copy(self, x: Tensor) -> None:
        if not x.is_meta and id(x) not in self.copies:
            self.copies[id(x)] = x.detach().clone()

    def original(self, x: Tensor) -> Tensor | None:
        return self.copies.get(id(x))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.watching and schema(func).is_mutable:
            self._copy_written(schema(func).arguments, args, kwargs)
        result = func(*args, **kwargs)
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.dtypes.add(x.dtype)
        return result

    def _copy_written(self, parameters: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copy the watched tensors whose memory a call is about to write."""
        positional = {parameter.name: value for parameter, value in zip(parameters, args, strict=False)}
        values = {**positional, **kwargs}
        for parameter in parameters:
            if parameter.alias_info is None or not parameter.alias_info.is_write or parameter.name not in values:
                continue
            for x in pytree.tree_leaves(values[parameter.name]):
                for watched in self.watched.get(_memory(x), ()) if isinstance(x, Tensor) else ():
                    self.keep_copy(watched)


def _memory(x: Tensor) -> int:
    try:
        return storage_key(x)
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
        return id(x)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = a.detach().resolve_conj().resolve_neg(), b.detach().resolve_conj().resolve_neg()
    return bool(torch.equal(*bits)) or bool(
        ((bits[0] == bits[1]) | ((bits[0] != bits[0]) & (bits[1] != bits[1]))).all()
    )


def _random_states() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    states = {"python": random.getstate(), "torch": torch.get_rng_state()}
    return states if numpy is None else {**states, "numpy": numpy.random.get_state()}


def reseed_all(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextlib.contextmanager
def random_numbers_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the generators of torch (also of the GPUs on which tensors are), Python and NumPy afterwards."""
    devices = sorted({x.device.index or 0 for x in tensors if x.device.type == "cuda"})
    states = _random_states()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(states["python"])
            if "numpy" in states:
                sys.modules["numpy"].random.set_state(states["numpy"])


def _same_state(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    flat = [pytree.tree_leaves(x) for x in (a, b)]
    return all(bool((x == y).all()) if hasattr(x, "all") else x == y for x, y in zip(*flat, strict=True))
