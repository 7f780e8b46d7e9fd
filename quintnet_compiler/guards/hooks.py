"""Hooks of modules and parameters, compared before each step with those that a trace saw."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress
from operator import is_, not_
from typing import Any

from torch import Tensor, nn

from ..compat.torch_hooks import CALL_HOOKS, GLOBAL_HOOKS, MODULE_HOOKS, backward_hooks, have_no_hooks
from ..core.code_origin import TORCH
from .columns import Flags, Space

_PACKAGE = __name__.partition(".")[0]

Hooks = Mapping[int, Any]


@dataclass(frozen=True)
class HookGuards:
    """The hooks of modules and parameters.

    ``empty``: labels and namespaces of modules, and a kind of hooks that they had not. ``filled``: likewise where they
    had some, or this package adds some, with the user's. ``names``: of parameters; ``own``: their hooks, if any.
    """

    empty: tuple[tuple[str, Space, str], ...]
    filled: tuple[tuple[str, Space, str, list[Any]], ...]
    names: tuple[str, ...]
    own: dict[int, list[Any]]

    def dicts(self) -> list[Any]:
        """Return where modules that had no hooks keep theirs now."""
        return [space[kind] for _, space, kind in self.empty]

    def filled_hold(self) -> bool:
        """Return whether modules that had hooks have the same."""
        for _, space, kind, hooks in self.filled:
            if (space[kind] or hooks) and not _same(_of_user(space[kind]), hooks):
                return False
        return True

    def others(self, parameters: Sequence[Tensor]) -> list[int]:
        """Return the places of parameters that have other hooks now."""
        now = map(_of_user, map(backward_hooks, parameters))
        return [i for i, hooks in enumerate(now) if not _same(hooks, self.own.get(i, []))]

    def changed_labels(self, parameters: Sequence[Tensor]) -> list[str]:
        """Say whose hooks are others now."""
        labels = [label for label, space, kind in self.empty if space[kind]]
        labels += [label for label, space, kind, hooks in self.filled if not _same(_of_user(space[kind]), hooks)]
        labels += [self.names[i] for i in self.others(parameters)]
        return [f"{label or 'the model'} has other hooks than it had" for label in dict.fromkeys(labels)]


def hook_guards(
    roots: Iterable[tuple[str, nn.Module]], parameters: Sequence[Tensor], names: Sequence[str]
) -> HookGuards:
    """Return guards of the hooks that there are now: of all modules inside ``roots``, and of these parameters."""
    empty: list[tuple[str, Space, str]] = []
    filled: list[tuple[str, Space, str, list[Any]]] = []
    for label, root in roots:
        for name, module in root.named_modules():
            path, space = ".".join(filter(None, (label, name))), vars(module)
            for kind in MODULE_HOOKS:
                if space[kind] or (module is root and kind == CALL_HOOKS):
                    filled.append((path, space, kind, _of_user(space[kind])))
                else:
                    empty.append((path, space, kind))
    of_parameters = enumerate(map(_of_user, map(backward_hooks, parameters)))
    return HookGuards(tuple(empty), tuple(filled), tuple(names), {i: hooks for i, hooks in of_parameters if hooks})


@dataclass(frozen=True)
class Trained:
    """Compare which parameters require gradients, and all hooks.

    ``trained``, ``frozen`` and ``no_hooks``: the parameters, and the dicts of modules without hooks, looked up last.
    """

    flags: Flags
    hooks: HookGuards
    trained: list[Tensor] = field(default_factory=list)
    frozen: list[Tensor] = field(default_factory=list)
    no_hooks: list[Any] = field(default_factory=list)

    def hold(self) -> bool:
        """Look up all parameters and hooks, and return whether they are as they were."""
        parameters, flags = self.flags.parameters, self.flags.values
        self.trained[:], self.frozen[:] = compress(parameters, flags), compress(parameters, map(not_, flags))
        self.no_hooks[:] = self.hooks.dicts()
        return self._objects_hold()

    def _objects_hold(self) -> bool:
        if any(self.no_hooks) or not self.hooks.filled_hold():
            return False
        if not self.hooks.own and have_no_hooks(self.trained, True) and have_no_hooks(self.frozen, False):
            return True
        return self.flags.hold() and not self.hooks.others(self.flags.parameters)

    def outside(self, ids: Set[int]) -> Callable[[], bool]:
        """Return what compares all that needs a look in each step."""
        spaces = *self.flags.spaces, *(row[1] for row in (*self.hooks.empty, *self.hooks.filled))
        return self._objects_hold if ids >= set(map(id, spaces)) else self.hold

    def broken(self) -> list[str]:
        """Say which parameters have other flags, and who has other hooks."""
        lines = self.flags.broken()
        if all(key in space for space, key in zip(self.flags.spaces, self.flags.keys, strict=True)):
            lines += self.hooks.changed_labels(self.flags.parameters)
        return lines


def _of_user(hooks: Hooks | None) -> list[Any]:
    """Return hooks without those of this package, which refuse calls of a module that is split."""
    return [hook for hook in (hooks or {}).values() if not str(getattr(hook, "__module__", "")).startswith(_PACKAGE)]


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


_NO_HANDLES: tuple[tuple[int, ...], ...] = ((),) * len(GLOBAL_HOOKS)


def global_hooks() -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the handles of hooks of all modules. Those that belong to torch are left out: they only
    watch, for tools such as ``FlopCounterMode`` and ``CommDebugMode``."""
    if not any(GLOBAL_HOOKS):  # in each step, and mostly there are none
        return _NO_HANDLES
    return tuple(tuple(key for key, hook in hooks.items() if not _is_of_torch(hook)) for hooks in GLOBAL_HOOKS)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """While inside, modules have no hooks that belong to torch's own tools."""
    saved = [(hooks, dict(hooks)) for hooks in GLOBAL_HOOKS if any(map(_is_of_torch, hooks.values()))]
    for hooks, content in saved:
        _refill(hooks, {key: hook for key, hook in content.items() if not _is_of_torch(hook)})
    try:
        yield
    finally:
        for hooks, content in saved:
            _refill(hooks, content)


def _refill(hooks: MutableMapping[int, Any], content: Mapping[int, Any]) -> None:
    hooks.clear()
    hooks.update(content)


def _is_of_torch(hook: Any) -> bool:
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return code is not None and code.co_filename.startswith(TORCH)
