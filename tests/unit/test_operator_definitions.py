"""Operators of the package: shapes while tracing, and values where no rank is needed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quintnet_compiler.ops.cross_entropy import nll_terms, row_nll
from quintnet_compiler.ops.ctc import ctc_loss, ctc_rows, masked_select, total
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


def test_ctc_of_rows_is_torchs_own() -> None:
    """Each reduction, with its gradient; the table has a known size, and nothing in it is left as it was in memory."""
    dice = torch.Generator().manual_seed(0)
    given = torch.randn(7, 3, 5, generator=dice, dtype=torch.float64).log_softmax(-1)
    targets = torch.randint(1, 5, (3, 4), generator=dice)
    rest = targets, torch.tensor([7, 5, 1]), torch.tensor([4, 2, 3])  # the last cannot be: infinite
    for reduction in ("none", "mean", "sum"):
        for zero in (False, True):
            mine, own = given.clone().requires_grad_(), given.clone().requires_grad_()
            found = ctc_loss(mine, *rest, reduction=reduction, zero_infinity=zero)
            expected = F.ctc_loss(own, *rest, reduction=reduction, zero_infinity=zero)
            torch.testing.assert_close(found, expected)
            found.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(mine.grad, own.grad, equal_nan=True)
    losses, table = ctc_rows(given, *rest, 0, False)
    assert losses.shape == (3,) and table.shape == (3, 7, 9)
    assert table[1, 5:].isneginf().all() and table[1, :, 5:].isneginf().all()


def test_ctc_of_targets_one_after_the_other_pads_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = torch.Generator().manual_seed(0)
    given = torch.randn(6, 3, 4, generator=dice, dtype=torch.float64).log_softmax(-1)
    labels = torch.tensor([[1, -100, 2, 3], [-100, 2, 2, -100], [3, 1, -100, -100]])
    mask, steps = labels != -100, torch.tensor([6, 5, 6])
    expected = F.ctc_loss(given, labels[mask], steps, mask.sum(-1), reduction="sum")
    with monkeypatch.context() as patch:
        patch.setattr(F, "ctc_loss", None)  # whose table has a size that depends on values
        found = ctc_loss(given, masked_select(labels, mask), steps, total(mask, dim=-1), reduction="sum")
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    other = torch.tensor([2, 3, 2])  # lengths that are not the mask's are used as torch uses them
    found = ctc_loss(given, masked_select(labels, mask), steps, other)
    assert torch.equal(found, F.ctc_loss(given, labels[mask], steps, other))


def test_ctc_of_a_mask_that_has_changed_is_torchs_own() -> None:
    given, labels = torch.zeros(6, 2, 4).log_softmax(-1), torch.tensor([[1, 2], [3, 1]])
    mask, steps = torch.ones(2, 2, dtype=torch.bool), torch.tensor([6, 6])
    targets = masked_select(labels, mask)
    mask[0, 0] = False
    with pytest.raises(RuntimeError, match="targets"):  # four of them, and lengths [1, 2]
        ctc_loss(given, targets, steps, total(mask, 1))


def test_ctc_of_other_arguments_is_torchs() -> None:
    """Lengths that are no tensors, and one sample."""
    given = torch.randn(4, 2, 3).log_softmax(-1)
    targets = torch.tensor([[1, 2], [2, 2]])
    torch.testing.assert_close(ctc_loss(given, targets, (4, 4), (2, 1)), F.ctc_loss(given, targets, (4, 4), (2, 1)))
    for reduction in ("none", "mean"):
        one = given[:, 0], targets[0], torch.tensor(4), torch.tensor(2), 0, reduction
        torch.testing.assert_close(ctc_loss(*one), F.ctc_loss(*one))
