"""Every loss of torch.nn with every reduction on every layout: equal to the unsplit module in float64."""

from __future__ import annotations

import pytest

from .every_loss import LAYOUTS, LIMIT, LOSSES, all_cases, difference, losses_of_torch


def test_no_loss_is_left_out() -> None:
    """Where this torch has one that the table lacks, it is to be added; the table may have newer ones."""
    assert losses_of_torch() <= LOSSES.keys()


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", all_cases())
def test_a_loss_is_that_of_the_unsplit_module(name: str, layout: str) -> None:
    assert difference(name, layout) < LIMIT
