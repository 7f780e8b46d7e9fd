"""What a captured program took from Python, compared before each step: attributes, modes, variables, constants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter, contains, getitem, is_
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.torch import version, without_torch_function
from ..compat.torch_hooks import GLOBAL_HOOKS
from .attribute_reads import Read
from .function_reads import Variable
from .hooks import HookGuards, hook_guards
from .python_state import CODE, MISSING, copied, is_plain, shown

_CELL = attrgetter("cell_contents")
_FLAG = attrgetter("requires_grad")


@dataclass(frozen=True)
class Guards:
    """Columns of equal length, which C code compares: ``spaces[i][names[i]]`` equals ``values[i]``, and so on.

    ``kinds``: the types of values (1, 1.0 and True are equal). ``shadow_spaces``: namespaces that did not have a name,
    because the class has it: ``classes[i].names[i]``. ``lists``: those of things that are not plain data. ``tensors``:
    what is constant in the graph, while its version is. ``things``: other objects, each the same one as before.
    ``parts``: modules inside modules, one module after the other. ``flag_spaces``: where modules have parameters
    (others may be there now: parts of the first ones); ``flag_values`` says which require gradients. ``hooks``: those
    of modules and of parameters.
    ``modes``: see :func:`global_modes`.
    """

    labels: tuple[str, ...]
    spaces: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    values: list[Any]
    kinds: list[type]
    shadow_spaces: tuple[dict[str, Any], ...]
    shadow_names: tuple[str, ...]
    classes: tuple[type, ...]
    class_values: list[Any]
    list_labels: tuple[str, ...]
    lists: tuple[Any, ...]
    list_ids: list[list[int]]
    cell_labels: tuple[str, ...]
    cells: tuple[Any, ...]
    cell_values: list[Any]
    tensors: tuple[Tensor, ...]
    versions: list[int]
    thing_labels: tuple[str, ...]
    thing_spaces: tuple[dict[str, Any], ...]
    thing_names: tuple[str, ...]
    things: tuple[Any, ...]
    part_labels: tuple[str, ...]
    part_spaces: tuple[dict[str, Any], ...]
    part_counts: list[int]
    parts: list[Any]
    flag_spaces: tuple[dict[str, Any], ...]
    flag_keys: tuple[str, ...]
    flag_values: list[bool]
    flag_names: tuple[str, ...]
    hooks: HookGuards
    modes: tuple[Any, ...]

    def hold(self) -> bool:
        """Whether all is as it was."""
        try:
            with without_torch_function():
                return self._hold()
        except (KeyError, AttributeError, ValueError, TypeError, RuntimeError):  # gone, or not comparable any more
            return False

    def _hold(self) -> bool:
        found = list(map(getitem, self.spaces, self.names))
        parameters = list(map(getitem, self.flag_spaces, self.flag_keys))
        return (
            found == self.values
            and list(map(type, found)) == self.kinds
            and not any(map(contains, self.shadow_spaces, self.shadow_names))
            and list(map(getattr, self.classes, self.shadow_names)) == self.class_values
            and list(map(_CELL, self.cells)) == self.cell_values
            and list(map(version, self.tensors)) == self.versions
            and list(map(_FLAG, parameters)) == self.flag_values
            and all(map(is_, map(getitem, self.thing_spaces, self.thing_names), self.things))
            and list(map(len, self.part_spaces)) == self.part_counts
            and list(chain.from_iterable(map(dict.values, self.part_spaces))) == self.parts
            and [list(map(id, one)) for one in self.lists] == self.list_ids
            and self.hooks.hold(parameters)
            and global_modes() == self.modes
        )

    def broken(self) -> list[str]:
        """What is not as it was, with the values before and now."""
        found = [
            f"{label} is {shown(space.get(name, MISSING))} and was {shown(value)}"
            for label, space, name, value, kind in zip(
                self.labels, self.spaces, self.names, self.values, self.kinds, strict=True
            )
            if name not in space or type(space[name]) is not kind or not _equal(space[name], value)
        ]
        found += [
            f"{kind.__name__}.{name} is {shown(getattr(kind, name, MISSING))} and was {shown(value)}"
            for kind, name, value in zip(self.classes, self.shadow_names, self.class_values, strict=True)
            if not _equal(getattr(kind, name, None), value)
        ]
        found += [
            f"{name} is {shown(space[name])} and was {shown(value)}"
            for space, name, value in zip(self.shadow_spaces, self.shadow_names, self.class_values, strict=True)
            if name in space
        ]
        for label, cell, value in zip(self.cell_labels, self.cells, self.cell_values, strict=True):
            if not _equal(cell.cell_contents, value):
                found.append(f"{label} is {shown(cell.cell_contents)} and was {shown(value)}")
        for label, one, ids in zip(self.list_labels, self.lists, self.list_ids, strict=True):
            if list(map(id, one)) != ids:
                found.append(f"{label} holds other objects than it did")
        if list(map(version, self.tensors)) != self.versions:
            found.append("a tensor that forward uses as a constant was changed in place")
        for name, space, key, flag in zip(
            self.flag_names, self.flag_spaces, self.flag_keys, self.flag_values, strict=True
        ):
            if getattr(space.get(key), "requires_grad", not flag) != flag:
                found.append(f"{name}.requires_grad is {not flag} and was {flag}")
        for label, space, name, thing in zip(
            self.thing_labels, self.thing_spaces, self.thing_names, self.things, strict=True
        ):
            if space.get(name) is not thing:
                found.append(f"{label} is another object")
        known = iter(self.parts)
        for label, space, count in zip(self.part_labels, self.part_spaces, self.part_counts, strict=True):
            if list(space.values()) != list(islice(known, count)):
                found.append(f"{label or 'the model'} has other parts than it had")
        if all(key in space for space, key in zip(self.flag_spaces, self.flag_keys, strict=True)):
            found += self.hooks.broken(list(map(getitem, self.flag_spaces, self.flag_keys)))
        if global_modes() != self.modes:
            found.append(f"the modes of torch are {global_modes()} and were {self.modes}")
        return found


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False


def _elements(label: str, value: Any) -> list[tuple[str, dict[str, Any], str, Any]]:
    """Plain elements of a dict that also holds other things."""
    if not isinstance(value, dict):
        return []
    return [(f"{label}[{key!r}]", value, key, one) for key, one in value.items() if is_plain(one)]


def global_modes() -> tuple[Any, ...]:
    """What torch itself is set to that decides which operators a trace has."""
    return (
        torch.get_default_dtype(),
        *map(tuple, GLOBAL_HOOKS),  # by the numbers of their handles
    )


def guards_of(
    roots: Sequence[tuple[str, nn.Module]],
    reads: Sequence[Read],
    variables: Sequence[Variable],
    constants: Iterable[tuple[Tensor, int]],
    modes: tuple[Any, ...],
    *,
    flags: bool,
) -> Guards:
    """Guards with the values of now: after the trace, when everything is as its owner had it."""
    rows: list[tuple[str, dict[str, Any], str, Any]] = []
    shadows: list[tuple[dict[str, Any], str, type, Any]] = []
    cells: list[tuple[str, Any, Any]] = []
    tensors = list(constants)
    things: list[tuple[str, dict[str, Any], str, Any]] = []
    for read in reads:
        own = vars(read.owner)
        if read.name in own:
            value = own[read.name]
            if isinstance(value, Tensor):
                tensors.append((value, version(value)))
                things.append((read.label, own, read.name, value))
            elif is_plain(value) or isinstance(value, CODE):
                rows.append((read.label, own, read.name, value))
            else:
                things.append((read.label, own, read.name, value))
                rows += _elements(read.label, value)
        elif is_plain(value := getattr(type(read.owner), read.name, None)):
            shadows.append((own, read.name, type(read.owner), value))
    for variable in variables:
        value = variable.value
        plain = is_plain(value) or isinstance(value, CODE)
        if isinstance(variable.space, dict):
            (rows if plain else things).append((variable.label, variable.space, variable.name, value))
        elif plain:
            cells.append((variable.label, variable.space, value))
        rows += [] if plain else _elements(variable.label, value)
    parts, trained = [], []
    for label, root in roots:
        for name, module in root.named_modules():
            inner = vars(module)["_modules"]
            if inner:
                parts.append((".".join(filter(None, (label, name))), inner))
        if flags:
            trained += [
                (".".join(filter(None, (label, path, key))), module._parameters, key, p.requires_grad)
                for path, module in root.named_modules()
                for key, p in module._parameters.items()
                if p is not None
            ]
    flag_spaces, flag_keys = tuple(row[1] for row in trained), tuple(row[2] for row in trained)
    flag_names = tuple(row[0] for row in trained)
    lists = [row for row in things if isinstance(row[3], (list, tuple))]
    values = [copied(value) for _, _, _, value in rows]
    return Guards(
        labels=tuple(row[0] for row in rows),
        spaces=tuple(row[1] for row in rows),
        names=tuple(row[2] for row in rows),
        values=values,
        kinds=list(map(type, values)),
        shadow_spaces=tuple(row[0] for row in shadows),
        shadow_names=tuple(row[1] for row in shadows),
        classes=tuple(row[2] for row in shadows),
        class_values=[copied(row[3]) for row in shadows],
        list_labels=tuple(row[0] for row in lists),
        lists=tuple(row[3] for row in lists),
        list_ids=[list(map(id, row[3])) for row in lists],
        cell_labels=tuple(row[0] for row in cells),
        cells=tuple(row[1] for row in cells),
        cell_values=[copied(row[2]) for row in cells],
        tensors=tuple(x for x, _ in tensors),
        versions=[version for _, version in tensors],
        thing_labels=tuple(row[0] for row in things),
        thing_spaces=tuple(row[1] for row in things),
        thing_names=tuple(row[2] for row in things),
        things=tuple(row[3] for row in things),
        part_labels=tuple(row[0] for row in parts),
        part_spaces=tuple(row[1] for row in parts),
        part_counts=[len(row[1]) for row in parts],
        parts=[one for row in parts for one in row[1].values()],
        flag_spaces=flag_spaces,
        flag_keys=flag_keys,
        flag_values=[row[3] for row in trained],
        flag_names=flag_names,
        hooks=hook_guards(roots, list(map(getitem, flag_spaces, flag_keys)), flag_names),
        modes=modes,
    )
