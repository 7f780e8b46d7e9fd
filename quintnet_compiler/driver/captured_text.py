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
    """Return everything of ``captured`` that passes read.

    Values of parameters and buffers are not among it, and constants have a digest of theirs in their names. Of devices,
    it has the type: ranks have one each.

    Raises:
        NotCacheable: for an operator of neither PyTorch nor this package, or an argument that is no plain data.
    """
    parts: list[object] = [
        captured.form, captured.training, captured.only_rows, captured.changed, sorted(captured.assigned),
        *(list(mapping.items()) for mapping in (captured.aliases, captured.symbols, captured.like)),
    ]  # fmt: skip
    return "\n".join([*map(repr, parts), *map(_line, captured.graph.nodes)])


def _line(node: fx.Node) -> str:
    if unknown := node.meta.keys() - {"val", LEAF, WHERE}:
        raise NotCacheable(f"{node.name} has {sorted(unknown)} beside its value")
    arguments = _argument(node.args), _argument(dict(node.kwargs))
    value = _value(node.meta.get("val")), node.meta.get(LEAF), node.meta.get(WHERE)
    return repr((node.op, node.name, _target(node), *arguments, *value))


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


def _argument(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return f"%{argument.name}"
    if isinstance(argument, (list, tuple)):
        inside = ", ".join(map(_argument, argument))
        return f"[{inside}]" if isinstance(argument, list) else f"({inside})"
    if isinstance(argument, Mapping):
        return f"{{{', '.join(f'{key!r}: {_argument(value)}' for key, value in argument.items())}}}"
    if type(argument) in _PLAIN or isinstance(argument, _TERMS):
        return repr(argument)
    if isinstance(argument, torch.device):
        return f"device {argument.type}"
    raise NotCacheable(f"an argument is a {type(argument).__name__}")


def _value(x: Any) -> str:
    """Return what a value is: sizes that vary by their symbols."""
    if isinstance(x, Tensor):
        if x.layout is not torch.strided:
            return f"tensor {tuple(x.shape)} {x.dtype} {x.layout} {x.device.type}"
        where = f"{x.stride()} {x.storage_offset()} {x.device.type}"
        flags = f"{x.requires_grad} {x.is_conj()} {x.is_neg()}"
        return f"tensor {tuple(x.shape)} {x.dtype} {where} {flags}"
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(_value, x))}]"
    if type(x) in _PLAIN:
        return repr(x)
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"{type(x).__name__} {x}"
    raise NotCacheable(f"a value is a {type(x).__name__}")
