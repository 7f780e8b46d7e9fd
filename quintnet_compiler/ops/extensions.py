"""Extensions of operators: what those of features say of themselves, by what is asked.

A layer that treats some operators specially declares a type for what it has to know of them, and asks for it:
``extension(node.target, LocalForm)``. Facts are an :class:`.op_spec.OpSpec`, which :func:`.catalog.op_spec` returns for
all operators. Whoever defines an operator says it, once. So no layer names the operators of a feature.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

T = TypeVar("T")
_EXTENSIONS: dict[tuple[Any, type], Any] = {}  # filled as operators are defined, like torch's own registry


def extend(operator: Any, *extensions: object) -> None:
    """Say something of an operator, once for each type of extension.

    Raises:
        ValueError: if something of the same type was said of it.
    """
    for said in extensions:
        if (operator, type(said)) in _EXTENSIONS:
            raise ValueError(f"{operator} has a {type(said).__name__} already")
        _EXTENSIONS[operator, type(said)] = said


def extensions_of(kind: type[T]) -> dict[Any, T]:
    """Return what was said of any operators with a ``kind``, by operator, in the order in which it was."""
    return {operator: said for (operator, said_kind), said in _EXTENSIONS.items() if said_kind is kind}


def extension(operator: Any, kind: type[T]) -> T | None:
    """Return what was said of an operator with a ``kind``; None if nothing was."""
    said: T | None = _EXTENSIONS.get((operator, kind))
    return said


def extension_of_method(name: str, kind: type[T]) -> T | None:
    """Return the same of the operator of this package that generated code calls by ``name``."""
    operator = None if name.startswith("_") else getattr(torch.ops.quintnet, name, None)
    return extension(getattr(operator, "default", None), kind)
