"""What somebody made to do harm: names, plans, folders, code. Nothing is executed, nothing is written outside."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import CompileError, Mesh

MARKER = "executed"
HARM = f"open('{MARKER}', 'w')"  # PyTorch refuses dots in names


class Outside:
    """A folder that nothing may change, next to the working directory of a test."""

    def __init__(self, top: Path) -> None:
        self.top, self.work, self.folder = top, top / "work", top / "outside"
        self.work.mkdir()
        (self.folder / "inner").mkdir(parents=True)
        (self.folder / "file.txt").write_bytes(b"precious")
        self.before = self._listing()

    def _listing(self) -> dict[str, bytes]:
        files = {str(f): f.read_bytes() if f.is_file() else b"folder" for f in self.folder.rglob("*")}
        return files | {str(f): b"" for f in self.top.iterdir()}

    def check(self) -> None:
        assert self._listing() == self.before
        assert not list(self.top.rglob(MARKER))


class Keyed(nn.Module):
    """A layer below a key of a ModuleDict."""

    def __init__(self, key: str = "safe", *, parameter: str = "", buffer: str = "", attribute: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleDict({key: nn.Linear(4, 4)})
        self.key, self.others = key, [name for name in (parameter, buffer, attribute) if name]
        if parameter:
            self.register_parameter(parameter, nn.Parameter(torch.ones(4)))
        if buffer:
            self.register_buffer(buffer, torch.ones(4))
        if attribute:
            setattr(self, attribute, torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[self.key](x)
        for name in self.others:
            x = x * getattr(self, name)
        return x


class AnyKey(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *args: Any, **batch: Any) -> Tensor:
        values = [x for x in [*args, *batch.values()] for x in (x.values() if isinstance(x, dict) else [x])]
        return self.layer(sum(values)).sum()


class KeyedLoss(nn.Module):
    def __init__(self, key: str) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({key: nn.Parameter(torch.ones(()))})

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x, labels) * next(iter(self.scales.values()))


def keyed_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4), torch.tensor([0, 1, 2, 3])


def compile_keyed(model: nn.Module, batch: Any = None, **options: Any) -> quintnet.CompiledProgram:
    if batch is None:
        batch, options = keyed_batch(), {"loss_fn": F.cross_entropy, **options}
    return quintnet.compile(model, Mesh(dp=2), batch, **options)


def refused(code: str, act: Callable[[], object]) -> str:
    with pytest.raises(CompileError) as caught:
        act()
    message = str(caught.value)
    assert caught.value.code == code, message
    assert len(message) < 5000 and all(line.isprintable() for line in message.split("\n"))
    return message


def check_dump(folder: Path) -> None:
    """Every line of generated code is code, and every other line a comment."""
    for file in (folder / "ranks").iterdir():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        assert {type(node) for node in tree.body} == {ast.FunctionDef}
        assert file.read_text(encoding="utf-8").count("\n") == len(file.read_text(encoding="utf-8").splitlines())
