"""Every call that takes a folder or a file takes path-like objects, and refuses what is no path with an error."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quintnet
from quintnet_compiler.api.cluster_text import read_cluster
from quintnet_compiler.api.compiled_program import CompiledProgram
from quintnet_compiler.core.files import path_of
from quintnet_compiler.cost_models.calibration import Calibration
from quintnet_compiler.ir.plan import read_plan
from quintnet_compiler.training.resume.last_run import goes_on

BATCH = (torch.randn(8, 6), torch.randn(8, 3))


@dataclass(frozen=True)
class Named(os.PathLike[str]):
    """A path-like object of another library."""

    path: Any

    def __fspath__(self) -> str:
        """Return what it was made with, or raise it."""
        if isinstance(self.path, Exception):
            raise self.path
        return self.path


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    return quintnet.compile(nn.Linear(6, 3), quintnet.Mesh(dp=1), BATCH, loss_fn=F.mse_loss, check="off")


def _compile(**options: Any) -> CompiledProgram:
    return quintnet.compile(nn.Linear(6, 3), quintnet.Mesh(dp=1), loss_fn=F.mse_loss, **options)


def _saved(program: CompiledProgram, folder: Any) -> None:
    program.save(folder, step=1)
    program.save_async(folder, step=2).result()
    program.reserve(folder)
    assert program.load(folder).step == 2 and goes_on(folder)


def _exported(program: CompiledProgram, folder: Any) -> None:
    program.save_pretrained(folder)
    program.load_pretrained(folder)


def _planned(program: CompiledProgram, path: Any) -> None:
    quintnet.Plan(seed=5).save(path)
    assert read_plan(path).seed == 5


def _simulated(program: CompiledProgram, path: Any) -> None:
    program.simulate(quintnet.Cluster("h100", gpus_per_node=1)).save(path)
    assert quintnet.Timeline.load(path).ranks == 1


def _configured(program: CompiledProgram, path: Any) -> None:
    if isinstance(path, Named) and isinstance(path.path, str):
        Path(path).write_text("model: a:b\nbatch_size: 3\n")
    assert quintnet.TrainConfig.read(path).batch_size == 3


ROUND_TRIPS: Mapping[str, Callable[[CompiledProgram, Any], object]] = MappingProxyType(
    {
        "checkpoints": _saved,
        "weights": _exported,
        "plan": _planned,
        "timeline": _simulated,
        "configuration": _configured,
        "dump": lambda program, folder: program.dump(folder),
        "cache": lambda program, folder: _compile(cache=folder),
        "log": lambda program, folder: quintnet.JsonLogger(folder),
        "time": lambda program, folder: quintnet.RunTime.read(folder),
    }
)
READERS: Mapping[str, Callable[[CompiledProgram, Any], object]] = MappingProxyType(
    {
        "checkpoint": lambda program, path: program.load(path),
        "weights": lambda program, path: program.load_pretrained(path),
        "resumed run": lambda program, path: goes_on(path),
        "plan": lambda program, path: _compile(plan=path),
        "calibration": lambda program, path: Calibration.load(path),
        "timeline": lambda program, path: quintnet.Timeline.load(path),
        "device": lambda program, path: quintnet.Cluster(path),
        "cluster": lambda program, path: read_cluster(path),
    }
)


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_path_like_objects(name: str, program: CompiledProgram, tmp_path: Path) -> None:
    ROUND_TRIPS[name](program, Named(str(tmp_path / "new")))


@pytest.mark.parametrize("given", [Named(3), 3.5], ids=str)
@pytest.mark.parametrize("call", [*ROUND_TRIPS.items(), *READERS.items()], ids=lambda call: call[0])
def test_what_is_no_path(call: Any, given: Any, program: CompiledProgram) -> None:
    with pytest.raises(quintnet.QuintNetError):
        call[1](program, given)


def test_the_path_of_a_device(tmp_path: Path) -> None:
    assert quintnet.Cluster(Named("h100")) == quintnet.Cluster("h100") == read_cluster(Named("h100"))


@pytest.mark.parametrize(
    ("given", "text"),
    [(Named(ValueError("closed")), "Named: closed"), (b"x", "bytes"), (None, "NoneType"), ("a\0b", r"'a\\x00b'")],
    ids=str,
)
def test_the_text_says_what_was_given(given: Any, text: str) -> None:
    with pytest.raises(quintnet.CompileError, match=rf"QN701(?s:.*)this is no path: {text}"):
        path_of(given, "QN701")
