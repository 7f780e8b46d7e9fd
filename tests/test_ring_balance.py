"""A ring whose work follows unequal documents: every layout computes what the unsplit module does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import quintnet
from quintnet_compiler.ops.attention.ring_plan import positions_of, ring_plan, runs_of_rank
from quintnet_compiler.runtime.transport.local import LocalTransport

from .models import WIDTH, Packed, document_ids

torch.set_num_threads(1)


MASKS: dict[str, Any] = {"causal": ("causal",), "all": ("all",), "window": ("causal_window_7",),
         "chunk": ("causal_chunk_16",), "padding": ("causal", "padding"), "prefix": ("causal", "groups"),
         "both": ("causal_window_9", "padding", "groups")}  # fmt: skip
MESHES: list[tuple[dict[str, int], int]] = [
    ({"cp": 2}, 1), ({"cp": 4}, 2), ({"cp": 3}, 4), ({"tp": 2, "cp": 2}, 1), ({"dp": 2, "cp": 4}, 2),
    ({"pp": 2, "cp": 4}, 4), ({"pp": 2, "dp": 2, "cp": 2, "tp": 2}, 2),
]  # fmt: skip
ROWS = [[16 * size for size in sizes] for sizes in ([33, 10, 5], [20, 28], [40, 7, 1], [33, 5, 5, 5])]
FAST = {("causal", 1), ("prefix", 3), ("both", 4)}


def _batch(rows: list[list[int]], *more: str) -> dict[str, Tensor]:
    documents, at = document_ids(rows), torch.arange(sum(rows[0]))
    x = torch.randn(*documents.shape, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shown = {"padding": (at < len(at) - 5).expand_as(documents), "groups": torch.where(at < 9, documents, -1)}
    return {"x": x, "documents": documents, **{name: shown[name] for name in more}}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "index"),
    [
        pytest.param(name, index, marks=[] if (name, index) in FAST else pytest.mark.slow)
        for name in MASKS
        for index in range(len(MESHES))
    ],
)
def test_balanced_documents_equal_the_module(name: str, index: int) -> None:
    (mask, *more), (axes, microbatches) = MASKS[name], MESHES[index]
    torch.manual_seed(0)
    batch, zero = _batch(ROWS, *more), index % 4 if "dp" in axes else 0
    options: dict[str, Any] = {"context": "ring", "microbatches": microbatches, "zero": zero}
    program = quintnet.compile(Packed(mask).double(), quintnet.Mesh(**axes), batch, **options)
    assert "send_runs" in program.ranks[0].stages[0].forward.code
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


def test_these_documents_leave_runs_neither_in_order_nor_as_one_document_does() -> None:
    for rows in (ROWS, ROWS[:2], ROWS[2:]):
        plan = ring_plan(None, document_ids(rows), None, "causal", 768, 4, 2).tolist()
        assert plan not in ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 7], [2, 5], [3, 4], [1, 6]]), plan


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_runs_of_long_rows_equal_the_module(recompute: str) -> None:
    """Four runs for each of two ranks, which go neither in order nor as for one document."""
    model, batch = Packed().double(), _batch([[100, 1500, 448]])
    plan = ring_plan(None, batch["documents"], None, "causal", 2048, 2, runs_of_rank(1024))
    assert plan.shape == (2, 4) and plan.tolist()[0] not in ([0, 1, 2, 3], [0, 1, 6, 7])
    program = quintnet.compile(model, quintnet.Mesh(cp=2), batch, context="ring", recompute=recompute)
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)
    pieces = program.ranks[0].stages[0].pieces.values()
    plans = [node for piece in pieces for node in piece.module.graph.nodes if node.target is ring_plan]
    assert len(plans) == 1, "one plan for all layers, forward and backward"


@pytest.mark.sample(1)
@pytest.mark.parametrize("sizes", [[16], [4, 4, 4, 4], [1, 10, 5], [2, 2, 2, 10]], ids=str)
def test_a_step_sends_the_runs_that_leave_their_ranks(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    """Of q, k, v and the result, and of their gradients: eight times the runs that a rank does not compute itself."""
    ranks, length, batch = 4, 64 * 16, _batch([[64 * size for size in sizes]])
    plan = ring_plan(None, batch["documents"], None, "causal", length, ranks, 2).tolist()
    sent: Counter[int] = Counter()
    exchange = LocalTransport._exchange_rows

    def counted(self: LocalTransport, x: Tensor, *how: Any) -> Tensor:
        sent[self.rank] += x.numel() * x.element_size()
        return exchange(self, x, *how)

    monkeypatch.setattr(LocalTransport, "_exchange_rows", counted)
    program = quintnet.compile(Packed().double(), quintnet.Mesh(cp=ranks), batch, context="ring")
    program.step(batch)
    one = length // ranks // 2 * WIDTH * 8  # bytes of a run
    away = [sum(run // 2 != rank for run in plan[rank]) for rank in range(ranks)]
    assert [sent[rank] for rank in range(ranks)] == [2 * 8 * one * count for count in away]
    assert (sum(away) == 0) == (sizes == [4, 4, 4, 4])


def test_no_rank_has_more_work_than_its_share() -> None:
    """Counted in masks. A batch has one plan, by the work of all its rows."""
    rows = [[256 * size for size in sizes] for sizes in ([1, 2, 3, 4, 6], [5, 3, 8], [16])]
    ids = document_ids(rows)
    length, at = ids.shape[1], torch.arange(ids.shape[1])
    seen = torch.stack([((one[:, None] == one) & (at[:, None] >= at)).sum(1) for one in ids]).sum(0)
    for some, work in ((ids, seen), (ids[:1], ((ids[0][:, None] == ids[0]) & (at[:, None] >= at)).sum(1))):
        for ranks in (2, 4):
            count = runs_of_rank(length // ranks)
            held = positions_of(
                ring_plan(None, some, None, "causal", length, ranks, count).tolist(), length // ranks // count
            )
            mine = [sum(int(work[first : first + n].sum()) for first, n in runs) for runs in held]
            assert sum(mine) == int(work.sum()) and max(mine) * ranks <= 1.1 * sum(mine), mine
