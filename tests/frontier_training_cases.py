"""Cases of how modules are trained: modes, changes between steps, loss functions with parameters, several programs, and
what happens to gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .frontier import Case
from .frontier_small import Cases, Small, case_of, logits_with, refused, x_alone, xy


def training_cases() -> Cases:
    return {**_modes(), **_changes(), **_losses(), **_gradients()}


# -- modes


class _Distilled(nn.Module):
    """A student, and a frozen teacher in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.teacher = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.student(x), self.teacher(x))


class _Perceptual(nn.Module):
    """A loss with frozen features in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh()).eval().requires_grad_(False)
        self.scale = nn.Linear(8, 1)

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return self.scale(self.features(out).square()).mean() + F.cross_entropy(out, y)


def _always_dropped(net: Small, x: Tensor) -> Tensor:
    return F.dropout(net.hidden(x), 0.3).square().mean()


def _modes() -> Cases:
    def dropout() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    return {
        "distilled": Case(_Distilled, x_alone, evaluates=True),
        "a model in evaluation mode": Case(lambda: dropout().eval(), xy, F.cross_entropy, evaluates=True),
        "a model in training mode": Case(dropout, xy, F.cross_entropy, evaluates=True),
        "a loss in evaluation mode": logits_with(lambda: (_Perceptual(), {}), evaluates=True),
        "dropout that never stops": case_of(
            lambda net, x: F.dropout(net.hidden(x), 0.3).square().mean(), evaluates=True
        ),
    }


# -- changes between steps


def _weighed(net: Small, x: Tensor) -> Tensor:
    h = net.b(net.drop(net.a(x))) * net.table
    return h.square().mean() + net.beta * net.scales[0] * h.abs().mean()


def _at_step_1(change: Callable[[Any, bool], Any]) -> Callable[[nn.Module, int], None]:
    """``change(module, on)``: other settings in step 1, and the first ones again in step 2."""

    def before(module: nn.Module, step: int) -> None:
        change(module, step == 1)

    return before


def _progressive(module: nn.Module, step: int) -> None:
    module.a.requires_grad_(step > 0)  # type: ignore[union-attr]


def _another_part(module: nn.Module, step: int) -> None:
    if step == 1:
        torch.manual_seed(5)
        module.a = nn.Linear(4, 8).double()


def _values(step: int) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return {
        name: x.double() for name, x in nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).state_dict().items()
    }


def _loads(module: nn.Module, step: int) -> None:
    if step == 1:
        module.load_state_dict(_values(7))


def _averages(module: nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.9)


CHANGES: Mapping[str, Callable[[nn.Module, int], None]] = {
    "attribute": _at_step_1(lambda net, on: setattr(net, "beta", 3.0 if on else 0.5)),
    "list": _at_step_1(lambda net, on: net.scales.__setitem__(0, 2.0 if on else 1.0)),
    "constant": _at_step_1(lambda net, on: net.table.fill_(2.0 if on else 1.0)),
    "dropout": _at_step_1(lambda net, on: setattr(net.drop, "p", 0.1 if on else 0.5)),
    "mode": _at_step_1(lambda net, on: net.train(not on)),
    "requires_grad": _at_step_1(lambda net, on: net.b.weight.requires_grad_(not on)),
    "progressive": _progressive,
    "values in place": _averages,
}  # fmt: skip


def _changes() -> Cases:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    found = {f"changes: {name}": case_of(_weighed, before=before) for name, before in CHANGES.items()}
    return found | {
        "changes: another part": refused(
            case_of(_weighed, before=_another_part), "QN112", r"a\.weight, which is another"
        ),
        "changes: values loaded": Case(plain, xy, F.cross_entropy, _loads),
    }


# -- loss functions with parameters, several programs


def _with_scale(head: nn.Module, scale: Tensor, z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(head(z) * scale.exp(), y)


def _partial() -> Any:
    head, scale = nn.Linear(4, 4), nn.Parameter(torch.zeros(1))
    return functools.partial(_with_scale, head, scale), {"loss_fn.0": head, "loss_fn.1": scale}


def _keywords() -> Any:
    head, scale = nn.Linear(4, 4), nn.Parameter(torch.zeros(()))

    def of(z: Tensor, y: Tensor, *, head: nn.Module, scale: Tensor) -> Tensor:
        return _with_scale(head, scale, z, y)

    return functools.partial(of, head=head, scale=scale), {"loss_fn.head": head, "loss_fn.scale": scale}


def _temperature() -> Any:
    temperature = nn.Parameter(torch.tensor(0.5))
    return lambda z, y: F.cross_entropy(z / temperature, y), {"loss_fn.temperature": temperature}


def _uncertain() -> Any:
    weights = [nn.Parameter(torch.zeros(())), nn.Parameter(torch.ones(()))]

    def of(z: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(z, y), z.square().mean()
        return sum((-w).exp() * one + w for w, one in zip(weights, losses, strict=True))  # type: ignore[return-value]

    return of, {"loss_fn.weights_0": weights[0], "loss_fn.weights_1": weights[1]}


class _Criterion:
    """Not a module: it has one, and a parameter."""

    def __init__(self) -> None:
        self.head, self.scale = nn.Linear(4, 4), nn.Parameter(torch.zeros(()))

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        return _with_scale(self.head, self.scale, z, y)

    __call__ = loss


def _method(call: bool) -> Any:
    criterion = _Criterion()
    beside = {"loss_fn.head": criterion.head, "loss_fn.scale": criterion.scale}
    return criterion if call else criterion.loss, beside


class _Margin(nn.Module):
    """A margin layer: cosines with learned directions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        cosines = F.normalize(z) @ F.normalize(self.weight).t()
        return F.cross_entropy(8 * (cosines - 0.2 * F.one_hot(y, 4)), y)


