"""A captured program as text that says all of it: programs with equal texts are compiled alike."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..capture.places import LEAF, WHERE
from ..compat.torch import OpOverload
from ..ir.program import Captured

# operators whose code PyTorch's version, or this package's files, decide
_NAMESPACES = frozenset({"aten", "prims", "quintnet"})
_MODULES = frozenset({"_operator", "builtins", "math", "torch"})  # of functions of sizes
_PLAIN = frozenset({bool, int, float, complex, str, type(None)})
_TERMS = (torch.dtype, torch.layout, torch.memory_format)


class NotCacheable(Exception):
    """Something that decides what is compiled cannot be written down: what it is."""


def captured_text(captured: Captured) -> str:
    """Everything of ``captured`` that passes read; values of parameters and buffers are not among it, and constants
    have a digest of theirs in their names. Of devices, the type: ranks have one each.

    Raises:
        NotCacheable: for an operator of neither PyTorch nor this package, or an argument that is no plain data.
    """
    parts: list[object] = [
        captured.form, captured.training, captured.only_rows, captured.changed, sorted(captured.assigned),
        *(list(found.items()) for found in (captured.aliases, captured.symbols, captured.like)),
    ]  # fmt: skip
    return "\n".join([*map(repr, parts), *map(_line, captured.graph.nodes)])


def _line(node: fx.Node) -> str:
    if unknown := node.meta.keys() - {"val", LEAF, WHERE}:
        raise NotCacheable(f"{node.name} has {sorted(unknown)} beside its value")
    given = _argument(node.args), _argument(dict(node.kwargs))
    known = _value(node.meta.get("val")), node.meta.get(LEAF), node.meta.get(WHERE)
    return repr((node.op, node.name, _target(node), *given, *known))


def _target(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, OpOverload):
        if target.namespace in _NAMESPACES:
            return str(target)
        raise NotCacheable(f"{target} is not one of PyTorch's operators: what it computes is not known by a version")
    if isinstance(target, str):
        return target
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    if module in _MODULES and getattr(importlib.import_module(module), name, None) is target:
        return f"{module}.{name}"
    raise NotCacheable(f"it calls {target}")


def _argument(given: Any) -> str:
    if isinstance(given, fx.Node):
        return f"%{given.name}"
    if isinstance(given, (list, tuple)):
        inside = ", ".join(map(_argument, given))
        return f"[{inside}]" if isinstance(given, list) else f"({inside})"
    if isinstance(given, Mapping):
        return f"{{{', '.join(f'{key!r}: {_argument(value)}' for key, value in given.items())}}}"
    if type(given) in _PLAIN or isinstance(given, _TERMS):
        return repr(given)
    if isinstance(given, torch.device):
        return f"device {given.type}"
    raise NotCacheable(f"an argument is a {type(given).__name__}")


def _value(made: Any) -> str:
    """What is known of a value: sizes that vary by their symbols."""
    if isinstance(made, Tensor):
        if made.layout is not torch.strided:
            return f"tensor {tuple(made.shape)} {made.dtype} {made.layout} {made.device.type}"
        where = f"{made.stride()} {made.storage_offset()} {made.device.type}"
        flags = f"{made.requires_grad} {made.is_conj()} {made.is_neg()}"
        return f"tensor {tuple(made.shape)} {made.dtype} {where} {flags}"
    if isinstance(made, (list, tuple)):
        return f"[{', '.join(map(_value, made))}]"
    if type(made) in _PLAIN:
        return repr(made)
    if isinstance(made, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"{type(made).__name__} {made}"
    raise NotCacheable(f"a value is a {type(made).__name__}")
