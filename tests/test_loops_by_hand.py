"""Loops that change parameters and gradients by hand, in processes: equal to the same loop in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

STEPS = 4
RATE = 0.1


@dataclass
class Loop:
    """A model with gradients of this step, and its optimizer. ``step``: computes the gradients again."""

    model: nn.Sequential
    parameters: Callable[[], Iterable[Any]]
    optimizer: torch.optim.Optimizer
    step: Callable[[], Any]
    number: int


def _add_noise(loop: Loop) -> None:
    for p in loop.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
    loop.optimizer.step()


def _reset_layers(loop: Loop) -> None:
    loop.optimizer.step()
    if loop.number == 1:
        loop.model[2].reset_parameters()
        loop.model[0].reset_parameters()


def _perturb_weights(loop: Loop) -> None:
    loop.optimizer.step()
    with torch.no_grad():
        for p in loop.parameters():
            p.mul_(1 + 0.01 * torch.rand_like(p)).add_(torch.empty_like(p).uniform_(-0.01, 0.01))


def _sharpness_aware(loop: Loop) -> None:
    before = [p.detach().clone() for p in loop.parameters()]
    norm = nn.utils.get_total_norm([p.grad for p in loop.parameters()])
    with torch.no_grad():
        for p in loop.parameters():
            p.add_(p.grad * (0.05 / norm))
    loop.optimizer.zero_grad()
    loop.step()
    with torch.no_grad():
        for p, value in zip(loop.parameters(), before, strict=True):
            p.copy_(value)
    loop.optimizer.step()


def _centred_gradients(loop: Loop) -> None:
    for p in loop.parameters():
        p.grad = p.grad - p.grad.mean(dim=-1, keepdim=True)
    loop.optimizer.step()


def _new_data(loop: Loop) -> None:
    for p in loop.parameters():
        p.data = p.data - RATE * p.grad


def _norm_of_all(loop: Loop) -> None:
    norm = torch.stack([p.grad.norm() for p in loop.parameters()]).norm()
    for p in loop.parameters():
        p.grad.mul_(1 / (1 + norm))
    loop.optimizer.step()


def _largest_of_all(loop: Loop) -> None:
    largest = max(p.grad.detach().abs().max() for p in loop.parameters())
    torch._foreach_mul_([p.grad for p in loop.parameters()], 1 / (1 + largest))
    loop.optimizer.step()


def _without_conflicts(loop: Loop) -> None:
    first = [p.grad.clone() for p in loop.parameters()]
    loop.optimizer.zero_grad()
    loop.step()
    for p, other in zip(loop.parameters(), first, strict=True):
        p.grad.sub_(other * ((p.grad * other).sum() / (2 * other.square().sum())))
    loop.optimizer.step()


def _frozen_rows(loop: Loop) -> None:
    for p in loop.parameters():
        p.grad[:3] = 0
        p.grad[..., 1].mul_(2)
    loop.optimizer.step()


def _signs_of_all(loop: Loop) -> None:
    signs = torch.cat([p.grad.flatten() for p in loop.parameters()]).sign()
    for p, part in zip(loop.parameters(), signs.split([p.numel() for p in loop.parameters()]), strict=True):
        p.grad.copy_(part.view_as(p))
    loop.optimizer.step()


BODIES = [
    _add_noise,
    _reset_layers,
    _perturb_weights,
    _sharpness_aware,
    _centred_gradients,
    _new_data,
    _norm_of_all,
    _largest_of_all,
    _without_conflicts,
    _signs_of_all,
    _frozen_rows,
]
OF_ALL_STAGES = {body.__name__ for body in BODIES} - {
    "_centred_gradients",
    "_new_data",
    "_without_conflicts",
    "_signs_of_all",
    "_frozen_rows",
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double()


def _batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 8, generator=random, dtype=torch.float64), torch.randint(4, (8,), generator=random))
        for _ in range(STEPS)
    ]


def _plain(body: Callable[[Loop], None]) -> dict[str, Tensor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for number, (x, labels) in enumerate(_batches()):

        def step(x: Tensor = x, labels: Tensor = labels) -> None:
            F.cross_entropy(model(x), labels).backward()

        optimizer.zero_grad()
        step()
        body(Loop(model, model.parameters, optimizer, step, number))
    return dict(model.state_dict())


def _compiled(axes: dict[str, int], options: dict[str, Any]) -> dict[str, dict[str, Tensor] | str]:
    """Return each loop's parameters by name, those of this rank's stages, or the error that refused the loop."""
    states: dict[str, dict[str, Tensor] | str] = {}
    for body in BODIES:
        try:
            states[body.__name__] = _trained(body, axes, options)
        except quintnet.RunError as error:
            states[body.__name__] = str(error)
    return states


def _trained(body: Callable[[Loop], None], axes: dict[str, int], options: dict[str, Any]) -> dict[str, Tensor]:
    model = _model()
    program = quintnet.compile(model, Mesh(**axes), _batches()[0], loss_fn=F.cross_entropy, **options)
    optimizer = torch.optim.SGD(program.parameters(), RATE)
    for number, batch in enumerate(_batches()):

        def step(batch: tuple[Tensor, Tensor] = batch) -> None:
            program.step(batch)

        optimizer.zero_grad()
        step()
        body(Loop(model, program.parameters, optimizer, step, number))
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in program.state_dict().items()}


LAYOUTS: list[Any] = [({"tp": 2}, {}), ({"dp": 2}, {"zero": 3}), ({"dp": 2}, {}), ({"pp": 2}, {})]


@pytest.mark.slow  # tests/unit/test_local_values.py shows where numbers come from
@pytest.mark.parametrize(("axes", "options"), LAYOUTS)
def test_parameters_are_those_of_the_plain_loop(axes: dict[str, int], options: dict[str, Any]) -> None:
    expected = {body.__name__: _plain(body) for body in BODIES}
    for states in quintnet.launch(_compiled, 2, (axes, options), timeout=300):
        refused = {name for name, state in states.items() if isinstance(state, str) and "QN113" in state}
        assert refused == (OF_ALL_STAGES if "pp" in axes else set())
        for name in states.keys() - refused:
            assert states[name], name
            for key, value in states[name].items():
                torch.testing.assert_close(value, expected[name][key], atol=1e-9, rtol=1e-9, msg=f"{name}: {key}")
