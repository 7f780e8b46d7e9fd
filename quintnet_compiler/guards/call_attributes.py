"""Attributes that a hook of torch makes of a module's parameters and buffers before each of its calls: the ``weight``
of a layer that ``torch.nn.utils.prune`` masks, or that the old ``torch.nn.utils.weight_norm`` normalizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..compat.torch_hooks import CALL_HOOKS, made_before_calls
from ..core.errors import CompileError, Where
from .namespaces import MISSING


@dataclass(frozen=True)
class CallAttribute:
    """One of them. ``path``: of its module; ``hook(module, inputs)`` makes it, and does nothing else."""

    path: str
    module: nn.Module
    name: str
    hook: Callable[[nn.Module, Any], Any]

    @property
    def key(self) -> tuple[int, str]:
        """The ``id`` of the module, and the name."""
        return id(self.module), self.name


def call_attributes(roots: Mapping[str, nn.Module]) -> list[CallAttribute]:
    """Return those of all modules inside ``roots`` (by label), in the order in which a module's hooks make them."""
    return [
        CallAttribute(".".join(filter(None, (label, path))), module, name, hook)
        for label, root in roots.items()
        for path, module in root.named_modules()
        for hook in getattr(module, CALL_HOOKS).values()
        if (name := made_before_calls(hook))
    ]


@contextlib.contextmanager
def made_in_calls(attributes: Sequence[CallAttribute], missing: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """Inside, ``attributes`` are not there until hooks make them; afterwards they are what they were.

    Args:
        missing: what was asked for inside and was not there, with an ``owner`` and a ``name`` each.

    Raises:
        CompileError: QN110 if one was read before the call of its module.
    """
    spaces = [(vars(attribute.module), attribute.name) for attribute in attributes]
    values = [space.pop(name, MISSING) for space, name in spaces]
    try:
        yield
        _refuse_early(attributes, missing())
    except AttributeError:
        _refuse_early(attributes, missing())
        raise
    finally:
        for (space, name), value in zip(spaces, values, strict=True):
            space.pop(name, None)
            if value is not MISSING:
                space[name] = value


def _refuse_early(attributes: Sequence[CallAttribute], missing: Iterable[Any]) -> None:
    missing_names = {(id(read.owner), read.name) for read in missing}
    for attribute in attributes:
        if attribute.key in missing_names:
            raise CompileError(
                "QN110",
                f"the forward pass reads {attribute.name!r} before a hook makes it, in the call of that module: it "
                "would be that of the pass before",
                where=Where(attribute.path, ""),
                fix="call the module before its attribute is read, or make the attribute a parametrization "
                "(torch.nn.utils.parametrize)",
            )


def without_values(roots: Mapping[str, nn.Module]) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy``: copies have None there, until their own hooks make something."""
    values = (vars(attribute.module).get(attribute.name) for attribute in call_attributes(roots))
    return {id(value): None for value in values if value is not None}
