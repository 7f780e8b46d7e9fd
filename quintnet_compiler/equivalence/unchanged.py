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
    """What a run changed: tensors by name (before, after), attributes by the path of the module, and whose random
    numbers were drawn (``"python"``, ``"numpy"``, ``"torch"``)."""

    tensors: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()


class Untouched:
    """A context in which modules may change whatever is theirs; on leaving it ``changes`` says what they changed, and
    all is put back. Memory is copied when it is written (buffers, which kernels may write to without saying so: at
    once). ``objects``: what reaches further Python state, such as a loss function. ``dtypes``: of all floating-point
    values that operators made."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        tensors: Mapping[str, Tensor],
        objects: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.parts = {id(m): (path, m) for module in modules for path, m in module.named_modules()}
        self.tensors = dict(tensors)
        known = {id(x) for x in tensors.values()}
        for module in modules:
            for name, x in (*module.named_parameters(), *module.named_buffers()):
                if id(x) not in known:
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
                self.kept.keep(x)
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
        changed: dict[str, tuple[Tensor, Tensor]] = {}
        names = {id(x): name for name, x in self.tensors.items()}
        for key, (path, module) in self.parts.items():
            for kind in ("_buffers", "_parameters"):
                before, after = self.settings[key][1][kind], vars(module)[kind]
                for name, x in after.items():
                    old = before.get(name)
                    if x is not old and isinstance(x, Tensor) and isinstance(old, Tensor):
                        was = self.kept.before(old)
                        was = old.detach().clone() if was is None else was
                        if not _same(was, x):
                            changed[names.get(id(old), f"{path}.{name}" if path else name)] = was, x.detach()
        for name, x in self.tensors.items():
            now, was = x.detach(), self.kept.before(x)
            held = self.memory.get(name)
            if held is not None and local_of(x).data_ptr() != local_of(held).data_ptr():  # .data was assigned
                x.data = held
                was = held.clone() if was is None else was
            if was is None or _same(was, now):
                continue
            changed[name] = was, now.clone()
            with torch.no_grad():
                x.detach().copy_(was)
        return changed

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

    def keep(self, x: Tensor) -> None:
        if not x.is_meta and id(x) not in self.copies:
            self.copies[id(x)] = x.detach().clone()

    def before(self, x: Tensor) -> Tensor | None:
        return self.copies.get(id(x))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.watching and schema(func).is_mutable:
            for given, value in zip(schema(func).arguments, args, strict=False):
                if given.alias_info is not None and given.alias_info.is_write:
                    self._written(value)
            for given in schema(func).arguments:
                if given.alias_info is not None and given.alias_info.is_write and given.name in kwargs:
                    self._written(kwargs[given.name])
        result = func(*args, **kwargs)
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.dtypes.add(x.dtype)
        return result

    def _written(self, value: Any) -> None:
        for x in pytree.tree_leaves(value):
            for mine in self.watched.get(_memory(x), ()) if isinstance(x, Tensor) else ():
                self.keep(mine)


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
    found = {"python": random.getstate(), "torch": torch.get_rng_state()}
    return found if numpy is None else {**found, "numpy": numpy.random.get_state()}


def reseed_all(seed: int) -> None:
    """Of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextlib.contextmanager
def random_numbers_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Afterwards the generators of torch (also of the GPUs on which tensors are), Python and NumPy are as before."""
    devices = sorted({x.device.index or 0 for x in tensors if x.device.type == "cuda"})
    before = _random_states()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(before["python"])
            if "numpy" in before:
                sys.modules["numpy"].random.set_state(before["numpy"])


def _same_state(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    flat = [pytree.tree_leaves(x) for x in (a, b)]
    return all(bool((x == y).all()) if hasattr(x, "all") else x == y for x, y in zip(*flat, strict=True))
