"""Operators of the package: shapes while tracing, and values where no rank is needed."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quintnet_compiler.ops.cross_entropy import nll_terms, row_nll
from quintnet_compiler.ops.define import resized
from quintnet_compiler.ops.rank_local import LOCAL, RANKED, microbatch


def test_a_dim_grows_or_is_divided() -> None:
    x = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")
    assert resized(x, 1, times=3).shape == (4, 18)
    assert resized(x, 0, over=2).shape == (2, 6)
    assert resized(x, 0, over=2).dtype is torch.bfloat16


def test_rows_of_a_cross_entropy() -> None:
    logits, labels = torch.randn(5, 7, dtype=torch.float64), torch.tensor([0, 6, -100, 3, 2])
    found = row_nll(logits, labels, -100)
    expected = -F.log_softmax(logits, -1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    assert found[2] == 0
    torch.testing.assert_close(found[labels >= 0], expected[labels >= 0])


def test_terms_of_a_row_are_added_up_in_float32() -> None:
    logits = torch.empty(5, 7, dtype=torch.bfloat16, device="meta")
    terms = nll_terms(logits, torch.empty(5, dtype=torch.int64, device="meta"), ["tp"], [2])
    assert terms.shape == (1, 3, 5)
    assert terms.dtype is torch.float32


def test_what_depends_on_a_rank() -> None:
    assert LOCAL < RANKED
    assert microbatch not in RANKED
    assert microbatch(torch.empty(8, 3, device="meta"), 4, 0, 1).shape == (2, 3)
