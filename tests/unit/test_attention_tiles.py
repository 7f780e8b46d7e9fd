"""ops.attention.blocks, .kernels, .tiles, .tiled and core.slices.runs: attention
whose masks are made from positions, beside attention to all keys at once in float64."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quintnet_compiler.core import slices
from quintnet_compiler.core.absent_gpu import CUDA
from quintnet_compiler.core.sharding import Shard
from quintnet_compiler.ops.attention import blocks, kernels, tiled, tiles
from quintnet_compiler.ops.attention.blocks import Block, Sight
from quintnet_compiler.ops.attention.ids import FEW
from quintnet_compiler.ops.attention.kernels import (
    AttentionKernel,
    CpuKernel,
    CudaKernel,
    FlashLengths,
    Lengths,
    Matmuls,
    Operands,
    kernel_for,
)
from quintnet_compiler.ops.attention.tiled import attend_runs, attend_runs_backward
from quintnet_compiler.ops.attention.tiles import AttentionInputs, AttentionTiles, Ids, Total

from ..looped_spans import LoopedSpans

torch.set_num_threads(1)
LENGTH = 12
RUNS = ([(0, LENGTH)], [(4, 4)], [(2, 2), (8, 2)])


# -- blocks


def _sees(sight: Sight, row: int, col: int) -> bool:
    near = (not sight.causal or col <= row) and (not sight.window or row - col < sight.window)
    return near and (not sight.chunk or row // sight.chunk == col // sight.chunk)


def test_parts_of_a_block_are_what_is_seen_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair of a query and a key that is seen is in one part; a part that says so is seen wholly."""
    monkeypatch.setattr(blocks, "FEWEST", 2)
    dice = random.Random(0)
    for _ in range(4000):
        sight = Sight(dice.random() < 0.6, dice.choice([0, 0, 1, 2, 3, 5, 9, 30]), dice.choice([0, 0, 1, 3, 4, 7, 40]))
        block = Block(dice.randrange(20), dice.randrange(1, 12), dice.randrange(20), dice.randrange(1, 12))
        cells, tiled = dice.choice([1, 2, 4, 9, 16, 50, 1000]), dice.random() < 0.4
        covered = set[tuple[int, int]]()
        for part, seen in sight.parts(block, cells, tiled):
            rows, cols = range(part.row, part.ends[0]), range(part.col, part.ends[1])
            pairs = set(itertools.product(rows, cols))
            assert pairs and not pairs & covered
            covered |= pairs
            if tiled or seen == "some":
                assert len(pairs) <= cells
            if seen != "some":
                assert len(rows) == len(cols) or seen == "all"
                assert all(_sees(sight, i, j) == (seen == "all" or j - part.col <= i - part.row) for i, j in pairs)
        whole = set(itertools.product(range(block.row, block.ends[0]), range(block.col, block.ends[1])))
        assert {(i, j) for i, j in whole if _sees(sight, i, j)} <= covered <= whole


