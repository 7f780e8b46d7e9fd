"""Find where a module and its program differ: compare every value of a step of the module with the program's."""

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
    """A difference. ``text``: what is established; ``where``: the line of the module's code."""

    text: str = ""
    where: Where = Where()


def first_difference(step: UnsplitStep, owner: Owner, batch: Any, limit: float, *, forward: bool) -> FirstDifference:
    """Return the first value that the module computes and the program does not, if ``forward``.

    Otherwise return the first gradient of a value, from the loss on, that differs. Values are matched by their numbers.
    """
    calls = _Calls(owner.modules)
    module_step(owner, batch, step.seed if step.draws else None, watch=calls)
    program = _ProgramValues(step, limit)
    step.run_step(owner.tensors, tensors_of(batch), lambda *_: None, program.watch)
    matches = [(call, program.equal(call.result.detach())) for call in calls.calls]
    return _first_missing_value(matches) if forward else _first_wrong_gradient(matches, program, limit)


def _first_missing_value(matches: Sequence[tuple[_ModuleCall, list[Value]]]) -> FirstDifference:
    for call, keys in matches:
        if not keys:
            return FirstDifference(f"the first value that the program does not have is made by {call.name}", call.where)
    return FirstDifference()


def _first_wrong_gradient(
    matches: Sequence[tuple[_ModuleCall, list[Value]]], program: _ProgramValues, limit: float
) -> FirstDifference:
    floor = 1e-3 * largest([call.result.grad for call, _ in matches if call.result.grad is not None])
    for call, keys in reversed(matches):
        expected = call.result.grad
        gradients = {key: g for key in keys if (g := program.cotangent(key)) is not None}
        if expected is None or not gradients:
            continue
        if not any(differs(g, expected, floor) <= limit for g in gradients.values()):
            return _wrong_gradient(call, _users(next(iter(gradients))))
    return FirstDifference()


def _wrong_gradient(call: _ModuleCall, users: Sequence[fx.Node]) -> FirstDifference:
    """Return that the gradient of a call's result differs. ``users``: the operators whose backward computes it."""
    targets = list(dict.fromkeys(str(user.target) for user in users))
    by = f", by the backward of {' and '.join(targets)}" if targets else ""
    place = facts(users[0]).where if len(targets) == 1 else call.where
    text = f"the first wrong gradient is that of the result of {call.name}{by}"
    return FirstDifference(text, place if str(place) else call.where)


@dataclass(frozen=True)
class _ModuleCall:
    """A call of the module's code, and one of its results."""

    name: str
    where: Where
    result: Tensor


class _Calls(TorchFunctionMode):
    """Records the result of every call of torch, and its gradient."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.calls: list[_ModuleCall] = []
        self.paths = {id(m): path for module in modules for path, m in module.named_modules()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = [x for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, Tensor)]
        for x in results:
            if x.is_floating_point() and x.requires_grad and not x.is_leaf:
                x.retain_grad()
                self.calls.append(_ModuleCall(_name(func), self._where(), x))
        return result

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
class _ProgramValues:
    """The values of the program, and their gradients."""

    step: UnsplitStep
    limit: float
    seen: dict[str, Tensor] = field(default_factory=dict)
    values: dict[Value, tuple[Tensor, float]] = field(default_factory=dict)

    def watch(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor) and node.op != "placeholder" and value.is_floating_point():
            self.seen[node.name] = value

    def equal(self, expected: Tensor) -> list[Value]:
        """Return the program's values that are equal to this one."""
        if not self.values:
            self._fill()
        size = float(expected.double().norm())
        tolerance = self.limit * max(expected.numel(), 1) ** 0.5
        candidates = [
            (key, x)
            for key, (x, norm) in self.values.items()
            if x.shape == expected.shape and abs(norm - size) <= tolerance * max(size, norm)
        ]
        return [key for key, x in candidates if differs(x, expected) <= self.limit]

    def _fill(self) -> None:
        local = self.step.program.local
        for key, part in local.parts.items():
            computed = self.step.program.values.get(origin(part))
            x = self.seen.get(computed.name) if computed is not None else None
            if x is not None and leaf(key[0]) is None:
                self.values[key] = x, float(x.double().norm())

    def cotangent(self, key: Value) -> Tensor | None:
        local = self.step.program.local
        computed = self.step.program.cotangents.get(origin(local.parts[key]))
        return None if computed is None else self.seen.get(computed.name)


def _users(key: Value) -> list[fx.Node]:
    """Return the operators whose backward contributes to the gradient of a value."""
    node, index = key
    direct = [u for u in node.users if u.op == "call_function" and not is_getitem(u)]
    picked = [w for u in node.users if is_getitem(u) and u.args[1] == index for w in u.users]
    return [u for u in (*direct, *picked) if u.op == "call_function" and needs_grad(u)]
