"""Loss and every gradient of every dp x tp x pp layout equal those of the unsplit model."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass

import pytest
import torch

from quintnet_compiler.capture.capture import capture
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.driver.compiler import Runner, compile_program
from quintnet_compiler.driver.pipeline import Request
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ir.program import Captured
from quintnet_compiler.ops.rules.table import RULES

from .models import CASES, build, reference, worst_error
from .random_plans import gradients

pytestmark = pytest.mark.usefixtures("shared_captures")

torch.set_num_threads(1)
TRACED, ROWS = 4, 16  # the model is traced on another batch size than it runs on


@dataclass(frozen=True)
class Layout:
    """One way to train: axis sizes, microbatches, and whether tensor parallelism splits the sequence."""

    dp: int
    tp: int
    pp: int
    microbatches: int
    sequence_parallel: bool
    schedule: str

    def __str__(self) -> str:
        split = "sp" if self.sequence_parallel else "whole"
        return f"dp{self.dp}-tp{self.tp}-pp{self.pp}-m{self.microbatches}-{split}-{self.schedule}"


def _layouts() -> list[Layout]:
    found = []
    for dp, tp, pp in itertools.product((1, 2, 4, 8), repeat=3):
        if dp * tp * pp in (2, 4, 8):
            for microbatches in (1, 2, 4, 8):
                if ROWS % (dp * microbatches) == 0:
                    schedule = "gpipe" if (dp + pp + microbatches) % 3 == 0 else "1f1b"
                    for split in (True, False) if tp > 1 else (True,):
                        found.append(Layout(dp, tp, pp, microbatches, split, schedule))
    return found


@functools.cache
def _captured(name: str) -> tuple[torch.nn.Module, Captured]:
    model = build(name)
    return model, capture(model, CASES[name].batch(TRACED), CASES[name].loss_fn)


@functools.cache
def _reference(name: str):  # type: ignore[no-untyped-def]
    return reference(_captured(name)[0], CASES[name].batch(ROWS), CASES[name].loss_fn)


def _check(name: str, layout: Layout) -> None:
    captured = _captured(name)[1]
    mesh = Mesh(pp=layout.pp, dp=layout.dp, tp=layout.tp)
    plan = Plan(microbatches=layout.microbatches, schedule=layout.schedule, sequence_parallel=layout.sequence_parallel)
    compiled = compile_program(captured, Request(mesh, plan, ROWS, torch.device("cpu"), RULES), Runner())
    loss, found = gradients(compiled.program, mesh, dict(captured.tensors), CASES[name].batch(ROWS))
    expected_loss, expected = _reference(name)
    error, worst = worst_error(found, expected)
    # Hugging Face models compute their loss in float32 whatever the model's dtype
    limit = 1e-6 if name in ("hf_gpt2", "hf_llama") else 1e-9
    assert abs(float(loss - expected_loss)) / abs(float(expected_loss)) < limit, (name, str(layout))
    assert error < CASES[name].tolerance, (name, str(layout), worst, error)


def _sample(name: str, count: int) -> list[tuple[str, Layout]]:
    return [(name, layout) for layout in random.Random(name).sample(_layouts(), count)]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "layout"), [pair for name in sorted(CASES) for pair in _sample(name, 4)], ids=str)
def test_layout_equals_the_unsplit_model(name: str, layout: Layout) -> None:
    _check(name, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", _layouts(), ids=str)
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_layout_equals_the_unsplit_model(name: str, layout: Layout) -> None:
    _check(name, layout)