def test_how_many_parts_a_million_positions_have() -> None:
    """On the last of 16 ranks: causal attention is two calls of a kernel, and a window computes what it sees twice."""
    length, cells = 2**20, 2**24
    last = Block(length // 16 * 15, length // 16, 0, length)
    causal = list(Sight(True, 0).parts(last, cells, tiled=False))
    assert [(part.cols, seen) for part, seen in causal] == [(last.row, "all"), (last.rows, "diagonal")]
    for window in (512, 4096, 16384):
        parts = [part for part, _ in Sight(True, window).parts(last, cells, tiled=False)]
        assert sum(part.rows * part.cols for part in parts) <= 2.01 * last.rows * window
        assert len(parts) <= 3 * max(last.rows // window, 16)


@pytest.mark.parametrize("parts", list(itertools.product((1, 2), (1, 3))), ids=str)
def test_runs_are_the_positions_of_a_rank(parts: tuple[int, int]) -> None:
    kinds = tuple(Shard(0, count) for count in parts)
    for place in itertools.product(range(2), range(3)):
        found = [first + i for first, length in slices.runs(36, parts, (2, 3), place) for i in range(length)]
        assert found == slices.positions([36], kinds, (2, 3), place)[0].tolist()


# -- numbers


def _at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None,
    segments: Tensor | None,
    rows: Tensor,
    sight: Sight,
    groups: Tensor | None = None,
) -> Tensor:
    """Of queries at ``rows``; those that see nothing give 0."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    behind = rows[:, None] - torch.arange(k.shape[2])
    seen = torch.ones(q.shape[0], 1, *behind.shape, dtype=torch.bool)
    seen &= (behind >= 0) | (not sight.causal)
    seen &= (behind < sight.window) | (not sight.window)
    if sight.chunk:
        seen &= rows[:, None] // sight.chunk == torch.arange(k.shape[2]) // sight.chunk
    if segments is not None:
        seen &= (segments[:, rows].unsqueeze(2) == segments.unsqueeze(1)).unsqueeze(1)
    if groups is not None:
        seen |= ((groups[:, rows].unsqueeze(2) == groups.unsqueeze(1)) & (groups >= 0).unsqueeze(1)).unsqueeze(1)
    if padding is not None:
        seen &= padding[:, None, None, :]
    scores = (q @ k.mT * 0.3).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ v


def _compare(
    sight: Sight,
    runs: list[tuple[int, int]],
    tile_bytes: int,
    *,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (8, 8),
    padded: bool = False,
    packed: bool = False,
    grouped: bool = False,
    few: int = FEW,
    dtype: torch.dtype = torch.float64,
    bound: float = 1e-12,
) -> None:
    """Attention in tiles and its gradients, with what they should be."""
    dice = torch.Generator().manual_seed(0)
    rows = torch.cat([torch.arange(first, first + count) for first, count in runs])
    sizes = ((heads[0], len(rows), widths[0]), (heads[1], LENGTH, widths[0]), (heads[1], LENGTH, widths[1]))
    given = [torch.randn(2, *size, generator=dice, dtype=torch.float64).to(dtype) for size in sizes]
    padding = torch.rand(2, LENGTH, generator=dice) < 0.5 if padded else None
    segments = torch.randint(0, 3, (2, LENGTH), generator=dice) if packed else None
    if packed and few == 1:  # one row in order, and one in which documents come again
        segments = torch.tensor([[0] * 5 + [1] * 4 + [4] * 3, [2] * 3 + [0] * 4 + [2] * 5])
    groups = torch.randint(-1, 2, (2, LENGTH), generator=dice) if grouped else None
    leaves = [x.double().clone().requires_grad_() for x in given]
    expected = _at_once(leaves[0], leaves[1], leaves[2], padding, segments, rows, sight, groups)
    grad = torch.randn(expected.shape, generator=dice, dtype=torch.float64).to(dtype)
    wanted = [expected.detach(), *torch.autograd.grad(expected, leaves, grad.double())]

    tiles = AttentionTiles(0.3, sight, tile_bytes)
    inputs = AttentionInputs(given[0], given[1], given[2], Ids(padding, segments, groups, few))
    out, lse = attend_runs(tiles, runs, inputs)
    found = [out, *attend_runs_backward(tiles, runs, inputs, grad, out, lse)]
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype is dtype
        torch.testing.assert_close(a.double(), b, rtol=bound, atol=bound)


MASKS = [
    (Sight(causal, window), {"padded": padded, "packed": packed})
    for causal in (True, False) for window in (0, 1, 3, 7) for padded in (False, True) for packed in (False, True)
]  # fmt: skip
MASKS += [(Sight(True, window, chunk), {"packed": packed, "grouped": packed})
          for window in (0, 3) for chunk in (0, 5) for packed in (False, True)]  # fmt: skip
MASKS += [(Sight(False, 0, 5), {"padded": True, "grouped": True})]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [CpuKernel(), Matmuls()], ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize(
    "tile_bytes",
    [
        pytest.param(1, marks=pytest.mark.slow),  # a tile for each pair
        300,
        pytest.param(10**6, marks=pytest.mark.slow),  # one tile
    ],
)
def test_tiles_add_up_to_attention(monkeypatch: pytest.MonkeyPatch, kernel: AttentionKernel, tile_bytes: int) -> None:
    """Every kind of mask, for one run of positions, a part of them, and two; with and without groups of heads."""
    monkeypatch.setattr(tiles, "kernel_for", lambda *_: kernel)
    for sight, mask in MASKS:
        for runs, heads in itertools.product(RUNS, ((2, 2), (4, 2))):
            _compare(sight, runs, tile_bytes, heads=heads, few=1 if heads[0] == 2 else FEW, **mask)
    for widths in ((4, 8), (8, 4)):
        _compare(Sight(True, 3), RUNS[2], tile_bytes, widths=widths, padded=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kernel", [CpuKernel(), Matmuls()], ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06), (torch.float16, 8e-3)], ids=str
)
def test_other_dtypes(
    monkeypatch: pytest.MonkeyPatch, kernel: AttentionKernel, dtype: torch.dtype, bound: float
) -> None:
    monkeypatch.setattr(tiles, "kernel_for", lambda *_: kernel)
    for sight, mask in MASKS:
        _compare(sight, RUNS[2], 100, **mask, dtype=dtype, bound=bound)


def test_a_query_that_sees_nothing_has_no_log() -> None:
    q = torch.randn(1, 1, 4, 8)
    given = AttentionInputs(q, q, q, Ids(torch.tensor([[False, False, True, True]])))
    tiles = AttentionTiles(1.0, Sight(True, 0), 16)
    out, lse = attend_runs(tiles, [(0, 4)], given)
    assert lse[0, 0].isneginf().tolist() == [True, True, False, False] and not out[0, 0, :2].any()
    found = attend_runs_backward(tiles, [(0, 4)], given, torch.ones_like(q), out, lse)
    assert all(x.isfinite().all() for x in found) and not found[0][0, 0, :2].any()
    assert not found[1][0, 0, :2].any() and not found[2][0, 0, :2].any()


@pytest.mark.parametrize("kernel", [CpuKernel(), Matmuls()], ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_keys_that_are_not_seen_do_not_count_beside_very_small_scores(
    monkeypatch: pytest.MonkeyPatch, kernel: AttentionKernel, dtype: torch.dtype
) -> None:
    """Scores of about -80000, less than float16 can hold, are as good as any others."""
    monkeypatch.setattr(tiles, "kernel_for", lambda *_: kernel)
    dice = torch.Generator().manual_seed(0)
    q, k = torch.full((1, 1, LENGTH, 8), 100.0).to(dtype), torch.full((1, 1, LENGTH, 8), -100.0).to(dtype)
    v = torch.randn(1, 1, LENGTH, 8, generator=dice).to(dtype)
    padding = torch.tensor([[False, False, *[True] * (LENGTH - 2)]])
    for sight in (Sight(True, 0), Sight(True, 3)):
        expected = _at_once(q.double() / 0.3, k.double(), v.double(), padding, None, torch.arange(LENGTH), sight)
        out, _ = attend_runs(AttentionTiles(1.0, sight, 40), [(0, LENGTH)], AttentionInputs(q, k, v, Ids(padding)))
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2)


def test_no_mask_is_larger_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels are given, and how often: once for what is seen wholly, once for what is seen up to its diagonal."""
    calls: list[Operands] = []
    forward = CpuKernel.forward

    def seen(self: CpuKernel, given: Operands, scale: float) -> tuple[Tensor, Tensor]:
        calls.append(given)
        return forward(self, given, scale)

    monkeypatch.setattr(CpuKernel, "forward", seen)
    q, k = torch.randn(1, 2, 64, 8), torch.randn(1, 2, 256, 8)
    attend_runs(AttentionTiles(1.0, Sight(True, 0), 1024), [(192, 64)], AttentionInputs(q, k, k, Ids()))
    assert [(x.k.shape[2], x.bias, x.causal) for x in calls] == [(192, None, False), (64, None, True)]
    calls.clear()  # documents from 0 to 150 and from 150 on
    long = (torch.arange(256) >= 150).long()[None]
    attend_runs(AttentionTiles(1.0, Sight(True, 0), 1024), [(128, 64)], AttentionInputs(q, k, k, Ids(None, long)))
    assert [(x.q.shape[2], x.k.shape[2], x.causal) for x in calls] == [(22, 128, False), (22, 22, True), (42, 42, True)]
    assert all(x.bias is None for x in calls)
    calls.clear()  # documents of 5 positions: runs of 64 with masks
    short = (torch.arange(256) // 5)[None]
    attend_runs(AttentionTiles(1.0, Sight(True, 0), 1024), [(128, 64)], AttentionInputs(q, k, k, Ids(None, short)))
    assert all(x.bias is not None and x.bias.numel() * 4 <= 1024 for x in calls)
    assert sum(x.bias.numel() for x in calls if x.bias is not None) <= 64 * 3 * 70


def test_a_backward_may_count_keys_that_its_block_does_not_have() -> None:
    """The log of the sum is that of all keys: then the gradients of a block are its terms of the whole."""
    dice = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 8, 8, generator=dice, dtype=torch.float64) for _ in range(4))
    tiles = AttentionTiles(0.3, Sight(True, 0), 100)
    total = Total(q[:, :, 4:], 8)
    for col in (0, 4):
        tiles.forward(Block(4, 4, col, 4), q[:, :, 4:], k[:, :, col : col + 4], v[:, :, col : col + 4], Ids(), total)
    out, lse = total.finished()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = _at_once(leaves[0][:, :, 4:], leaves[1], leaves[2], None, None, torch.arange(4, 8), Sight(True, 0))
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(expected, leaves, grad[:, :, 4:])
    terms = [torch.zeros_like(x) for x in (q[:, :, 4:], k[:, :, :4], v[:, :, :4])]
    into = (terms[0], terms[1], terms[2])
    tiles.backward(Block(4, 4, 0, 4), grad[:, :, 4:], q[:, :, 4:], out, lse, k[:, :, :4], v[:, :, :4], Ids(), into)
    for a, b in zip(terms[1:], wanted[1:], strict=True):
        torch.testing.assert_close(a, b[:, :, :4], rtol=1e-12, atol=1e-12)


