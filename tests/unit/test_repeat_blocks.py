"""Programs of many equal blocks: traced once or each, they are captured alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quintnet_compiler.capture import capture as capturing
from quintnet_compiler.capture.capture import MIN_EQUAL_BLOCKS, capture
from quintnet_compiler.capture.repeat_blocks import with_all_blocks
from quintnet_compiler.compat.torch import without_torch_function
from quintnet_compiler.guards.columns import Absent, PlainValues
from quintnet_compiler.guards.hooks import Trained
from quintnet_compiler.ir.program import Captured

DEPTH = MIN_EQUAL_BLOCKS + 1


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.inner, self.outer = number, nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, scale: float = 0.5) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x))) * scale


class Squares(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(4, 4)
        self.linear.factor = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).square()


class ByNumber(Block):
    def forward(self, x: Tensor, scale: float = 0.5) -> Tensor:
        return super().forward(x) / (1 + self.number // 5)


class ByNumberUnseen(Block):
    def forward(self, x: Tensor, scale: float = 0.5) -> Tensor:
        return super().forward(x) / (1 + vars(self)["number"])


class Returns(Block):
    def forward(self, x: Tensor, scale: float = 0.5) -> Any:
        made = self.inner(x)
        return x + self.outer(torch.tanh(made)), made.mean()


class Normed(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, scale: float = 0.5) -> Tensor:
        out: Tensor = self.norm(super().forward(x))
        return out


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


class OwnDerivative(Block):
    def forward(self, x: Tensor, scale: float = 0.5) -> Tensor:
        out: Tensor = Doubled.apply(super().forward(x, scale))
        return out


class Collects(Block):
    def forward(self, x: Tensor, into: Any = None) -> Tensor:  # type: ignore[override]
        made = self.inner(x)
        into.found.append(made.square().mean())
        return x + self.outer(torch.tanh(made))


class Stack(nn.Module):
    def __init__(self, kinds: Callable[[int], nn.Module], depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(kinds, range(depth)))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class AllResults(Stack):
    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return torch.stack(found).square().mean()


class SideResults(Stack):
    def forward(self, x: Tensor) -> Tensor:
        aside = []
        for layer in self.layers:
            x, more = layer(x)
            aside.append(more)
        return self.head(x).square().mean() + sum(aside)


class Collector:
    def __init__(self) -> None:
        self.found: list[Tensor] = []


class Collecting(Stack):
    def forward(self, x: Tensor) -> Tensor:
        into = Collector()
        for layer in self.layers:
            x = layer(x, into)
        return self.head(x).square().mean() + sum(into.found)


class Hooked(Stack):
    """What hooks of inner modules see, while forward runs, is a part of the loss."""

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        handles = [layer.inner.register_forward_hook(lambda m, a, made: found.append(made.mean()) or None)
                   for layer in self.layers]  # fmt: skip
        for layer in self.layers:
            x = layer(x)
        for handle in handles:
            handle.remove()
        return self.head(x).square().mean() + sum(found)


class HookedOnce(Stack):
    """Registers its hooks when it is called first, as transformers does."""

    ready = False

    def forward(self, x: Tensor) -> Tensor:
        self.found: list[Tensor] = []
        if not self.ready:
            self.ready = True
            for layer in self.layers:
                layer.inner.register_forward_hook(lambda m, a, made: self.found.append(made.mean()))
        for layer in self.layers:
            x = layer(x)
        found = sum(self.found)
        del self.found
        return self.head(x).square().mean() + found


class Scaled(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, 0.5 if i != 4 else 0.25)
        return self.head(x).square().mean()


class Shared(Stack):
    """Blocks use a module that is not theirs, and of which Python alone knows."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.gate = nn.Linear(4, 4)
        for layer in self.layers:
            layer.inner.register_forward_pre_hook(lambda m, given: (self.gate(given[0]),))


def _halved(module: nn.Module, given: Any, made: Tensor) -> Tensor:
    return made * module.factor


def _hook_on_a_parameter() -> Stack:
    model = Stack(Block)
    model.layers[4].inner.weight.register_hook(lambda grad: 2 * grad)
    return model


def _text(captured: Captured) -> list[str]:
    found = []
    for node in captured.graph.nodes:
        made = node.meta.get("val")
        several = made if isinstance(made, (list, tuple)) else (made,)
        looks = [(tuple(map(str, x.shape)), x.dtype) if isinstance(x, Tensor) else str(x) for x in several]
        places = [node.meta.get(name) for name in ("quintnet_leaf", "quintnet_where")]
        found.append(f"{node.name} = {node.op} {node.target} {node.args} {node.kwargs}: {looks} {places}")
    return found


