"""checkpoint.reading.state_shapes: an optimizer's state of other shapes is refused before anything changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import quintnet
from quintnet_compiler.checkpoint.reading.plain_values import class_of_updates
from quintnet_compiler.checkpoint.reading.state_shapes import SavedState, StateShapes

MATRIX = torch.Size((4, 6))
OF_TORCH: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "ASGD": torch.optim.ASGD,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "AdamW": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "Adamax": torch.optim.Adamax,
    "LBFGS": torch.optim.LBFGS,
    "Muon": torch.optim.Muon,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda p: torch.optim.SGD(p, momentum=0.9),
}


class Momentum(torch.optim.SGD):
    """An optimizer that is not torch's: it has a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Options(torch.optim.AdamW):
    """torch's, with other options."""

    kind = "options"

    def __init__(self, parameters: Any, lr: float = 0.5) -> None:
        super().__init__(parameters, lr=lr, amsgrad=True)


class Sides(torch.optim.Optimizer):
    """Keeps matrices of both sides, whose shapes are not the parameter's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state |= {"steps": torch.zeros(()), "mean": torch.zeros_like(p), "left": torch.eye(p.shape[0])}
            state["left"] += p @ p.T if p.dim() == 2 else 0


def _saved(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> SavedState:
    group = optimizer.param_groups[0]
    options = {key: x for key, x in group.items() if key != "params"}
    state = optimizer.state.get(parameter, {})
    sizes = {key: x.shape for key, x in state.items() if isinstance(x, Tensor)}
    return SavedState("weight", options, sizes, parameter.shape)


def _stepped(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> tuple[Any, nn.Parameter]:
    parameter = nn.Parameter(torch.zeros(MATRIX))
    optimizer: Any = make([parameter])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = ((parameter - 1) ** 2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)
    return optimizer, parameter


@pytest.mark.parametrize("name", OF_TORCH)
def test_state_of_torchs_optimizers_fits_new_ones(name: str) -> None:
    trained, parameter = _stepped(OF_TORCH[name])
    saved = _saved(trained, parameter)
    new = OF_TORCH[name]([nn.Parameter(torch.zeros(MATRIX))])
    StateShapes(new).require_fitting(saved, new.param_groups[0]["params"][0], {})
    for key in saved.sizes.keys() if name != "LBFGS" else ():  # it joins all parameters
        wrong = SavedState("weight", saved.options, dict(saved.sizes) | {key: torch.Size((3, 3))}, MATRIX)
        with pytest.raises(quintnet.CheckpointError, match=rf"{key} of weight is \(3, 3\) in the checkpoint") as raised:
            StateShapes(new).require_fitting(wrong, new.param_groups[0]["params"][0], {})
        assert raised.value.code == "QN602"


def test_no_hook_of_a_step_is_called() -> None:
    called = []
    handle = register_optimizer_step_pre_hook(lambda *args: called.append(args))
    try:
        new = torch.optim.AdamW([nn.Parameter(torch.zeros(MATRIX))])
        saved = SavedState("weight", {"lr": 0.1}, {"exp_avg": MATRIX}, MATRIX)
        StateShapes(new).require_fitting(saved, new.param_groups[0]["params"][0], {})
    finally:
        handle.remove()
    assert not called


def test_others_are_compared_with_the_state_that_they_have() -> None:
    trained, parameter = _stepped(lambda p: Momentum(p, momentum=0.9))
    own = trained.state[parameter]
    for size in (MATRIX, torch.Size(())):  # a number may become a matrix later
        saved = SavedState("weight", {}, {"momentum_buffer": size, "history": torch.Size((9,))}, MATRIX)
        StateShapes(trained).require_fitting(saved, parameter, own)
    saved = SavedState("weight", {}, {"momentum_buffer": torch.Size((6, 4))}, MATRIX)
    with pytest.raises(
        quintnet.CheckpointError, match=r"\(6, 4\) in the checkpoint, and Momentum keeps it as \(4, 6\)"
    ):
        StateShapes(trained).require_fitting(saved, parameter, own)


def test_a_class_that_only_sets_options_is_as_torchs_own() -> None:
    for kind, updates in ((Options, torch.optim.AdamW), (Momentum, None), (Sides, None), (torch.optim.SGD,) * 2):
        assert class_of_updates(kind([nn.Parameter(torch.zeros(MATRIX))])) is updates
    trained, parameter = _stepped(Options)
    new, saved = Options([nn.Parameter(torch.zeros(MATRIX))]), _saved(trained, parameter)
    shapes = StateShapes(new)
    shapes.require_fitting(saved, parameter, {})
    shapes.note_unknown(saved, {})
    assert shapes.unknown == []
    for key in ("exp_avg", "max_exp_avg_sq"):
        wrong = SavedState("weight", saved.options, dict(saved.sizes) | {key: torch.Size((6,))}, MATRIX)
        with pytest.raises(quintnet.CheckpointError, match=rf"{key} of weight is \(6,\) in the checkpoint"):
            shapes.require_fitting(wrong, parameter, {})


@pytest.mark.parametrize(("steps", "size"), [(0, 16), (1, 16), (1, 4)])
def test_shapes_that_nothing_says_are_told(steps: int, size: int, tmp_path: Path) -> None:
    """Of an optimizer that is not torch's and is new, or has state of another shape."""
    batch = torch.randn(8, 4), torch.randn(8, 16)

    def make() -> tuple[Any, torch.optim.Optimizer, nn.Parameter]:
        program = quintnet.compile(nn.Linear(4, 16), quintnet.Mesh(), batch, loss_fn=F.mse_loss, check="off")
        return program, Sides(program.parameters()), next(iter(program.parameters()))

    program, optimizer, weight = make()
    program.step(batch)
    optimizer.step()
    optimizer.state[weight]["left"] = torch.full((size, size), 3.0)
    program.save(tmp_path, step=1, optimizer=optimizer)
    program, optimizer, weight = make()
    for _ in range(steps):
        program.step(batch)
        optimizer.step()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        program.load(tmp_path, optimizer=optimizer)
    texts = [str(warning.message) for warning in told if issubclass(warning.category, quintnet.CheckpointWarning)]
    line = f"Sides gets state of the shapes that the checkpoint has, which nothing here says: left of weight, ({size}, "
    assert [text.startswith(line) for text in texts] == ([] if (steps, size) == (1, 16) else [True])
    assert all(text.endswith("and 1 more") is (not steps) for text in texts)  # of the bias
    assert torch.equal(optimizer.state[weight]["left"], torch.full((size, size), 3.0))


