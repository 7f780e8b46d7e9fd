"""ops.attention.ring_plan and runtime.transport.run_exchange: which runs a rank computes, and how they travel."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.ops.attention.blocks import Block, Sight
from quintnet_compiler.ops.attention.operator import visible
from quintnet_compiler.ops.attention.ring_plan import assign_runs, positions_of, ring_plan
from quintnet_compiler.ops.attention.tiles import Ids
from quintnet_compiler.runtime.transport.local import LocalTransport, LocalWorld
from quintnet_compiler.runtime.transport.run_exchange import RunExchange

LENGTH = 96


def _ids(sizes: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.tensor(sizes))


@pytest.mark.parametrize("seed", range(20))
def test_each_run_is_assigned_once_and_work_is_near_the_best_there_is(seed: int) -> None:
    dice = random.Random(seed)
    work = [dice.random() ** dice.choice([1, 3]) for _ in range(8)]
    held = assign_runs(work, 2)
    assert sorted(run for runs in held for run in runs) == list(range(8)) and [len(runs) for runs in held] == [4, 4]
    assert all(list(runs) == sorted(runs) for runs in held)
    most = max(sum(work[run] for run in runs) for runs in held)
    best = min(max(sum(mine), sum(work) - sum(mine)) for mine in itertools.combinations(work, 4))
    starts = [[*range(4)], [0, 1, 6, 7]]
    assert (
        best <= most <= min(max(sum(work[i] for i in mine), sum(work) - sum(work[i] for i in mine)) for mine in starts)
    )
    assert most <= max(1.05 * best, 1.02 * sum(work) / 2)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("runs", [2, 4, 8])
def test_one_document_is_two_runs_of_a_rank_and_equal_ones_stay(ranks: int, runs: int) -> None:
    part = 64 * runs
    whole, half = ranks * part, part // 2
    mirrored = [{*range(first, first + half), *range(whole - first - half, whole - first)}
                for first in range(0, whole, part)]  # fmt: skip
    for ids in (None, torch.zeros(1, whole)):
        held = positions_of(ring_plan(None, ids, None, "causal", whole, ranks, runs).tolist(), 64)
        assert max(map(len, held)) <= 2
        assert [{at for first, n in mine for at in range(first, first + n)} for mine in held] == mirrored
    equal = torch.arange(ranks).repeat_interleave(part)[None]
    for mask, documents in (("causal", equal), ("all", torch.zeros(1, whole))):
        plan = ring_plan(None, documents, None, mask, whole, ranks, runs)
        assert plan.flatten().tolist() == list(range(ranks * runs))


@pytest.mark.parametrize("seed", range(20))
def test_work_is_what_a_mask_shows(seed: int) -> None:
    """Half of itself apart. Ids without neighbours that are taken together, rows of a batch together."""
    dice = random.Random(seed)
    rows, at = 2, torch.arange(LENGTH)
    segments = torch.stack([_ids([n := dice.randrange(1, LENGTH), LENGTH - n]) for _ in range(rows)])
    groups = torch.where(at < dice.randrange(LENGTH), 0, -1).expand(rows, -1) if dice.random() < 0.5 else None
    padding = (at < dice.randrange(1, LENGTH)).expand(rows, -1) if dice.random() < 0.5 else None
    sight, ids = Sight(causal=dice.random() < 0.7), Ids(padding, segments, groups, few=1)
    both = None if groups is None else (groups, groups)
    mask = visible(at, at, sight, padding=padding, segments=(segments, segments), groups=both)[:, 0]
    for first, count in ((0, LENGTH), (LENGTH // 4, 17)):
        exact = int(mask[:, first : first + count].sum())
        own = int(mask.diagonal(dim1=1, dim2=2)[:, first : first + count].sum())
        found = ids.computed_pairs(sight, Block(first, count, 0, LENGTH))
        assert exact - own / 2 <= found + 1e-9 and found <= exact + 1e-9 if groups is None else found >= exact - own / 2
        if groups is None and sight.causal:
            assert found == exact - own / 2


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_runs_come_to_their_ranks_and_return(ranks: int, seed: int) -> None:
    """What is sent is what leaves a rank, and nobody meets where all runs stay."""
    dice = random.Random(seed)
    held = list(range(4 * ranks))
    dice.shuffle(held)
    plan = torch.tensor([sorted(held[4 * rank : 4 * rank + 4]) for rank in range(ranks)])
    whole = torch.randn(2, 3, ranks * 8, 5)
    sent: dict[int, int] = {}

    class Counted(LocalTransport):
        def _exchange_rows(self, x: Tensor, *how: Any) -> Tensor:
            sent[self.rank] = len(x)
            return super()._exchange_rows(x, *how)

    def one(transport: LocalTransport, which: Tensor) -> tuple[Tensor, Tensor, int]:
        counted = Counted(transport.world, transport.rank)
        exchange = RunExchange(counted, Mesh(cp=ranks), {"cp": transport.rank})
        x = whole.chunk(ranks, 2)[transport.rank]
        there = exchange.send_runs(x, "cp", 2, which, 0)
        return there, exchange.return_runs(there, "cp", 2, which, 0), counted.met

    def everyone(which: Tensor) -> dict[int, tuple[Tensor, Tensor, int]]:
        world = LocalWorld(Mesh(cp=ranks), ("here",))
        return world.run_ranks({rank: lambda t: one(t, which) for rank in range(ranks)})

    for rank, (there, back, met) in everyone(plan).items():
        places = [at for run in plan[rank].tolist() for at in range(2 * run, 2 * run + 2)]
        assert torch.equal(there, whole[:, :, places]) and torch.equal(back, whole.chunk(ranks, 2)[rank])
        assert there.is_contiguous() and met == 2
        assert sent[rank] == sum(run // 4 != rank for run in plan[rank].tolist())
    for rank, (there, back, met) in everyone(torch.arange(4 * ranks).view(ranks, 4)).items():
        assert torch.equal(there, whole.chunk(ranks, 2)[rank]) and torch.equal(back, there) and met == 0
