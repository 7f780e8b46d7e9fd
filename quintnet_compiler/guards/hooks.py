"""Hooks of modules and parameters, compared before each step with those that a trace saw."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor, nn

from ..compat.torch_hooks import GLOBAL_HOOKS, MODULE_HOOKS, backward_hooks, have_no_module_hooks
from ..core.code_origin import TORCH

_PACKAGE = __name__.partition(".")[0]

Hooks = Mapping[int, Any]


@dataclass(frozen=True)
class HookGuards:
    """The hooks of modules and parameters.

    ``empty``: the namespaces of modules that had no hooks. ``filled``: those of the others, or to which this package
    adds some, with a kind of hooks each; ``hooks``: the user's of these. ``names``: of parameters; ``own``: the hooks
    of those that had any.
    """

    empty: tuple[Mapping[str, Any], ...]
    empty_labels: tuple[str, ...]
    filled: tuple[tuple[Mapping[str, Any], str], ...]
    filled_labels: tuple[str, ...]
    hooks: list[list[Any]]
    names: tuple[str, ...]
    own: dict[int, list[Any]]

    def hold(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether all hooks are those that there were."""
        return self.of_modules_hold() and not self._others(parameters)

    def of_modules_hold(self) -> bool:
        """Return whether the hooks of modules are those that there were."""
        for (space, kind), hooks in zip(self.filled, self.hooks, strict=True):
            now = space[kind]
            if (now or hooks) and not _same(_of_user(now), hooks):
                return False
        return have_no_module_hooks(self.empty)

    def _others(self, parameters: Sequence[Tensor]) -> list[int]:
        """Places of parameters that have other hooks now."""
        now = map(_of_user, map(backward_hooks, parameters))
        return [i for i, hooks in enumerate(now) if not _same(hooks, self.own.get(i, []))]

    def broken(self, parameters: Sequence[Tensor]) -> list[str]:
        """Say whose hooks are others now."""
        labels = [
            label for label, x in zip(self.empty_labels, self.empty, strict=True) if not have_no_module_hooks([x])
        ]
        rows = zip(self.filled_labels, self.filled, self.hooks, strict=True)
        labels += [label for label, (space, kind), hooks in rows if not _same(_of_user(space[kind]), hooks)]
        labels += [self.names[i] for i in self._others(parameters)]
        return [f"{label or 'the model'} has other hooks than it had" for label in dict.fromkeys(labels)]


def hook_guards(
    roots: Iterable[tuple[str, nn.Module]], parameters: Sequence[Tensor], names: Sequence[str]
) -> HookGuards:
    """Return guards of the hooks that there are now: of all modules inside ``roots``, and of these parameters."""
    empty: list[tuple[str, Mapping[str, Any]]] = []
    filled: list[tuple[str, tuple[Mapping[str, Any], str]]] = []
    for label, root in roots:
        for name, module in root.named_modules():
            path, space = ".".join(filter(None, (label, name))), vars(module)
            if module is not root and have_no_module_hooks([space]):
                empty.append((path, space))
            else:
                filled += [(path, (space, kind)) for kind in MODULE_HOOKS]
    of_parameters = enumerate(map(_of_user, map(backward_hooks, parameters)))
    return HookGuards(
        tuple(space for _, space in empty),
        tuple(label for label, _ in empty),
        tuple(place for _, place in filled),
        tuple(label for label, _ in filled),
        [_of_user(space[kind]) for _, (space, kind) in filled],
        tuple(names),
        {i: hooks for i, hooks in of_parameters if hooks},
    )


def _of_user(hooks: Hooks | None) -> list[Any]:
    """Return hooks without those of this package, which refuse calls of a module that is split."""
    return [hook for hook in (hooks or {}).values() if not str(getattr(hook, "__module__", "")).startswith(_PACKAGE)]


def _same(now: list[Any], then: list[Any]) -> bool:
    if not now:
        return not then
    return len(now) == len(then) and all(map(is_, now, then))


_NO_HANDLES: tuple[tuple[int, ...], ...] = ((),) * len(GLOBAL_HOOKS)


def global_hooks() -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the handles of hooks of all modules. Those that belong to torch are left out: they only
    watch, for tools such as ``FlopCounterMode`` and ``CommDebugMode``."""
    if not any(GLOBAL_HOOKS):  # in each step, and mostly there are none
        return _NO_HANDLES
    return tuple(map(_handles, GLOBAL_HOOKS))


def _handles(hooks: Mapping[int, Any]) -> tuple[int, ...]:
    return tuple(key for key, hook in hooks.items() if not _is_of_torch(hook))


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