def _guarded(captured: Captured) -> Any:
    known = captured.guards
    assert known is not None
    values, absences = (
        next(guard for guard in known.reads if isinstance(guard, kind)) for kind in (PlainValues, Absent)
    )
    rows = sorted({(label, name, repr(value)) for label, _, name, value in values.rows})
    trained = next(guard for guard in known.fixed if isinstance(guard, Trained))
    same, absent = ([label for label, *_ in guard.rows] for guard in (known.same, absences))
    return rows, sorted(same), sorted(absent), sorted(trained.flags.names)


def _captures(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[Captured, Captured, bool]:
    """The model captured with blocks traced once where that may be, and with each traced; and whether it was."""
    repeated: list[Captured | None] = []

    def noticed(*given: Any) -> Captured | None:
        repeated.append(with_all_blocks(*given))
        return repeated[-1]

    monkeypatch.setattr(capturing, "with_all_blocks", noticed)
    batch = (torch.randn(4, 4),)
    return capture(model, batch), capture(model, batch, each=True), any(one is not None for one in repeated)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "model",
    [Stack(Block), Stack(lambda i: Block(i) if i % 2 else Squares(i), 2 * DEPTH)],
    ids=["equal", "alternating"],
)
def test_equal_blocks_are_traced_once_and_are_all_there(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    found, each, once = _captures(model, monkeypatch)
    assert once and _text(found) == _text(each)
    assert _guarded(found) == _guarded(each)
    assert list(found.tensors) == list(each.tensors) and not found.like
    assert found.guards is not None and found.guards.hold()


def test_settings_of_blocks_that_were_not_traced_are_guarded() -> None:
    model = Stack(Squares)
    for layer in model.layers:
        layer.linear.register_forward_hook(_halved)
    found = capture(model, (torch.randn(4, 4),))
    assert found.guards is not None and found.guards.hold()
    model.layers[4].linear.factor = 2.0
    assert not found.guards.hold() and "layers.4.linear.factor" in found.guards.broken()[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "model",
    [
        Stack(ByNumber), Stack(ByNumberUnseen), AllResults(Block), SideResults(Returns), Stack(Normed),
        Stack(OwnDerivative), Collecting(Collects), Hooked(Block), HookedOnce(Block), Scaled(Block), Shared(),
        _hook_on_a_parameter(),
    ],
    ids=lambda model: f"{type(model).__name__}-{type(model.layers[0]).__name__}",
)  # fmt: skip
def test_what_depends_on_the_number_of_blocks_is_traced(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    found, each, once = _captures(model, monkeypatch)
    assert not once and _text(found) == _text(each)
    if isinstance(model, HookedOnce):
        assert not any(layer.inner._forward_hooks for layer in model.layers)


class Penalised(Stack):
    """Reads the parameters of all blocks, outside of them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(p.square().sum() for p in self.layers.parameters())


class Tries(Stack):
    """Goes on after any error."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        with contextlib.suppress(Exception):
            loss = loss + self.layers[4].inner.weight.sum()
        return loss


class BelowModes(Stack):
    """Uses a parameter where no function of torch can be watched."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        with without_torch_function():
            return loss + self.layers[4].inner.weight.sum()


class Assigns(Stack):
    """Puts another tensor in the place of a buffer of a block in the middle."""

    def __init__(self) -> None:
        super().__init__(Block)
        for layer in self.layers:
            layer.inner.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        self.layers[4].inner.seen = self.layers[4].inner.seen + 1
        return loss


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [Penalised(Block), BelowModes(Block), Tries(Block), Assigns()], ids=lambda model: type(model).__name__
)
def test_parts_of_blocks_that_are_used_elsewhere_are_in_the_trace(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, each, _ = _captures(model, monkeypatch)
    assert _text(found) == _text(each) and list(found.tensors) == list(each.tensors)
    assert found.changed == each.changed and _guarded(found) == _guarded(each)


@pytest.mark.slow
def test_torch_export_is_not_told_of_parts_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    export = torch.export.export

    def noticed(step: nn.Module, *given: Any, **more: Any) -> Any:
        told.append(len(dict(step.named_parameters())))
        return export(step, *given, **more)

    monkeypatch.setattr(torch.export, "export", noticed)
    batch = (torch.randn(4, 4),)
    capture(Stack(Block), batch)
    assert told == [3 * 4 + 2]  # the first block, the second and the last, and the head
    told.clear()
    capture(Penalised(Block), batch)
    assert told == [3 * 4 + 2, DEPTH * 4 + 2]
