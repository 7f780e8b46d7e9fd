"""Options of an optimizer's groups go on, also of groups without parameters on a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quintnet

LAYERS, WIDTH = 2, 6
Options = list[tuple[float, float]]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _groups(program: quintnet.CompiledProgram, by: str, model: nn.Module) -> list[dict[str, Any]]:
    """A group for each layer, and one without parameters. ``by``: whose parameters they are."""
    named = dict(model.named_parameters() if by == "model" else program.named_parameters())
    layers = [[p for name, p in named.items() if name.startswith(f"layers.{i}.")] for i in range(LAYERS)]
    empty: list[nn.Parameter] = []
    return [{"params": params, "lr": 0.1 * (i + 1)} for i, params in enumerate([*layers, empty])]


def _run(layout: dict[str, Any], folder: str, by: str, steps: int, whole: bool = False) -> tuple[Options, Options]:
    """The options after loading (if there is something to load), and at the end."""
    torch.manual_seed(0)
    model, x = Stack().double(), torch.randn(4, WIDTH, dtype=torch.float64)
    axes = {name: size for name, size in layout.items() if name in ("dp", "tp", "pp")}
    options = {name: value for name, value in layout.items() if name not in axes}
    program = quintnet.compile(model, quintnet.Mesh(**axes), (x, x), loss_fn=F.mse_loss, **options)
    groups = _groups(program, by, model)

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1.0, weight_decay=0.3)

    optimizer: Any = program.optimizer(make, groups) if whole else make(groups)

    def told() -> Options:
        return [(round(group["lr"], 6), round(group["weight_decay"], 6)) for group in optimizer.param_groups]

    begun = told()
    if (Path(folder) / "step-00000002").exists():
        program.load(folder, optimizer=optimizer)
        begun = told()
    for _ in range(steps):
        program.step((x, x))
        optimizer.step()
        optimizer.zero_grad()
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] *= 0.5
            group["weight_decay"] *= 0.9 - 0.1 * index
    if steps:
        program.save(folder, step=steps, optimizer=optimizer)
    return begun, told()


WANTED = [(0.025, 0.243), (0.05, 0.192), (0.075, 0.147)]


@pytest.mark.parametrize(("first", "then"), [({"dp": 2}, {"pp": 2}), ({"pp": 2}, {"dp": 2, "tp": 2, "zero": 3})])
def test_groups_without_parameters(first: dict[str, Any], then: dict[str, Any], tmp_path: Path) -> None:
    assert _run(first, str(tmp_path), "program", 2)[1] == WANTED
    assert _run(then, str(tmp_path), "program", 0)[0] == WANTED


@pytest.mark.slow
@pytest.mark.parametrize(("by", "whole"), [("program", False), ("model", False), ("program", True)])
def test_groups_by_layer_over_stages_in_processes(by: str, whole: bool, tmp_path: Path) -> None:
    run = (_run, 2)
    for _, end in quintnet.launch(*run, ({"pp": 2}, str(tmp_path), by, 2, whole), timeout=300):
        assert end == WANTED
    for begin, _ in quintnet.launch(*run, ({"pp": 2}, str(tmp_path), by, 0, whole), timeout=300):
        assert begin == WANTED
    assert _run({"tp": 2}, str(tmp_path), "program", 0, whole)[0] == WANTED


def test_another_number_of_groups_is_refused(tmp_path: Path) -> None:
    _run({"dp": 2}, str(tmp_path), "program", 2)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    program = quintnet.compile(Stack().double(), quintnet.Mesh(dp=2), (x, x), loss_fn=F.mse_loss)
    groups = [*_groups(program, "program", nn.Module()), {"params": []}]
    with pytest.raises(quintnet.CheckpointError, match="has 4 groups, and had 3") as raised:
        program.load(tmp_path, optimizer=torch.optim.AdamW(groups))
    assert raised.value.code == "QN602"
