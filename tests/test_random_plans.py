"""The main correctness test: random valid plans equal the unsplit model, in loss and in every gradient."""

from __future__ import annotations

import functools

import pytest
import torch

from quintnet_compiler.capture.capture import capture
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.ir.program import Axis, Captured, Program
from quintnet_compiler.passes.frontend.normalize import Normalize

from .models import CASES, build, reference, worst_error
from .random_plans import gradients, random_program

torch.set_num_threads(1)
ROWS = 8


@functools.cache
def _captured(name: str) -> tuple[torch.nn.Module, Captured]:
    model = build(name)
    return model, capture(model, CASES[name].batch(ROWS), CASES[name].loss_fn)


@functools.cache
def _program(name: str) -> Program:
    return Normalize(ROWS, torch.device("cpu"))(_captured(name)[1])


@functools.cache
def _reference(name: str):  # type: ignore[no-untyped-def]
    return reference(_captured(name)[0], CASES[name].batch(ROWS), CASES[name].loss_fn)


def _check(name: str, axes: tuple[int, ...], stages: int, seed: int) -> None:
    names = ("dp", "tp")[: len(axes)]
    mesh = Mesh(pp=stages, **dict(zip(names, axes, strict=True)))
    roles = tuple(Axis(axis, size, role) for axis, size, role in zip(names, axes, ("data", "model"), strict=False))
    program = random_program(_program(name), mesh, roles, 1, seed)
    loss, found = gradients(program, mesh, dict(_captured(name)[1].tensors), CASES[name].batch(ROWS))
    expected_loss, expected = _reference(name)
    error, worst = worst_error(found, expected)
    # Hugging Face models compute their loss in float32 whatever the model's dtype
    loss_error = abs(float(loss - expected_loss)) / abs(float(expected_loss))
    assert loss_error < (1e-6 if name in ("hf_gpt2", "hf_llama") else 1e-9), (name, axes, stages, seed, loss_error)
    assert error < CASES[name].tolerance, (name, axes, stages, seed, worst, error)


FAST = [(name, axes, stages, seed) for name in ("mlp", "gpt", "vit", "cnn")
        for axes, stages, seeds in (((2,), 1, 6), ((2, 2), 1, 10), ((2,), 3, 5), ((2, 2), 2, 5))
        for seed in range(seeds)]  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "axes", "stages", "seed"), FAST)
def test_random_plan_equals_the_unsplit_model(name: str, axes: tuple[int, ...], stages: int, seed: int) -> None:
    _check(name, axes, stages, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize(("axes", "stages"), [((2,), 1), ((2, 2), 1), ((4,), 2), ((2, 2), 4), ((4, 2), 1)])
def test_many_random_plans(name: str, axes: tuple[int, ...], stages: int) -> None:
    for seed in range(100, 120):
        _check(name, axes, stages, seed)


def test_an_operator_may_read_the_slices_of_zero_1() -> None:
    """Its gradient is a part of what is added up whole, and scattered at the end of a step."""
    _check("mlp", (2,), 1, 115)
