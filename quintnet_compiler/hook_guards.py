"""Hooks of modules and parameters, compared before each step with those that a trace saw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, getitem, is_
from typing import Any

from torch import Tensor, nn

_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_PARAMETER = attrgetter("_backward_hooks")
_PACKAGE = __name__.partition(".")[0]

Hooks = Mapping[int, Any]


@dataclass(frozen=True)
class HookGuards:
    """``empty``: where modules had no hooks. ``filled``: where they had (or this package has) some, ``hooks``.

    ``spaces[i][keys[i]]`` is a parameter, and ``has[i]`` says whether it had hooks; those that had have ``own``.
    """

    empty: tuple[Hooks, ...]
    empty_labels: tuple[str, ...]
    filled: tuple[Hooks, ...]
    filled_labels: tuple[str, ...]
    hooks: list[list[Any]]
    spaces: tuple[Mapping[str, Tensor], ...]
    keys: tuple[str, ...]
    names: tuple[str, ...]
    has: list[bool]
    own: dict[int, list[Any]]

    def hold(self) -> bool:
        """Whether all hooks are those that there were."""
        if any(self.empty) or list(map(bool, map(_OF_PARAMETER, map(getitem, self.spaces, self.keys)))) != self.has:
            return False
        return all(map(_same, map(_of_user, self.filled), self.hooks)) and all(
            _same(_of_user(_OF_PARAMETER(self.spaces[i][self.keys[i]])), own) for i, own in self.own.items()
        )

    def broken(self) -> list[str]:
        """Whose hooks are others now."""
        found = [label for label, one in zip(self.empty_labels, self.empty, strict=True) if one]
        found += [
            label
            for label, one, hooks in zip(self.filled_labels, self.filled, self.hooks, strict=True)
            if not _same(_of_user(one), hooks)
        ]
        for i, (space, key) in enumerate(zip(self.spaces, self.keys, strict=True)):
            if key in space and not _same(_of_user(_OF_PARAMETER(space[key])), self.own.get(i, [])):
                found.append(self.names[i])
        return [f"{label or 'the model'} has other hooks than it had" for label in dict.fromkeys(found)]


def hook_guards(
    roots: Iterable[tuple[str, nn.Module]],
    spaces: Sequence[Mapping[str, Tensor]],
    keys: Sequence[str],
    names: Sequence[str],
) -> HookGuards:
    """Guards of the hooks that there are now: of all modules inside ``roots``, and of these parameters."""
    empty: list[tuple[str, Hooks]] = []
    filled: list[tuple[str, Hooks]] = []
    for label, root in roots:
        for name, module in root.named_modules():
            for part in _OF_MODULES:
                one: Hooks = getattr(module, part)
                path = ".".join(filter(None, (label, name)))
                (filled if one or module is root else empty).append((path, one))
    known = [_of_user(_OF_PARAMETER(space[key])) for space, key in zip(spaces, keys, strict=True)]
    return HookGuards(
        tuple(one for _, one in empty),
        tuple(label for label, _ in empty),
        tuple(one for _, one in filled),
        tuple(label for label, _ in filled),
        [_of_user(one) for _, one in filled],
        tuple(spaces),
        tuple(keys),
        tuple(names),
        list(map(bool, known)),
        {i: hooks for i, hooks in enumerate(known) if hooks},
    )


def _of_user(hooks: Hooks | None) -> list[Any]:
    """Without those of this package, which refuse calls of a module that is split."""
    return [hook for hook in (hooks or {}).values() if not str(getattr(hook, "__module__", "")).startswith(_PACKAGE)]


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))
