"""The ring: equal work for all ranks, memory that falls with their number, and no byte more than it must send."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import quintnet
from quintnet_compiler.ops.attention.blocks import Block, Sight
from quintnet_compiler.ops.attention.ids import FEW
from quintnet_compiler.ops.attention.operator import attention
from quintnet_compiler.ops.attention.ring_plan import ring_plan
from quintnet_compiler.ops.attention.tiles import AttentionTiles, Ids, Total
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.runtime.transport.local import LocalTransport
from quintnet_compiler.runtime.transport.ring import Ring, runs_of

from .models import CASES, GPT, Encoder
from .one_operator import call, check
from .operator_samples import bools, f, ints

torch.set_num_threads(1)


def _ring(ranks: int, length: int, index: int, balance: bool, window: int = 0, ids: Ids | None = None) -> Ring:
    tiles, known = AttentionTiles(1.0, Sight(True, window), 1), ids or Ids()
    runs = next(n for n in (4, 2) if length % n == 0)
    how = str(tiles.sight), ranks * length, ranks, runs
    plan = ring_plan(known.padding, known.segments, known.groups, *how) if balance else None
    return Ring(None, "cp", ranks, index, 0, tiles, runs_of(plan, ranks, length))  # type: ignore[arg-type]


def _cells(ring: Ring, block: Block) -> int:
    """How many scores of a block a kernel computes, in halves."""
    return sum(
        {"all": 2, "diagonal": 1, "some": 2}[seen] * part.rows * part.cols
        for part, seen in ring.tiles.sight.parts(block, 1, tiled=False)
    )


def _work(ranks: int, length: int, balance: bool) -> list[list[int]]:
    """By rank and step, the work of causal attention."""
    rings = [_ring(ranks, length, i, balance) for i in range(ranks)]
    return [
        [sum(_cells(r, b) for _, _, b in r.unmasked_blocks((r.index - step) % ranks, Ids())) for step in range(ranks)]
        for r in rings
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_do_equal_work_at_every_step(ranks: int) -> None:
    even = _work(ranks, 8, balance=True)
    assert all(row == even[0] for row in even)
    uneven = [sum(row) for row in _work(ranks, 8, balance=False)]
    assert uneven[-1] == (2 * ranks - 1) * uneven[0]
    assert sum(map(sum, even)) == sum(uneven)  # nothing is computed twice, or left out
    slowest = sum(max(column) for column in zip(*_work(ranks, 8, balance=False), strict=True))
    assert sum(even[0]) == slowest // 2 + 8 * 8 // 2  # who waits for the slowest takes almost twice as long


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "sample",
    [
        call(attention, f(1, 2, 16, 4), f(1, 1, 16, 4), f(1, 1, 16, 2), scale=0.5, mask="causal"),
        call(attention, f(1, 2, 16, 4), f(1, 2, 16, 4), f(1, 2, 16, 4), scale=0.5, mask="causal_window_3"),
        call(attention, *[f(2, 2, 16, 4)] * 3, bools(2, 16), ints(2, 2, 16), scale=0.5, mask="causal"),
        call(attention, *[f(2, 2, 16, 4)] * 3, bools(2, 16), scale=0.5, mask="all"),
    ],
    ids=["grouped", "window", "documents", "padding"],
)
@pytest.mark.parametrize("ranks", [(4,), (2, 2)], ids=str)
def test_more_ranks_and_two_axes(sample: Any, ranks: tuple[int, ...]) -> None:
    assert any("s+t" in name for name in check(sample, RULES, ranks, label="s+t"))


def _documents(*sizes: int) -> Ids:
    return Ids(segments=torch.repeat_interleave(torch.tensor(sizes))[None], few=1)


def _seen(ring: Ring, ids: Ids) -> int:
    """Pairs of a query and a key that kernels compute on a rank; of squares, those up to the diagonal."""
    return sum(
        part.rows * (part.cols + 1) // 2 if seen == "diagonal" else part.rows * part.cols
        for owner in range(ring.size)
        for _, _, block in ring.unmasked_blocks(owner, ids)
        for row in ids.rows
        for pair in row.pairs(ring.tiles.sight, block)
        for part, seen in pair.tiles(1, tiled=False)
    )


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("sizes", [(32,), (20, 12), (3, 9, 1, 13, 6), (8, 8, 8, 8), (1,) * 32], ids=str)
def test_work_of_a_rank_is_what_documents_leave_it(sizes: tuple[int, ...], balance: bool) -> None:
    """A rank's work is the sum over its runs of positions, and over the documents that these meet: a part of n
    positions that begins m positions behind its document's beginning is m n + n (n + 1) / 2 pairs, and no more."""
    ranks, length, ids = 4, 8, _documents(*sizes)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    for index in range(ranks):
        ring, expected = _ring(ranks, length, index, balance, ids=ids), 0
        for first, count in ring.runs[index]:
            for begin, end in zip([0, *ends], ends, strict=False):
                low, high = max(first, begin), min(first + count, end)
                expected += (low - begin) * (high - low) + (high - low) * (high - low + 1) // 2 if low < high else 0
        assert _seen(ring, ids) == expected


