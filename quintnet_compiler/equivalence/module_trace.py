"""Where do a module and its program part? Every value of a step of the module, beside those of the program."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, resolve_name

from ..capture.places import OWN
from ..core.annotations import facts, is_getitem, leaf, needs_grad, origin
from ..core.errors import Where
from .module_step import Owner, module_step, tensors_of
from .reference import differs, largest
from .unsplit_step import UnsplitStep

Value = tuple[fx.Node, int]


@dataclass(frozen=True)
class FirstDifference:
    """``text``: what is established; ``where``: the line of the module's code."""

    text: str = ""
    where: Where = Where()


def first_difference(step: UnsplitStep, owner: Owner, batch: Any, limit: float, *, forward: bool) -> FirstDifference:
    """The first value that the module makes and the program does not; else (not ``forward``: at once) the first
    gradient of a value, from the loss on, that differs. Values are found by what is in them."""
    seen = _Calls(owner.modules)
    module_step(owner, batch, step.seed if step.draws else None, watch=seen)
    ours = _Ours(step, limit)
    step.run(owner.tensors, tensors_of(batch), lambda *_: None, ours.watch)
    matches = [(call, ours.equal(call.result.detach())) for call in seen.calls]
    if forward:
        for call, keys in matches:
            if not keys:
                return FirstDifference(
                    f"the first value that the program does not have is made by {call.name}", call.where
                )
        return FirstDifference()
    floor = 1e-3 * largest([c.result.grad for c, _ in matches if c.result.grad is not None])
    for call, keys in reversed(matches):
        expected, found = call.result.grad, {key: g for key in keys if (g := ours.cotangent(key)) is not None}
        if expected is None or not found or any(differs(g, expected, floor) <= limit for g in found.values()):
            continue
        users = _users(next(iter(found)))
        by = f", by the backward of {' and '.join(dict.fromkeys(str(u.target) for u in users))}" if users else ""
        place = facts(users[0]).where if len({str(u.target) for u in users}) == 1 else call.where
        text = f"the first wrong gradient is that of the result of {call.name}{by}"
        return FirstDifference(text, place if str(place) else call.where)
    return FirstDifference()


@dataclass(frozen=True)
class _ModuleCall:
    """A call of the module's code, and one of its results."""

    name: str
    where: Where
    result: Tensor


class _Calls(TorchFunctionMode):
    """Keeps what every call of torch returns, and its gradient."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.calls: list[_ModuleCall] = []
        self.paths = {id(m): path for module in modules for path, m in module.named_modules()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        results = [x for x in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(x, Tensor)]
        for x in results:
            if x.is_floating_point() and x.requires_grad and not x.is_leaf:
                x.retain_grad()
                self.calls.append(_ModuleCall(_name(func), self._where(), x))
        return made

    def _where(self) -> Where:
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(OWN):
            frame = frame.f_back
        source = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""
        path = None
        while frame is not None and path is None:
            path = self.paths.get(id(frame.f_locals.get("self")))
            frame = frame.f_back
        return Where(path or "", source)


def _name(func: Any) -> str:
    return str(resolve_name(func) or getattr(func, "__name__", func)).removeprefix("torch.")


@dataclass
class _Ours:
    """The values of the program, and their gradients."""

    step: UnsplitStep
    limit: float
    seen: dict[str, Tensor] = field(default_factory=dict)
    values: dict[Value, tuple[Tensor, float]] = field(default_factory=dict)

    def watch(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor) and node.op != "placeholder" and value.is_floating_point():
            self.seen[node.name] = value

    def equal(self, expected: Tensor) -> list[Value]:
        """Where the program has this value."""
        if not self.values:
            self._fill()
        size = float(expected.double().norm())
        near = self.limit * max(expected.numel(), 1) ** 0.5
        alike = [
            (key, x)
            for key, (x, norm) in self.values.items()
            if x.shape == expected.shape and abs(norm - size) <= near * max(size, norm)
        ]
        return [key for key, x in alike if differs(x, expected) <= self.limit]

    def _fill(self) -> None:
        local = self.step.program.local
        for key, part in local.parts.items():
            made = self.step.program.values.get(origin(part))
            x = self.seen.get(made.name) if made is not None else None
            if x is not None and leaf(key[0]) is None:
                self.values[key] = x, float(x.double().norm())

    def cotangent(self, key: Value) -> Tensor | None:
        local = self.step.program.local
        made = self.step.program.cotangents.get(origin(local.parts[key]))
        return None if made is None else self.seen.get(made.name)


def _users(key: Value) -> list[fx.Node]:
    """The operators that take part in the gradient of a value."""
    node, index = key
    direct = [u for u in node.users if u.op == "call_function" and not is_getitem(u)]
    picked = [w for u in node.users if is_getitem(u) and u.args[1] == index for w in u.users]
    return [u for u in (*direct, *picked) if u.op == "call_function" and needs_grad(u)]
