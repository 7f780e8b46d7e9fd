"""Containers of a batch that torch.export does not take.

These are dataclasses, mappings and sequences of other classes, and classes that are registered as containers. They
travel as one kind of container, :class:`Held`, with the same tensors, and are rebuilt where the model is called. All
else is a leaf of the batch: a tensor, a number, text.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..compat.torch import pytree
from ..core.errors import CompileError

_SINGLE = frozenset({Tensor, int, float, bool, complex, str, bytes, type(None)})
_BUILT_IN = frozenset({tuple, list, dict, OrderedDict, defaultdict, deque})  # torch.export flattens them


@dataclasses.dataclass(frozen=True)
class _Construction:
    """How to build an object from its parts. ``context``: what a registered container keeps apart from them."""

    kind: type
    keys: tuple[Any, ...]
    context: Any = None


class Held:
    """The parts of an object of another class, in order."""

    def __init__(self, construction: _Construction, parts: Sequence[Any]) -> None:
        self.construction, self.parts = construction, list(parts)

    def __repr__(self) -> str:
        pairs = zip(self.construction.keys, self.parts, strict=True)
        return f"{self.construction.kind.__name__}({', '.join(f'{key}={part!r}' for key, part in pairs)})"


def _flatten(held: Held) -> tuple[list[Any], _Construction]:
    return held.parts, held.construction


def _flatten_with_keys(held: Held) -> tuple[list[tuple[Any, Any]], _Construction]:
    keys: list[Any] = [pytree.MappingKey(key) for key in held.construction.keys]
    return list(zip(keys, held.parts, strict=True)), held.construction


def _unflatten(parts: Iterable[Any], construction: _Construction) -> Held:
    return Held(construction, list(parts))


pytree.register_pytree_node(Held, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)


def held(batch: Any) -> Any:
    """Return ``batch`` with :class:`Held` in place of containers of other classes.

    Raises:
        CompileError: QN102 for a mapping or a sequence that its own class does not rebuild from its parts.
    """
    if type(batch) in _SINGLE or isinstance(batch, Held):
        return batch
    if type(batch) in (tuple, list):
        return _same_or_new(batch, type(batch)(map(held, batch)))
    if type(batch) in _BUILT_IN or _is_named_tuple(batch):
        return _parts_replaced(batch, held)
    taken_apart = _flattened(batch)
    if taken_apart is None:
        return batch
    construction, parts = taken_apart
    return Held(construction, [held(part) for part in parts])


def rebuilt(batch: Any) -> Any:
    """Return ``batch`` with the objects that :func:`held` took apart, built from their present parts."""
    if type(batch) in _SINGLE:
        return batch
    if isinstance(batch, Held):
        return _build(batch.construction, [rebuilt(part) for part in batch.parts])
    if type(batch) in _BUILT_IN or _is_named_tuple(batch):
        return _parts_replaced(batch, rebuilt)
    return batch


def as_lists(batch: Any) -> Any:
    """Return ``batch`` with a list in place of each :class:`Held`, as torch.export expects its dynamic shapes."""
    if isinstance(batch, Held):
        return [as_lists(part) for part in batch.parts]
    if type(batch) in (tuple, list):
        return type(batch)(map(as_lists, batch))
    if type(batch) in _BUILT_IN or _is_named_tuple(batch):
        return _parts_replaced(batch, as_lists)
    return batch


class LossOfNames:
    """A loss function of batches that are dicts: ``loss(outputs, values)``, where ``values`` are those of ``names``
    that a batch has, and the model takes all others. A batch without the first name has the model's own loss."""

    names: tuple[str, ...] = ("labels",)

    def __call__(self, outputs: Any, values: Mapping[str, Any]) -> Tensor:
        """Return the loss, a scalar."""
        raise NotImplementedError


def takes_labels_of(batch: Any, loss_fn: Any) -> bool:
    """Return whether there is a loss function, and this batch has something for it."""
    if isinstance(batch, dict):
        return isinstance(loss_fn, LossOfNames) and loss_fn.names[0] in batch
    return loss_fn is not None


