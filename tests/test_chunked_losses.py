"""Losses in parts of their rows: the unsplit model's values, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quintnet
from benchmarks.planned_memory import allocated
from quintnet import Mesh

from .language import (
    LENGTH,
    LOSSES,
    MANY,
    ROWS,
    WIDTH,
    Language,
    batch,
    capped,
    compiled,
    many,
    products,
)
from .models import CASES, build

pytestmark = pytest.mark.usefixtures("shared_captures")
torch.set_num_threads(1)
aten = torch.ops.aten


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_parts_equals_the_unsplit_one(name: str) -> None:
    program = compiled(LOSSES[name], {"dp": 2}, loss_chunks=3, microbatches=2)
    rows = ROWS // 4 * (LENGTH - (name == "shifted"))
    each = -(-rows // 3)
    assert products(program) == [each, each, rows - 2 * each]
    assert program.verify().ok


LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2}, {}),
    ({"tp": 4}, {"microbatches": 2}),
    ({"pp": 2, "tp": 2}, {"microbatches": 4}),
    ({"pp": 2, "dp": 2}, {"microbatches": 2, "schedule": "zb-h1"}),
    ({"dp": 2, "tp": 2}, {"zero": 3, "microbatches": 2}),
    ({"cp": 2}, {"zero": 1, "zero_axes": ("cp",)}),
    ({"dp": 2}, {"recompute": "full", "microbatches": 2}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "not tied"])
@pytest.mark.parametrize(("axes", "options"), LAYOUTS, ids=str)
def test_layouts(axes: dict[str, int], options: dict[str, Any], tied: bool) -> None:
    program = compiled(capped, axes, tied, loss_chunks=4, **options)
    assert len(products(program)) == 4
    assert program.verify().ok


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [
        ("gpt", {"pp": 2, "dp": 2}, {"microbatches": 2}),
        ("hf_llama", {"dp": 2}, {"zero": 3, "microbatches": 2}),
        ("gpt", {"dp": 2}, {"precision": "bf16", "zero": 1}),
    ],
    ids=str,
)
def test_models(name: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    case, dtype = CASES[name], torch.float32 if "precision" in options else torch.float64
    program = quintnet.compile(
        build(name, dtype), Mesh(**axes), case.batch(8), loss_fn=case.loss_fn, loss_chunks=3, **options
    )
    assert len(products(program)) == 3 and program.verify().ok


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [{"dp": 1}, {"tp": 2}], ids=str)
def test_one_part_of_the_logits_is_held_at_a_time(axes: dict[str, int]) -> None:
    """Of logits, their scores and the gradients of both, at least two are held at once; in parts, as many parts. What
    else is held: the gradient of the table, and a term of it."""
    plain, parts = (compiled(many, axes, tied=False, classes=MANY, loss_chunks=count) for count in (1, 4))
    ranks = axes.get("tp", 1)
    logits, table = 8 * ROWS * LENGTH * MANY // ranks, 8 * MANY * WIDTH // ranks
    before, after = (program.simulate().peak.values for program in (plain, parts))
    assert before > 2 * logits and after < before - 2 * (logits - logits // 4) + 2 * table


def test_the_peak_is_what_the_allocator_says() -> None:
    module = Language(many, tied=False, classes=MANY).double()
    program = quintnet.compile(module, Mesh(dp=1), batch(), loss_chunks=4)
    (row,) = program.simulate().rows  # the most is in the backward of the loss, where no gradient is made yet
    most, after = allocated(program, module, batch())
    assert (most + row.gradient_bytes, after) == (row.peak.values, 0) and not row.peak.gradients


@pytest.mark.parametrize("features", [1, 7])
def test_a_layer_of_few_features_is_no_loss(features: int) -> None:
    """It makes a few numbers of each row, of all hidden ones: the check found two products and refused the program."""
    layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, features)).double()
    batch = torch.randn(8, 16).double(), torch.randn(8, features).double()
    program = quintnet.compile(layers, Mesh(dp=2), batch, loss_fn=torch.nn.functional.mse_loss, loss_chunks=2)
    assert "chunk_" not in program.ranks[0].forward.code and program.verify().ok
