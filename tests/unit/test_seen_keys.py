"""What prices assume that queries see, beside the pairs themselves."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from benchmarks.packed import lengths, pairs, shuffled, uneven
from quintnet_compiler.core.slices import runs
from quintnet_compiler.ops.attention.blocks import Sight
from quintnet_compiler.ops.attention.operator import visible
from quintnet_compiler.ops.attention.ring_plan import positions_of, ring_plan
from quintnet_compiler.ops.attention.seen_keys import SeenKeys, SeenRow, rows_of
from quintnet_compiler.ops.attention.tiles import AttentionTiles, Ids
from quintnet_compiler.runtime.transport.ring import Ring, runs_of

LENGTH = 48


def _ids(sizes: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.tensor(sizes))


def _cut(dice: random.Random) -> list[int]:
    ends = sorted({*dice.sample(range(1, LENGTH), dice.randrange(8)), LENGTH})
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _visible(sight: Sight, sizes: list[int]) -> Tensor:
    at, ids = torch.arange(sum(sizes)), _ids(sizes)[None]
    return visible(at, at, sight, segments=(ids, ids))[0, 0]


@pytest.mark.parametrize("seed", range(40))
def test_pairs_are_those_that_a_mask_shows(seed: int) -> None:
    """But for the half of itself that a query does not see where later keys are hidden, or earlier ones."""
    dice = random.Random(seed)
    sizes = _cut(dice)
    sight = Sight(dice.random() < 0.6, dice.choice([0, 0, 1, 5]), dice.choice([0, 0, 7]))
    seen, row = _visible(sight, sizes), SeenRow(sight, LENGTH, tuple(accumulate(sizes)))
    for size, parts in (((1,), (1,)), ((4,), (1,)), ((2, 4), (1, 3)), ((3,), (4,))):
        for place in ((0,) * len(size), tuple(n - 1 for n in size)):
            mine = runs(LENGTH, parts, size, place)
            queries = sum(count for _, count in mine)
            exact = sum(int(seen[first : first + count].sum()) for first, count in mine)
            if sight == Sight(chunk=sight.chunk):
                assert row.pairs(mine) == exact
            else:
                assert abs(row.pairs(mine) - exact) <= queries / 2
            if sight == Sight(causal=True, chunk=sight.chunk):
                assert row.pairs(mine) == exact - queries / 2


@pytest.mark.parametrize("seed", range(40))
def test_rings_end_when_nobody_sees_more(seed: int) -> None:
    dice = random.Random(seed)
    sizes, balance = _cut(dice), dice.random() < 0.5
    sight = Sight(dice.random() < 0.8, dice.choice([0, 0, 1, 5, 13]), dice.choice([0, 0, 6]))
    for size in (1, 2, 3, 4, 6, 8):
        ids, how = _ids(sizes)[None], (str(sight), LENGTH, size, 2)
        ranks = runs_of(ring_plan(None, ids, None, *how) if balance else None, size, LENGTH // size)
        ring = Ring(None, "cp", size, 0, 0, AttentionTiles(1.0, sight, 1), ranks)  # type: ignore[arg-type]
        row = SeenRow(sight, LENGTH, tuple(accumulate(sizes)))
        known = Ids(None, ids, None, few=1)
        assert row.steps(ranks) == ring.count_steps(known)
        for rank in range(size):
            found = sum(1 for owner in range(size) for _ in ring.unmasked_blocks(owner, known, rank))
            assert found == sum(mine == rank for mine, _ in row.blocks(ranks))


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_rank_that_has_most_is_that_of_the_closed_form(size: int, seed: int) -> None:
    """In order and as runs are assigned; what prices assign is what ranks do."""
    sizes = shuffled(lengths(2**16, 64), seed)
    part, most = 2**16 // size, uneven([sizes], size, 8)
    in_order = [[(rank * part, part)] for rank in range(size)]
    plan = ring_plan(None, _ids(sizes)[None], None, "causal", 2**16, size, 8)
    held = positions_of(plan.tolist(), part // 8)
    for assigned, ranks, over in ((0, in_order, most.in_order), (8, held, most.assigned)):
        found = SeenKeys(Sight(causal=True), 2**16, in_order, sizes, assigned=assigned)
        assert found.groups[0][1] == ranks and found.uneven == pytest.approx(over, rel=1e-3)
        work = [sum(pairs(first, first + count, sizes) for first, count in mine) - part / 2 for mine in ranks]
        assert found.mean == pytest.approx(max(work) / part, rel=1e-12)
        assert found.leaving == (most.leaving if assigned else 0)
    assert most.assigned < 1.05 < most.in_order


def test_rows_go_on_where_the_one_before_ended() -> None:
    assert list(rows_of([5, 3], 4)) == [(4,), (1, 4)]
    assert list(rows_of([6], 4)) == [(4,), (2, 4)]
    assert list(rows_of([2**30], 4))[:1] == [(4,)] and len(list(rows_of([2**30], 4))) == 256
    # a rank with two rows at once waits for neither; with one at a time for each
    halves = [[(0, 4)], [(4, 4)]]
    alone, both = (SeenKeys(Sight(causal=True), 8, halves, [4, 4, 8], together=n) for n in (1, 2))
    assert alone.mean == both.mean == (2 + 6) / 2
    crossed = [SeenKeys(Sight(causal=True), 8, halves, [4, 2, 2, 1, 1, 1, 1, 4], together=n).mean for n in (1, 2)]
    assert crossed == [(2 + 2) / 2, (1 + 2) / 2]