# -- kernels


def _definition(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Scores, as kernels of CUDA see them."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT * scale + (0.0 if bias is None else bias)
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf")) if causal else scores


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, logs: bool, p: float, causal: bool, *, scale: float
) -> Any:
    assert logs and p == 0.0 and q.shape[:2] == k.shape[:2] == v.shape[:2]
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2]) and not any(s % 8 for s in bias.stride()[:-1])
    scores = _definition(q, k, v, bias, causal, scale)
    lse = F.pad(scores.logsumexp(-1), (0, -q.shape[2] % 32), value=float("inf"))
    return scores.softmax(-1) @ v, lse, None, None


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_definition(q, k, v, bias, causal, scale) - lse.unsqueeze(-1)).exp()
    times = q.shape[1] // k.shape[1]
    k_, v_ = (x.repeat_interleave(times, 1) for x in (k, v))
    slopes = weights * (grad @ v_.mT - (grad * out).sum(-1, keepdim=True)) * scale
    of_k, of_v = (torch.unflatten(x, 1, (-1, times)).sum(2) for x in (slopes.mT @ q, weights.mT @ grad))
    return slopes @ k_, of_k, of_v


def _efficient_backward(*given: Any, scale: float) -> Any:
    grad, q, k, v, bias, out, lse, _, _, p, wanted, causal = given
    assert out.transpose(1, 2).is_contiguous()  # else kernels of 16 bits read other elements
    assert lse.shape[-1] % 32 == 0 and lse[..., q.shape[2] :].isposinf().all() and q.shape[:2] == k.shape[:2]
    assert p == 0.0 and wanted == [True, True, True, False]
    return *_backward(grad, q, k, v, bias, out, lse[..., : q.shape[2]], causal, scale), None


