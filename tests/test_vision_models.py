"""Models of torchvision, timm, diffusers and plain PyTorch (message passing), unmodified: three steps are those of the
plain module, with noise, drop path and running statistics. Models of a library that is not installed are skipped
(``pip install -e .[vision]``)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from .families import FAMILIES, WHOLE
from .frontier import LAYOUTS, Case, compare, report
from .zoo import InDouble

torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent
SPLIT = ("dp2", "tp2", "pp2", "dp2 x tp2")
ROUNDING = 1e-11  # of one step from equal values; a change of the parameters by 2e-16 makes 7e-13 of it


def _check(library: str, case: Case, layout: str) -> None:
    pytest.importorskip(library)
    with InDouble():
        report(case, {layout: compare(case, LAYOUTS[layout])})


LIBRARIES = [(library, name) for library in FAMILIES for name in FAMILIES[library]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", SPLIT)
@pytest.mark.parametrize(("library", "name"), LIBRARIES)
def test_three_steps_are_those_of_the_module(library: str, name: str, layout: str) -> None:
    _check(library, FAMILIES[library][name], layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", SPLIT)
@pytest.mark.parametrize("name", WHOLE)
def test_each_step_of_a_deep_model(name: str, layout: str) -> None:
    """From the plain module's parameters and buffers before each step: three steps of a network as deep as ResNet-50
    amplify a change by 2e-16 to one by 1e-8, in the plain module alone."""
    pytest.importorskip("torchvision")
    with InDouble():
        found = compare(WHOLE[name], LAYOUTS[layout], limit=ROUNDING, each_step=True)
    report(WHOLE[name], {layout: found})


def test_the_page_shows_no_difference() -> None:
    page = (ROOT / "docs" / "models.md").read_text().partition("## Vision, diffusion and graphs")[2]
    rows = re.findall(r"^\| (\w+) \| ([^|]+) \|(.*)\|$", page, re.M)
    found = {(library, name): cells for library, name, cells in rows if library in FAMILIES}
    assert list(found) == [pair for pair in LIBRARIES if pair in found]  # those that were measured
    for cells in found.values():
        shown = [cell.strip() for cell in cells.split("|")]
        assert len(shown) == len(SPLIT) and any(shown)
        assert all(re.fullmatch(r"|\de-\d\d|0e\+00|refused, QN\d{3}", cell) for cell in shown), cells
    assert f"{len(found)} families of vision, diffusion and graph models" in (ROOT / "README.md").read_text()
