"""Models of transformers, unmodified, on every axis and on composed layouts: gradients of the unsplit model."""

from __future__ import annotations

import pytest
import torch

import quintnet

from .zoo import ZOO, InDouble, Layout, columns, outcome

pytest.importorskip("transformers")
torch.set_num_threads(1)
ALL = [(name, layout) for name in ZOO for layout in columns(name)]


def _check(name: str, layout: Layout) -> None:
    found = outcome(name, layout)
    assert found.ok or (found.error is None and layout.context == "ulysses" and "heads" in found.reason), found


# one composed layout of each kind of model, another for the next one; the slow tests have every model
KINDS = ("GPT-2", "Llama", "Gemma 2", "BERT", "T5", "CLIP", "DeepSeek-V3", "gpt-oss")
SAMPLE = [(name, columns(name)[-1 - i % 3]) for i, name in enumerate(ZOO) if name in KINDS]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["Llama", "ViT", *(name for name in ZOO if name not in ("Llama", "ViT"))])
def test_nothing_runs_whole_over_tp(name: str) -> None:
    """No matmul, attention or convolution, and no value of other data ranks."""
    with InDouble():
        program = quintnet.compile(ZOO[name].build(), quintnet.Mesh(tp=2), ZOO[name].batch(8), check="off")
    assert program.unsplit == ()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), SAMPLE, ids=str)
def test_a_composed_layout_of_each_kind(name: str, layout: Layout) -> None:
    _check(name, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [pair for pair in ALL if pair not in SAMPLE], ids=str)
def test_every_axis_of_each_model(name: str, layout: Layout) -> None:
    _check(name, layout)
