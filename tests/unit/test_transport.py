"""runtime.transport on two or three ranks of this process: what each rank gets, worked by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quintnet_compiler.core.errors import RunError
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.ops.attention.blocks import Sight
from quintnet_compiler.ops.attention.ring_plan import ring_plan
from quintnet_compiler.ops.attention.tiles import AttentionTiles, Ids
from quintnet_compiler.runtime.transport.local import LocalTransport, LocalWorld
from quintnet_compiler.runtime.transport.ring import Ring, runs_of
from quintnet_compiler.runtime.transport.token_dispatch import Router


def _run(work: Callable[[LocalTransport, int], Any], ranks: int = 2, axis: str = "tp") -> list[Any]:
    world = LocalWorld(Mesh(**{axis: ranks}), ["here"])
    found = world.run_ranks({rank: lambda transport, rank=rank: work(transport, rank) for rank in range(ranks)})  # type: ignore[misc]
    return [found[rank] for rank in range(ranks)]


def test_collectives() -> None:
    def x(rank: int) -> Tensor:
        return torch.tensor([1.0, 2.0, 3.0, 4.0]) * 10**rank

    assert _run(lambda t, r: t.run("all_reduce", x(r), "tp", 0).tolist()) == [[11, 22, 33, 44]] * 2
    assert _run(lambda t, r: t.run("all_gather", x(r)[:1], "tp", 0, 1, 0).tolist()) == [[1, 10]] * 2
    assert _run(lambda t, r: t.run("reduce_scatter", x(r), "tp", 0, 1, 0).tolist()) == [[11, 22], [33, 44]]
    assert _run(lambda t, r: t.run("reduce_scatter", x(r), "tp", 0, 2, 0).tolist()) == [[11, 33], [22, 44]]  # S(0, 2)

    def exchanged(t: LocalTransport, r: int) -> list[list[float]]:
        return t.run("all_to_all", x(r).view(2, 2), "tp", 0, 1, 1, 1, 0).tolist()

    # rows of the whole [[1, 2], [3, 4], [10, 20], [30, 40]] become columns of it
    assert _run(exchanged) == [[[1], [3], [10], [30]], [[2], [4], [20], [40]]]


def test_ranks_that_meet_different_collectives_are_told() -> None:
    with pytest.raises(RunError, match="QN401") as told:
        _run(lambda t, r: t.run("all_reduce", torch.ones(2 + r), "tp", 0))
    assert "rank 0 is in #0 here of (2,)" in str(told.value) and "rank 1 is in #0 here of (3,)" in str(told.value)
    with pytest.raises(RunError, match="QN402"):
        _run(lambda t, r: t.run("all_reduce", torch.ones(2), "tp", 0) if r else None)


def test_rows_travel_to_their_experts_and_back() -> None:
    ids = [torch.tensor([1, 0, 1]), torch.tensor([0, 0, 1])]  # expert 0 lives on rank 0

    def work(t: LocalTransport, rank: int) -> tuple[list[float], list[float]]:
        router = Router(t, Mesh(ep=2))
        plan = router.dispatch_plan(ids[rank], "ep", 2, 1, [], 0)
        rows = torch.tensor([[1.0], [2.0], [3.0]]) + 10 * rank
        here = router.dispatch(rows, "ep", *plan, 0)
        back = router.combine(here * (rank + 2), "ep", *plan, 0)
        return here.flatten().tolist(), back.flatten().tolist()

    first, second = _run(work, axis="ep")
    assert first[0] == [2, 11, 12] and second[0] == [1, 3, 13]
    assert first[1] == [3, 4, 9] and second[1] == [22, 24, 39]  # times 2 on rank 0, times 3 on rank 1


def test_ranks_tell_each_other_how_many_rows_each_expert_gets() -> None:
    ids = [torch.tensor([3, 0, 3, -1]), torch.tensor([0, 1, 2, 3])]  # experts 0 and 1 live on rank 0; -1 is none

    def work(t: LocalTransport, rank: int) -> list[list[list[int]]]:
        return Router(t, Mesh(ep=2)).dispatch_plan(ids[rank], "ep", 4, 1, [], 0)[1].tolist()

    first, second = _run(work, axis="ep")
    assert first == [[[1, 0, 0], [0, 2, 1]], [[1, 0, 0], [1, 1, 0]]]  # what leaves, what comes; the last: of none
    assert second == [[[1, 1, 0], [1, 1, 0]], [[0, 2, 1], [1, 1, 0]]]


def test_rows_of_hot_experts_stay_on_their_rank() -> None:
    ids = [torch.tensor([3, 0, 3, -1]), torch.tensor([0, 3, 2, 3])]

    def work(t: LocalTransport, rank: int) -> tuple[list[list[list[int]]], list[int], list[int]]:
        router = Router(t, Mesh(ep=2))
        order, counts = router.dispatch_plan(ids[rank], "ep", 4, 1, [3], 0)
        here = router.dispatch(ids[rank] + 10 * rank, "ep", order, counts, 0)
        return counts.tolist(), here.tolist(), router.combine(here, "ep", order, counts, 0).tolist()

    first, second = _run(work, axis="ep")
    # by a rank's own experts, the hot one, and none
    assert first[0] == [[[1, 0, 2, 0], [0, 0, 0, 1]], [[1, 0, 2, 0], [1, 0, 0, 0]]]
    assert second[0] == [[[1, 0, 0, 0], [1, 0, 2, 0]], [[0, 0, 0, 1], [1, 0, 2, 0]]]
    assert first[1] == [0, 3, 3, 10] and second[1] == [-1, 12, 13, 13]
    assert first[2] == ids[0].tolist() and second[2] == (ids[1] + 10).tolist()


@pytest.mark.parametrize("balance", [False, True])
def test_positions_of_a_ring(balance: bool) -> None:
    tiles, plan = AttentionTiles(1.0, Sight(True, 0), 1), ring_plan(None, None, None, "causal", 8, 2, 2)
    runs = runs_of(plan if balance else None, 2, 4)
    rings = [Ring(None, "cp", 2, rank, 0, tiles, runs) for rank in range(2)]  # type: ignore[arg-type]
    owned = [{at + i for at, count in ring.runs[ring.index] for i in range(count)} for ring in rings]
    assert owned[0] | owned[1] == set(range(8)) and not owned[0] & owned[1]
    work = [
        sum(Ids().computed_pairs(tiles.sight, b) for owner in range(2) for *_, b in ring.unmasked_blocks(owner, Ids()))
        for ring in rings
    ]
    assert (work[0] == work[1]) is balance  # mirrored halves see equally many keys
