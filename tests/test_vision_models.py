"""Models of torchvision, timm and diffusers, unmodified: three steps are those of the plain module, with noise, drop
path and running statistics. Models of a library that is not installed are skipped (``pip install -e .[vision]``)."""

from __future__ import annotations

import pytest
import torch

from .frontier import LAYOUTS, Case, compare, report
from .vision_models import MODELS
from .zoo import InDouble

torch.set_num_threads(1)
SPLIT = ("dp2", "tp2", "pp2", "dp2 x tp2")


def _check(library: str, case: Case, layout: str) -> None:
    pytest.importorskip(library)
    with InDouble():
        report(case, {layout: compare(case, LAYOUTS[layout])})


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", SPLIT)
@pytest.mark.parametrize(("library", "name"), [(library, name) for library in MODELS for name in MODELS[library]])
def test_three_steps_are_those_of_the_module(library: str, name: str, layout: str) -> None:
    _check(library, MODELS[library][name], layout)
