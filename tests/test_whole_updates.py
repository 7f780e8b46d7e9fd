"""Optimizers of whole parameters in processes are as in the unsplit module, or refused at their first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import quintnet

Layout = dict[str, Any]
TP, PP, ALONE = {"tp": 2}, {"pp": 2}, {"dp": 2}
BATCH = (
    torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    torch.zeros(8, 4, dtype=torch.float64),
)


class Each(optim.Optimizer):
    """Plain descent by what ``update`` makes of the gradients of a group."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            some = [p for p in group["params"] if p.grad is not None]
            for p, update in zip(some, self.updates(group, [p.grad for p in some]), strict=True):
                p.sub_(update * group["lr"])

    def updates(self, group: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
        raise NotImplementedError


class RateBesideTheFirst(Each):
    """Keeps a tensor on the device of the first parameter of a group, wherever that is."""

    def updates(self, group: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
        scale = torch.tensor(0.5, dtype=torch.float64, device=group["params"][0].device)
        updates = [gradient.clone() for gradient in gradients]
        if updates:
            torch._foreach_mul_(updates, scale)
        return updates


class Noisy(Each):
    def updates(self, group: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
        return [gradient + torch.randn_like(gradient) for gradient in gradients]


class OfAll(Each):
    """Divides by the norm of all gradients."""

    def updates(self, group: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        return [gradient / norm for gradient in gradients]


class Averaged(Each):
    """Evaluates with an average, as optimizers without a schedule do."""

    def updates(self, group: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
        for p in group["params"]:
            if p.grad is not None:
                self.state[p].setdefault("average", p.clone()).lerp_(p, 0.3)
        return gradients

    @torch.no_grad()
    def _exchange(self) -> None:
        for p, state in self.state.items():
            kept = p.clone()
            p.copy_(state["average"])
            state["average"].copy_(kept)

    train = eval = _exchange


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4)).double()


def _program(layout: Layout) -> quintnet.CompiledProgram:
    axes = {name: size for name, size in layout.items() if name in ("dp", "tp", "pp")}
    options = {name: x for name, x in layout.items() if name not in axes}
    return quintnet.compile(_net(), quintnet.Mesh(**axes), BATCH, loss_fn=F.mse_loss, check="off", **options)


Run = Callable[[Layout | None], dict[str, Any]]


def _values(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().tolist() for name, p in named}


def _three_steps(kind: type[Each], layout: Layout | None, whole: bool) -> dict[str, Any]:
    """Parameters after three steps by name, or the error; in evaluation mode, if the optimizer has one."""
    if layout is None:
        model = _net()
        optimizer: Any = kind(model.parameters())
        named, step = model.named_parameters, lambda: F.mse_loss(model(BATCH[0]), BATCH[1]).backward()
    else:
        program = _program(layout)
        optimizer = program.optimizer(kind) if whole else kind(program.parameters())
        named, step = program.named_parameters, lambda: program.step(BATCH)  # type: ignore[assignment,return-value]
    torch.manual_seed(1)
    try:
        for _ in range(3):
            step()
            optimizer.step()
            optimizer.zero_grad()
    except quintnet.RunError as error:
        return {"error": str(error)}
    if kind is Averaged:
        optimizer.eval()
        averaged = _values(named())
        optimizer.train()
        return {**averaged, **{f"{name} in training": x for name, x in _values(named()).items()}}
    return _values(named())


def _several(layout: Layout) -> list[dict[str, Any]]:
    cases = [(RateBesideTheFirst, True), (Averaged, True), (Noisy, True), (OfAll, True), (Noisy, False)]
    return [_three_steps(kind, layout, whole) for kind, whole in cases]


def _equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert "error" not in found and found
    for name, x in found.items():
        torch.testing.assert_close(torch.tensor(x), torch.tensor(wanted[name]), rtol=1e-6, atol=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", [TP, PP], ids=str)
def test_whole_updates_in_processes(layout: Layout) -> None:
    for rate, average, noisy, of_all, split in quintnet.launch(_several, 2, args=(layout,), timeout=300):
        _equal(rate, _three_steps(RateBesideTheFirst, None, True))
        _equal(average, _three_steps(Averaged, None, True))
        assert "QN113" in noisy["error"] and "drawn random numbers" in noisy["error"]
        assert "QN113" in of_all["error"] and "with an optimizer of its own" in of_all["error"]
        drawn = "of this rank's pipeline stages" if layout == PP else "for its parts"
        assert "QN113" in split["error"] and drawn in split["error"]


def test_noise_over_data_ranks_is_that_of_the_unsplit_module() -> None:
    """What the refusal says."""
    for found in quintnet.launch(_three_steps, 2, args=(Noisy, ALONE, False), timeout=300):
        _equal(found, _three_steps(Noisy, None, False))


@pytest.mark.parametrize("kind", [RateBesideTheFirst, Noisy, OfAll, Averaged])
def test_in_one_process_it_is_the_optimizer_itself(kind: type[Each]) -> None:
    _equal(_three_steps(kind, {"dp": 2, "tp": 2, "zero": 3}, True), _three_steps(kind, None, True))


def test_state_dicts_in_one_process() -> None:
    program = _program(TP)
    first = program.optimizer(lambda p: optim.AdamW(p, lr=0.1))
    program.step(BATCH)
    first.step()
    second = program.optimizer(lambda p: optim.AdamW(p, lr=0.3))
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == 0.1
    for p in program.parameters():
        assert torch.equal(second.state[p]["exp_avg"], first.state[p]["exp_avg"])


def _resumed(folder: str) -> list[float]:
    """Whether ranks agree about what was compared when only some have state."""
    program = _program(PP)
    optimizer = program.optimizer(lambda p: optim.SGD(p, lr=0.1, momentum=0.9))
    losses = [float(program.step(BATCH))]
    optimizer.step()
    program.save(folder, step=1, optimizer=optimizer)
    again = program.optimizer(lambda p: optim.SGD(p, lr=0.5, momentum=0.9))
    program.load(folder, optimizer=again)
    for _ in range(2):
        again.zero_grad()
        losses.append(float(program.step(BATCH)))
        again.step()
    return losses


def test_a_run_that_goes_on_is_not_compared_again(tmp_path: Path) -> None:
    model = _net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wanted = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(BATCH[0]), BATCH[1])
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
    for losses in quintnet.launch(_resumed, 2, args=(str(tmp_path),), timeout=300):
        assert losses == pytest.approx(wanted, rel=1e-9)


def _norm(layout: Layout) -> float:
    program = _program(layout)
    program.step(BATCH)
    return float(program.grad_norm())


def test_the_norm_of_all_gradients() -> None:
    model = _net()
    F.mse_loss(model(BATCH[0]), BATCH[1]).backward()
    wanted = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert _norm({"dp": 2, "tp": 2, "zero": 3}) == pytest.approx(wanted, rel=1e-9)
    assert quintnet.launch(_norm, 2, args=(PP,), timeout=300) == pytest.approx([wanted] * 2, rel=1e-9)