@pytest.mark.parametrize(("key", "shape"), [("exp_avg", (3,)), ("exp_avg_sq", (4, 16)), ("step", (16, 4))])
def test_a_load_that_is_refused_changes_nothing(key: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    def make(mesh: quintnet.Mesh) -> tuple[Any, torch.optim.Optimizer]:
        program = quintnet.compile(nn.Linear(4, 16), mesh, batch, loss_fn=F.mse_loss)
        return program, torch.optim.AdamW(program.parameters())

    batch = torch.randn(8, 4), torch.randn(8, 16)
    program, optimizer = make(quintnet.Mesh())
    program.step(batch)
    optimizer.step()
    weight = next(iter(program.parameters()))
    optimizer.state[weight][key] = torch.zeros(shape)
    program.save(tmp_path, step=1, optimizer=optimizer)
    program, optimizer = make(quintnet.Mesh(tp=2))
    before = [p.full_tensor().clone() for p in program.parameters()]
    with pytest.raises(quintnet.CheckpointError, match=f"{key} of weight is") as raised:
        program.load(tmp_path, optimizer=optimizer)
    assert raised.value.code == "QN602"
    assert not optimizer.state
    assert all(torch.equal(a, b.full_tensor()) for a, b in zip(before, program.parameters(), strict=True))
