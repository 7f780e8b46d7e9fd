"""Attention in calls of many spans of unequal lengths, as GPUs compute it, with a kernel written out here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import quintnet
from quintnet_compiler.ops.attention import tiles
from quintnet_compiler.ops.attention.blocks import Block, Sight
from quintnet_compiler.ops.attention.ids import Row
from quintnet_compiler.ops.attention.kernels import Matmuls
from quintnet_compiler.ops.attention.operator import visible
from quintnet_compiler.ops.attention.spans import Calls
from quintnet_compiler.ops.attention.tiled import attend_runs, attend_runs_backward
from quintnet_compiler.ops.attention.tiles import AttentionInputs, AttentionTiles, Ids

from ..looped_spans import LoopedSpans
from ..test_tiled_attention import MASKS, _program

torch.set_num_threads(1)
SIGHTS = [Sight(*one) for one in itertools.product((False, True), (0, 1, 3, 5), (0, 3))]


@dataclass(frozen=True)
class _Kernel(Matmuls):
    lengths: LoopedSpans  # type: ignore[assignment]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> LoopedSpans:
    made = LoopedSpans()
    monkeypatch.setattr(tiles, "kernel_for", lambda *_: _Kernel(made))
    return made


@pytest.mark.sample(11)
@pytest.mark.parametrize("sight", SIGHTS, ids=str)
def test_spans_are_what_is_seen(sight: Sight) -> None:
    """Of all small blocks: the same pairs, with no query and no key in two spans, and none that sees nothing."""
    for row, rows, col, cols in itertools.product(range(5), range(1, 6), range(5), range(1, 6)):
        block = Block(row, rows, col, cols)
        expected = visible(torch.arange(row, row + rows), torch.arange(col, col + cols), sight)
        found = torch.zeros(rows, cols, dtype=torch.int64)
        for span in sight.spans(block):
            queries, keys = block.slices_of(span.block)
            count, many = span.block.rows, span.block.cols
            ahead = torch.arange(many) - torch.arange(count)[:, None] - (many - count)
            seen = (ahead >= -span.left) if span.left >= 0 else torch.ones_like(ahead, dtype=torch.bool)
            seen = seen & (ahead <= span.right) if span.right >= 0 else seen
            assert seen.any(0).all() and seen.any(1).all()
            assert not found[queries].any() and not found[:, keys].any()
            found[queries, keys] += seen
        assert torch.equal(found, expected.view(rows, cols).long()), block


def _given(rows: int, documents: Tensor | None, **more: Any) -> AttentionInputs:
    dice = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, heads, 24, width, generator=dice, dtype=torch.float64)
        for heads, width in ((4, 6), (2, 6), (2, 4))
    )
    return AttentionInputs(q, k, v, Ids(segments=documents, **more))


DOCUMENTS = {
    "none": None,
    "one": torch.zeros(2, 24, dtype=torch.int64),
    "unequal": torch.tensor([[0] * 11 + [1] * 2 + [2] * 11, [0] * 3 + [1] * 20 + [2]]),
    "short": torch.arange(24).expand(2, 24),
    "padded": torch.arange(24).expand(2, 24) // 9,
    "in several places": torch.tensor([[0, 1] * 12, [0] * 8 + [1] * 8 + [0] * 8]),
}


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("mask", ["causal", "window_5", "causal_window_3", "causal_chunk_7", "all"])
def test_calls_equal_a_mask(loop: LoopedSpans, mask: str, documents: str) -> None:
    ids = DOCUMENTS[documents]
    given, sight = _given(2, ids), Sight.parse(mask)
    tiles, runs = AttentionTiles(0.3, sight, 2**10), [(2, 9), (15, 6)]
    positions = torch.cat([torch.arange(first, first + count) for first, count in runs])
    padding = torch.arange(24).expand(2, 24) % 23 > 1 if documents == "padded" else None
    given = AttentionInputs(given.q[:, :, positions], given.k, given.v, Ids(padding, ids))
    both = None if ids is None else (ids[:, positions], ids)
    seen = visible(positions, torch.arange(24), sight, padding=padding, segments=both)
    expected = [x.clone().requires_grad_() for x in (given.q, given.k, given.v)]
    q, k, v = expected[0], *(x.repeat_interleave(2, 1) for x in expected[1:])
    weights = (q @ k.mT * 0.3).masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num()
    weights @ v
    grad = torch.randn(weights.shape[:3] + v.shape[3:], dtype=torch.float64)
    gradients = torch.autograd.grad(weights @ v, expected, grad)
    out, lse = attend_runs(tiles, runs, given)
    assert out.is_contiguous() and lse.is_contiguous()
    torch.testing.assert_close(out, (weights @ v).detach(), rtol=0, atol=1e-13)
    found = attend_runs_backward(tiles, runs, given, grad, out, lse)
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


def test_documents_of_a_batch_are_one_call(loop: LoopedSpans) -> None:
    documents = torch.arange(24).expand(3, 24) // torch.tensor([[1], [5], [12]])
    attend_runs(AttentionTiles(0.3, Sight(True), 2**10), [(0, 24)], _given(3, documents))
    assert loop.spans == [24 + 5 + 2]


def test_spans_that_share_keys_are_calls_apart() -> None:
    calls = Calls(Block(0, 8, 0, 8))
    for row, cols in ((0, 4), (4, 4)):
        calls.add(0, Sight().spans(Block(row, 4, 0, cols)))
    assert [len(call.queries.runs) for call in calls.made] == [1, 1]


def test_ids_in_several_places_stay_tiles() -> None:
    """Each id of many places would be as many spans as pairs of them."""
    row = Row(None, torch.tensor([0, 1] * 64), None)
    assert row.apart is row
    assert Row(None, torch.arange(128), None).apart.few == 1
    assert Row(torch.arange(128) > 3, torch.arange(128) // 9, None).apart.few == 1
    some = Row(torch.arange(128) != 3, torch.arange(128) // 9, None)
    assert some.apart is some


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("context", ["ring", pytest.param("all_gather", marks=pytest.mark.slow)])
def test_programs_equal_the_model(loop: LoopedSpans, mask: str, context: str) -> None:
    report = _program(mask, quintnet.Mesh(cp=2), context=context).verify()
    assert report.ok and report.worst.error < 1e-12, str(report)
    assert loop.spans or mask in ("padding", "groups", "all")  # of which some is hidden everywhere