def _closed_over(loss: nn.Module) -> Any:
    return lambda z, y: loss(z, y), {"loss_fn.loss": loss}


def _lengths(step: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step)
    return torch.randint(9, (8, 4 + 2 * (step % 2)), generator=dice), torch.randint(4, (8,), generator=dice)


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.table(ids).mean(1))


def _squares(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, F.one_hot(y, 4).to(out.dtype))


def _losses() -> Cases:
    scale = torch.ones(4, requires_grad=True)
    no_parameter = Case(lambda: Small(Small.hidden), xy, lambda z, y: F.cross_entropy(z * scale, y))
    two = Case(lambda: Small(Small.hidden), xy, F.cross_entropy)
    return {
        "loss: partial with a parameter": logits_with(_partial),
        "loss: partial by names": logits_with(_keywords),
        "loss: temperature": logits_with(_temperature),
        "loss: list of weights": logits_with(_uncertain),
        "loss: method": logits_with(lambda: _method(False)),
        "loss: object": logits_with(lambda: _method(True)),
        "loss: module": logits_with(lambda: (_Margin(), {})),
        "loss: closure over a module": logits_with(lambda: _closed_over(_Margin())),
        "loss: no parameter": refused(no_parameter, "QN105", r"shape \[4\] requires a gradient"),
        "programs: two losses": replace(two, others=(_squares,)),
        "programs: two lengths": Case(_Tokens, _lengths, F.cross_entropy, others=(F.cross_entropy,)),
        "programs: the module's optimizer": replace(two, of_module=True, others=(_squares,)),
    }


# -- gradients between step and optimizer


def _clip(program: Any, parameters: Sequence[Tensor]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 1e-2)


def _clip_by_program(program: Any, parameters: Sequence[Tensor]) -> None:
    if program is None:
        _clip(None, parameters)
    else:
        program.clip_grad_norm(1e-2)


def _trust(program: Any, parameters: Sequence[Tensor]) -> None:
    """As LAMB: each gradient as long as its parameter."""
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(parameter.norm() / parameter.grad.norm())


def _trust_numbers(program: Any, parameters: Sequence[Tensor]) -> None:
    """Likewise, by way of Python's numbers."""

    def whole(norm: Any) -> float:
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(whole(parameter.norm()) / whole(parameter.grad.norm()))


def _gradients() -> Cases:
    plain = Case(lambda: Small(Small.hidden), xy, F.cross_entropy)
    by_stage = {"pp2": "QN113"}
    return {
        "gradients: clipped": replace(plain, after=_clip, apart=by_stage, cause=r"program\.clip_grad_norm"),
        "gradients: clipped by the program": replace(plain, after=_clip_by_program),
        "gradients: scaled by norms": replace(plain, after=_trust),
        "gradients: scaled by numbers": replace(plain, after=_trust_numbers, apart=by_stage, cause="stay a tensor"),
    }