def model_inputs(batch: Any, loss_fn: Any) -> Any:
    """Return what of a batch the model itself takes."""
    if not takes_labels_of(batch, loss_fn):
        return batch
    if isinstance(batch, dict):
        return {name: value for name, value in batch.items() if name not in loss_fn.names}
    return batch[:-1]


def loss_inputs(batch: Any, loss_fn: Any) -> Any:
    """Return what of a batch its loss function takes, beside the model's outputs."""
    if isinstance(batch, dict):
        return {name: batch[name] for name in loss_fn.names if name in batch}
    return batch[-1]


def _same_or_new(old: Any, new: Any) -> Any:
    return old if all(a is b for a, b in zip(old, new, strict=True)) else new


def _parts_replaced(container: Any, change: Callable[[Any], Any]) -> Any:
    """Return a built-in container with ``change`` applied to each of its parts."""
    parts, structure = pytree.tree_flatten(container, is_leaf=lambda x: x is not container)
    changed = [change(part) for part in parts]
    same = all(a is b for a, b in zip(parts, changed, strict=True))
    return container if same else pytree.tree_unflatten(changed, structure)


def _is_named_tuple(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(type(x), "_fields")


def _flattened(x: Any) -> tuple[_Construction, list[Any]] | None:
    """Return how to build an object, and its parts; None for a leaf."""
    kind = type(x)
    if isinstance(x, Tensor):
        return None
    if kind in pytree.SUPPORTED_NODES:
        parts, context = pytree.SUPPORTED_NODES[kind].flatten_fn(x)
        return _Construction(kind, _keys(x, len(parts)), context), list(parts)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        values = _attributes(x)
        return _Construction(kind, tuple(values)), list(values.values())
    if isinstance(x, Mapping):
        return _checked(x, _Construction(kind, tuple(x)), [x[key] for key in x])
    if isinstance(x, (list, tuple)):
        return _checked(x, _Construction(kind, tuple(range(len(x)))), list(x))
    return None


def _keys(x: Any, count: int) -> tuple[Any, ...]:
    """Return the names of the parts of a registered container."""
    if dataclasses.is_dataclass(x):
        names = tuple(field.name for field in dataclasses.fields(x))
        if len(names) == count:
            return names
    return tuple(x) if isinstance(x, Mapping) and len(x) == count else tuple(range(count))


def _attributes(x: Any) -> dict[str, Any]:
    """Return all attributes of a dataclass's instance, those that are not fields too."""
    names = [field.name for field in dataclasses.fields(x) if hasattr(x, field.name)]
    return {**{name: getattr(x, name) for name in names}, **getattr(x, "__dict__", {})}


def _checked(x: Any, construction: _Construction, parts: list[Any]) -> tuple[_Construction, list[Any]]:
    """Return ``construction`` and ``parts``.

    Raises:
        CompileError: QN102 if the class does not build an equal object from them.
    """
    try:
        copy = _build(construction, parts)
        same = type(copy) is type(x) and _items(copy) == _items(x)
    except Exception as error:  # a constructor may raise anything
        raise _refused(construction.kind) from error
    if not same:
        raise _refused(construction.kind)
    return construction, parts


def _items(x: Any) -> list[tuple[Any, int]]:
    """Return the keys (or positions) of a container, and the ids of its parts."""
    pairs = [(key, x[key]) for key in x] if isinstance(x, Mapping) else list(enumerate(x))
    return [(key, id(part)) for key, part in pairs]


def _refused(kind: type) -> CompileError:
    return CompileError(
        "QN102",
        f"the batch holds a {kind.__name__}, which {kind.__name__}(its content) does not make again",
        fix="pass a dict, a list, or a dataclass with the same content",
    )


def _build(construction: _Construction, parts: list[Any]) -> Any:
    kind = construction.kind
    if kind in pytree.SUPPORTED_NODES:
        return pytree.SUPPORTED_NODES[kind].unflatten_fn(parts, construction.context)
    if dataclasses.is_dataclass(kind):
        x = object.__new__(kind)
        for name, part in zip(construction.keys, parts, strict=True):
            object.__setattr__(x, name, part)
        return x
    if issubclass(kind, Mapping):
        return kind(dict(zip(construction.keys, parts, strict=True)))  # type: ignore[call-arg]
    constructor: Any = kind
    return constructor(parts)
