"""runtime.execute.layouts: what was made for tensors is found for those laid out alike, and for no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quintnet_compiler.runtime.execute.layouts import ByLayout

OTHERS = {
    "dtype": torch.zeros(4, 3, dtype=torch.float64),
    "size": torch.zeros(4, 5),
    "dims": torch.zeros(4, 3, 1),
    "stride": torch.zeros(3, 4).t(),
    "repeated": torch.zeros(1, 3).expand(4, 3),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("place", [0, 1])
def test_other_layouts_are_others(other: str, place: int) -> None:
    found: ByLayout[list[str]] = ByLayout()
    first = [torch.zeros(4, 3), torch.ones(4, 3)]
    second: list[Tensor] = [OTHERS[other] if i == place else x for i, x in enumerate(first)]
    assert found.get(first) is None
    mine = found.store(first, [])  # what was made may be empty
    assert found.get([x + 1 for x in first]) is mine and found.get(second) is None
    its = found.store(second, ["second"])
    for args, made in ((second, its), (first, mine), (first, mine), (second, its)):
        assert found.get(args) is made
    assert len(found) == 2 and list(found) == [mine, its]
    found.clear()
    assert found.get(first) is None and len(found) == 0


def test_parameters_are_laid_out_as_their_values() -> None:
    found: ByLayout[str] = ByLayout()
    found.store([torch.zeros(2)], "made")
    assert found.get([torch.nn.Parameter(torch.zeros(2))]) == "made"
