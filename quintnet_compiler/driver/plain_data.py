"""Parts of programs as plain data, as JSON has it, and back: by the types that dataclasses give their fields."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from ..core.mesh import Mesh
from ..core.sharding import AxisType, parse_type
from ..ir.expectations import Expectations
from ..schedules.schedule import Action


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r} is not a dtype")
    return dtype


# by type: to plain data, and back
_TEXTS: Mapping[Any, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = types.MappingProxyType(
    {
        torch.dtype: (lambda x: str(x).removeprefix("torch."), _dtype),
        AxisType: (str, parse_type),
        Action: (str, Action.parse),
        Mesh: (lambda mesh: [list(axis) for axis in mesh.axes], lambda axes: Mesh(**dict(axes))),
        Expectations: (lambda expect: expect.model_dump(mode="json"), Expectations.model_validate),
    }
)


@functools.cache
def types_of(kind: type) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields, in order."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def to_plain_data(value: Any, kind: Any) -> Any:
    """Return ``value``, which has the type ``kind``, as plain data.

    >>> to_plain_data({0: (torch.float32, 2)}, Mapping[int, tuple[torch.dtype, int]])
    [[0, ['float32', 2]]]
    """
    if kind in _TEXTS:
        return _TEXTS[kind][0](value)
    if is_dataclass(kind) and isinstance(kind, type):
        return [to_plain_data(getattr(value, name), hint) for name, hint in types_of(kind).items()]
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else to_plain_data(value, _not_none(args))
    if origin is tuple:
        return [to_plain_data(x, hint) for x, hint in zip(value, _each(args, len(value)), strict=True)]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return [[to_plain_data(key, args[0]), to_plain_data(x, args[1])] for key, x in value.items()]
    if type(value) not in (str, int, float, bool):
        raise TypeError(f"a {type(value).__name__} where {kind} is expected")
    return value


def restored(data: Any, kind: Any) -> Any:
    """Return the value of type ``kind`` that ``data`` stands for.

    Raises:
        ValueError: if it is of another form.
    """
    if kind in _TEXTS:
        return _TEXTS[kind][1](data)
    if is_dataclass(kind) and isinstance(kind, type):
        pairs = zip(_list(data), types_of(kind).values(), strict=True)
        return kind(*(restored(x, hint) for x, hint in pairs))
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if data is None else restored(data, _not_none(args))
    if origin is tuple:
        return tuple(restored(x, hint) for x, hint in zip(_list(data), _each(args, len(data)), strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {restored(key, args[0]): restored(x, args[1]) for key, x in map(_list, _list(data))}
    if not (data in args if origin is Literal else _is_scalar(data, kind)):
        raise ValueError(f"{data!r} where {kind} is expected")
    return data


def _is_scalar(data: Any, kind: Any) -> bool:
    return type(data) is kind or (kind is float and type(data) is int)


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"a {type(data).__name__} where a list is expected")
    return data


def _not_none(args: tuple[Any, ...]) -> Any:
    (kind,) = (arg for arg in args if arg is not type(None))
    return kind


def _each(args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    return (args[0],) * count if args[-1:] == (Ellipsis,) else args