def _lengths(q: Tensor, k: Tensor, v: Tensor, *given: Any, window: dict[str, int]) -> Lengths:
    q_ends, k_ends, most_q, most_k, p, causal = given
    assert p == 0.0 and q_ends.dtype == k_ends.dtype == torch.int32 and most_q > 1
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    left, right = (window.get(f"window_size_{side}", -1) for side in ("left", "right"))
    right = 0 if causal else right
    left, right = (-1 if side >= most_k else side for side in (left, right))  # as the kernel reads them
    if left < 0 <= right or right < 0 <= left:
        left, right = (most_k if side < 0 else side for side in (left, right))
    return Lengths(q, k, v, q_ends, k_ends, most_q, most_k, left, right)


def _flash(*given: Any, scale: float, **window: int) -> Any:
    assert not given[-1]  # a mask for debugging
    return *LoopedSpans().forward(_lengths(*given[:-1], window=window), scale), *[None] * 3


def _flash_backward(grad: Tensor, *given: Any, scale: float, **window: int) -> Any:
    out, lse = given[3:5]
    assert lse.is_contiguous()
    lengths = _lengths(*given[:3], *given[5:-2], window=window)
    return LoopedSpans().backward(grad, out, lse, lengths, scale)


@pytest.mark.parametrize("flash", [True, False])
def test_kernels_of_cuda_get_what_they_take(monkeypatch: pytest.MonkeyPatch, flash: bool) -> None:
    """With definitions in their place, which ask for what the kernels ask for."""
    stand_ins = {
        "_flash_attention_forward": _flash,
        "_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    }
    monkeypatch.setattr(kernels, "aten", SimpleNamespace(**stand_ins))
    monkeypatch.setattr(tiles, "kernel_for", lambda *_: CudaKernel(FlashLengths() if flash else None))
    for sight, mask in MASKS:
        _compare(sight, RUNS[2], 100, **mask)


@pytest.mark.parametrize("causal", [True, False])
def test_operators_of_cuda_take_these_arguments(causal: bool) -> None:
    """On fake tensors: their schemas, and the shapes of what they make."""
    with FakeTensorMode():
        q, grad = (torch.empty(2, 8, 40, 64, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
        k, v = (torch.empty(2, 2, 40, 64, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
        bias = None if causal else torch.empty(2, 1, 40, 40, dtype=torch.bfloat16, device=CUDA)
        given = Operands(q, k, v, bias, causal)
        out, lse = CudaKernel(None).forward(given, 0.125)
        assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype is torch.float32
        found = CudaKernel(None).backward(grad, out, lse, given, 0.125)
        assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (15, 0), (-1, 3)])
def test_flash_attention_of_lengths_takes_these_arguments(window: tuple[int, int]) -> None:
    with FakeTensorMode():
        q, grad = (torch.empty(80, 8, 64, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
        k, v = (torch.empty(96, 2, 64, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
        ends = [torch.empty(3, dtype=torch.int32, device=CUDA) for _ in range(2)]
        given = Lengths(q, k, v, ends[0], ends[1], 40, 48, *window)
        out, lse = FlashLengths().forward(given, 0.125)
        assert out.shape == q.shape and lse.shape == (8, 80) and lse.dtype is torch.float32
        found = FlashLengths().backward(grad, out, lse, given, 0.125)
        assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


def test_which_kernel_a_cpu_has() -> None:
    x = torch.randn(1, 2, 4, 8)
    assert isinstance(kernel_for(x, x, x), CpuKernel)
    assert isinstance(kernel_for(x.to("meta"), x.to("meta"), x.to("meta")), Matmuls)


def test_operators_know_the_shapes_of_their_results() -> None:
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 4)
    how = (None, None, None, 1.0, "causal", 64, 12, ["cp"], [2], [1])
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        out, lse = tiled.tiled_attention(*fakes, *how)
        found = tiled.tiled_attention_backward(out, *fakes, out, lse, *how)
    made = attend_runs(AttentionTiles(1.0, Sight(True, 0), 64), [(6, 6)], AttentionInputs(q, k, v, Ids()))
    assert [x.shape for x in (out, lse)] == [x.shape for x in made]
    assert [x.shape for x in found] == [x.shape for x in (q, k, v)]