@pytest.mark.parametrize(
    ("sizes", "steps"), [((32,), 4), ((8, 8, 8, 8), 1), ((12, 4, 12, 4), 2), ((4, 20, 8), 3), ((1,) * 32, 1)]
)
def test_keys_travel_as_far_as_a_document_reaches(sizes: tuple[int, ...], steps: int) -> None:
    """Over ranks of 8 positions: a document that lies on n neighbours needs n steps."""
    ids = _documents(*sizes)
    assert [_ring(4, 8, i, balance=False).count_steps(ids) for i in range(4)] == [steps] * 4


class _Packed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = (y[:, None] for y in self.qkv(x).chunk(3, -1))
        return attention(q, k, v, None, documents, scale=0.3, mask="causal").square().mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (12, 4, 12, 4), (4, 20, 8)], ids=str)
def test_a_ring_of_documents_sends_what_they_need(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    """With documents on at most n neighbours, keys and values go n - 1 steps, forward and again backward; their
    gradients go as many, and home if they are not there."""
    steps = {8: 1, 12: 2, 20: 3}[max(sizes)]
    documents = torch.repeat_interleave(torch.tensor(sizes) * FEW)[None]
    batch = torch.randn(1, 32 * FEW, 8, dtype=torch.float64), documents
    program = quintnet.compile(
        _Packed().double(), quintnet.Mesh(cp=4), batch, context="ring", context_load_balance=False
    )
    one = 32 * FEW // 4 * 8 * 8  # bytes of a rank's keys, or values
    home = 1 if steps > 1 else 0
    sent = _sent(monkeypatch, program, batch)
    assert {sent[rank] for rank in range(4)} == {2 * one * (3 * (steps - 1) + home)}
    assert program.verify().worst.error < 1e-12


def _bytes(values: Any) -> list[int]:
    return [v.numel() * v.element_size() for v in values if isinstance(v, Tensor)]


def _memory(program: quintnet.CompiledProgram) -> tuple[int, int]:
    """Bytes of what the forward keeps for the backward, and of the largest value that either makes."""
    stage = program.ranks[0].stages[0]
    nodes = {n.name: n for piece in (stage.forward, stage.backward) for n in piece.module.graph.nodes}
    kept = [nodes[name].meta.get("val") for name in stage.saved]
    made = [n.meta.get("val") for n in nodes.values() if n.op != "placeholder"]
    return sum(_bytes(kept)), max(_bytes(made))


@pytest.mark.slow
def test_memory_falls_with_the_number_of_ranks() -> None:
    ids, labels = (torch.randint(0, 32, (2, 256)) for _ in range(2))
    model = GPT(length=256).double()
    whole = _memory(quintnet.compile(model, quintnet.Mesh(dp=1), (ids, labels)))
    for ranks in (2, 4):
        kept, largest = _memory(quintnet.compile(model, quintnet.Mesh(cp=ranks), (ids, labels), context="ring"))
        assert kept * ranks <= whole[0] * 1.05
        assert largest * ranks <= whole[1] * 1.05
        gathered, _ = _memory(quintnet.compile(model, quintnet.Mesh(cp=ranks), (ids, labels)))
        assert gathered > kept


def _sent(monkeypatch: pytest.MonkeyPatch, program: quintnet.CompiledProgram, batch: Any) -> Counter[int]:
    """Bytes that each rank sends around in a step."""
    sent: Counter[int] = Counter()
    permute, exchange = LocalTransport.permute, LocalTransport._exchange_rows

    def counted(self: LocalTransport, x: Tensor, axis: str, sources: tuple[int, ...], at: int) -> Any:
        moves = sources[self.place[axis]] != self.place[axis]
        sent[self.rank] += x.numel() * x.element_size() * moves
        return permute(self, x, axis, sources, at)

    def rows(self: LocalTransport, x: Tensor, *how: Any) -> Any:
        sent[self.rank] += x.numel() * x.element_size()  # runs that leave a rank
        return exchange(self, x, *how)

    monkeypatch.setattr(LocalTransport, "permute", counted)
    monkeypatch.setattr(LocalTransport, "_exchange_rows", rows)
    program.step(batch)
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_sends_what_the_closed_form_says(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Forward, keys and values go n - 1 steps; backward, they do so again, and their gradients go n. With balance,
    half of q, k, v and the output change places, and half of each one's gradient."""
    batch = (torch.randn(4, 8, 32, dtype=torch.float64), torch.randint(0, 6, (4,)))
    loss = CASES["encoder"].loss_fn
    program = quintnet.compile(Encoder().double(), quintnet.Mesh(cp=ranks), batch, loss_fn=loss, context="ring")
    one = 4 * 8 // ranks * 32 * 8  # bytes of a rank's q, k, v or output
    assert set(_sent(monkeypatch, program, batch).values()) == {2 * (6 * ranks - 4) * one}  # two layers
    monkeypatch.undo()
    case = CASES["gpt"]
    program = quintnet.compile(
        GPT().double(), quintnet.Mesh(cp=ranks), case.batch(4), context="ring", context_load_balance=False
    )
    assert set(_sent(monkeypatch, program, case.batch(4)).values()) == {3 * (6 * ranks - 4) * one}
    assert program.verify().ok
    monkeypatch.undo()
    program = quintnet.compile(GPT().double(), quintnet.Mesh(cp=ranks), case.batch(4), context="ring")
    swapped = 4 + 4
    expected = 3 * (6 * ranks - 4 + swapped / 2) * one  # three layers
    assert set(_sent(monkeypatch, program, case.batch(4)).values()) == {math.floor(expected)}


def test_a_window_ends_the_journey() -> None:
    ring = _ring(8, 4, 0, balance=False)
    for window in range(1, 40):
        rings = [_ring(8, 4, i, balance=False, window=window) for i in range(8)]
        seen = [any(True for r in rings for _ in r.unmasked_blocks((r.index - step) % 8, Ids())) for step in range(8)]
        assert rings[0].count_steps(Ids()) == sum(seen) and all(seen[: sum(seen)])
    assert ring.count_steps(Ids()) == 8


def test_packed_documents_equal_separate_ones() -> None:
    q, k, v = (torch.randn(1, 2, 12, 4, dtype=torch.float64) for _ in range(3))
    segments = torch.tensor([[0] * 5 + [1] * 7])
    for causal in (True, False):
        found = attention(q, k, v, None, segments, scale=0.5, mask="causal" if causal else "all")
        parts = [
            attention(q[:, :, cut], k[:, :, cut], v[:, :, cut], scale=0.5, mask="causal" if causal else "all")
            for cut in (slice(0, 5), slice(5, 12))
        ]
        torch.testing.assert_close(found, torch.cat(parts, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention is of CUDA")
@pytest.mark.parametrize("col", [0, 128], ids=["all", "diagonal"])
@pytest.mark.parametrize("heads", [4, 2])
def test_flash_kernels_give_the_blocks_terms(col: int, heads: int) -> None:
    """In bfloat16 beside matrix products in float64, weighted by the log-sum-exp of more keys than the block has."""
    dice = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, 4, 128, 64), (2, heads, 128, 64), (2, heads, 128, 64), (2, 4, 128, 64)]
    q, k, v, grad = (torch.randn(s, generator=dice, device="cuda", dtype=torch.bfloat16) for s in shapes)
    tiles, block = AttentionTiles(0.125, Sight(True, 0), 2**20), Block(128, 128, col, 128)

    def both(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        total, into = Total(q, 64), tuple(torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
        tiles.forward(block, q, k, v, Ids(), total)
        out, lse = total.finished()
        tiles.backward(block, grad, q, out, lse + 0.5, k, v, Ids(), into)  # type: ignore[arg-type]
        return out, lse, *into

    found = both(q, k, v, grad)
    expected = both(*(x.double() for x in (q, k, v, grad)))
    for a, b, bound in zip(found, expected, (2e-2, 1e-3, 5e-2, 5e-2, 5e-2), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=bound, atol=bound)
