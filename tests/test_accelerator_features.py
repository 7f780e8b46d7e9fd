"""Training on emulated accelerators as users run it: precisions, clipping, evaluation, checkpoints, generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .accelerator.build import missing
from .accelerator.features import all_losses, losses, surround_all, text
from .accelerator.ranks import Job, World, run, train_all
from .test_generation import large_model, prompts, theirs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=f"the emulated accelerator: {missing()}"),
]
MODES = pytest.mark.parametrize("eager", [False, True], ids=["communicators at first use", "one for each group"])

SURROUNDED = [
    Job("mlp", {"tp": 2}, {"microbatches": 2}),
    Job("gpt", {"dp": 2}, {"zero": 1}),
    Job("gpt", {"dp": 2}, {"zero": 3, "microbatches": 2}),
    Job("gpt", {"pp": 2}, {"microbatches": 2}),
    Job("gpt", {"cp": 2}, {"context": "ring"}),
    Job("packed", {"cp": 2}, {"context": "ring", "microbatches": 2}),
    Job("mixture", {"ep": 2}),
]
FOUR = [
    Job("gpt", {"pp": 2, "tp": 2}, {"microbatches": 4}),
    Job("gpt", {"dp": 2, "tp": 2}, {"zero": 3, "sequence_parallel": True}),
    Job("gpt", {"dp": 2, "pp": 2}, {"zero": 1, "microbatches": 2, "schedule": "zb-h1"}),
    Job("mixture", {"dp": 2, "ep": 2}, {"microbatches": 2}),
    Job("gpt", {"cp": 2, "tp": 2}, {"context": "all_gather"}),
    Job("packed", {"cp": 4}, {"context": "ring"}),
    Job("packed", {"cp": 2, "tp": 2}, {"context": "ring", "recompute": "full"}),
]
HALF: dict[str, Any] = {"microbatches": 2}
# no layer norm: in 16 bits, the device's keeps its statistics as the CPU's does
ROUNDED = [
    Job("mixture", {"ep": 2}, {"precision": "bf16"}),
    Job("mixture", {"dp": 2}, {"precision": "bf16", "zero": 2, **HALF}),
    Job("mixture", {"pp": 2}, {"precision": "fp16", **HALF}),
    Job("hf_llama", {"tp": 2}, {"precision": "bf16", **HALF}),
    Job("hf_llama", {"dp": 2}, {"precision": "fp16", "zero": 3}),
]


@MODES
def test_what_surrounds_a_step(eager: bool, tmp_path: Path) -> None:
    for found in run(surround_all, World(2, eager=eager, seed=1), SURROUNDED, str(tmp_path), limit=900):
        assert found == {str(job): [] for job in SURROUNDED}


@MODES
def test_four_devices(eager: bool) -> None:
    for found in run(train_all, World(4, eager=eager, seed=1), FOUR, limit=900):
        assert found == dict.fromkeys(map(str, FOUR), "")


@MODES
def test_low_precision_is_that_of_one_process(eager: bool) -> None:
    """The kernels are the CPU's, and sums over two ranks have one order."""
    expected = [losses(job, "cpu") for job in ROUNDED]
    for found in run(all_losses, World(2, eager=eager, seed=1), ROUNDED, limit=900):
        for job, mine, whole in zip(ROUNDED, found, expected, strict=True):
            assert mine == pytest.approx(whole, rel=5e-4), str(job)
            assert whole[0] > whole[-1]


@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_tokens_are_those_of_transformers(axes: dict[str, int]) -> None:
    ids, mask = prompts()
    expected = theirs(large_model("Llama"), ids, mask)
    for found in run(text, World(2, seed=1), axes, ids, mask, 10):
        assert torch.equal(found, expected)
