"""What docs/operators.md says of PyTorch's own database of operators: equal on every layout, or refused as listed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from .opinfo_layouts import LAYOUTS, Changes, entries, sweep

PAGE = (Path(__file__).parent.parent / "docs" / "operators.md").read_text()
REFUSED = {(name, error) for name, error in re.findall(r"^\| `(\w+)` \| [^|]* \| (QN\d+) \|", PAGE, re.M)}
PARTS = 40
pytestmark = pytest.mark.skipif(
    f"torch {torch.__version__.partition('+')[0]}." not in PAGE, reason="the page is of another torch"
)


def _require(names: set[str], **options: Any) -> None:
    """Each entry is what the page says."""
    ops = [op for op in entries() if op.formatted_name in names]
    found = {line["name"]: line for line in sweep(ops, **options)}
    for name, line in found.items():
        kinds = {kind for kind, _ in line.get("found", {}).values()}
        assert kinds <= {"equal", *(error for entry, error in REFUSED if entry == name)}, (name, line)


@pytest.mark.filterwarnings("ignore")
def test_some_entries_are_what_the_page_says() -> None:
    """Rows of the batch and not, a factorization, a transform of complex numbers, one that is refused."""
    _require({"cumsum", "linalg_lu", "fft_hfft", "as_strided", "masked_select"})
    assert ("masked_select", "QN101") in REFUSED


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_entry_is_what_the_page_says(part: int) -> None:
    _require({op.formatted_name for op in entries()[part::PARTS]})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_entry_beside_a_change_in_place(part: int) -> None:
    _require({op.formatted_name for op in entries()[part::PARTS]}, layouts=("1",), kind=Changes)


def test_the_page_counts_what_it_lists() -> None:
    some, equal = (
        int(found[0]) for found in (re.findall(r"Of\s+the\s+other\s+(\d+)", PAGE), re.findall(r"\*\*(\d+) \(", PAGE))
    )
    assert equal == some - len({name for name, _ in REFUSED})
    assert equal / some >= 0.95
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \|", PAGE, re.M)
    assert [name for name, _, _ in rows] == list(LAYOUTS)
    assert all(int(same) + int(refused) == some for _, same, refused in rows)
    assert "wrong" not in PAGE.lower().replace("none is wrong", "")
