"""The traits of single overloads of operators: fields of :class:`.op_spec.OpSpec` by the operators that have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

_FLAGS: Mapping[str, Iterable[Any]] = {}
_VALUES: Mapping[str, Mapping[Any, Any]] = {}


def _by_operator() -> dict[Any, dict[str, Any]]:
    traits: dict[Any, dict[str, Any]] = {}
    for field, targets in _FLAGS.items():
        for target in targets:
            traits.setdefault(target, {})[field] = True
    for field, values in _VALUES.items():
        for target, value in values.items():
            traits.setdefault(target, {})[field] = value
    return traits


TRAITS: Mapping[Any, Mapping[str, Any]] = MappingProxyType(_by_operator())
