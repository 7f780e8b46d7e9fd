"""Ids of documents in a graph: what they are, where a batch or constants say so, and the lengths that follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quintnet_compiler.capture.capture import capture
from quintnet_compiler.core.annotations import facts
from quintnet_compiler.ir.expectations import MOST_DOCUMENTS, Expectations
from quintnet_compiler.ops.attention.operator import attention
from quintnet_compiler.passes.frontend.document_ids import documents_in, expect_documents, known_value, run_lengths
from quintnet_compiler.passes.frontend.normalize import Normalize


class _Packed(nn.Module):
    """Ids of documents from positions that begin again, and of another attention from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor, positions: Tensor, groups: Tensor) -> Tensor:
        documents = (positions.diff(dim=1, prepend=positions[:, :1]) != 1).cumsum(1)
        q, k, v = (y[:, None] for y in self.qkv(x).chunk(3, -1))
        x = attention(q, k, v, None, documents, scale=1.0, mask="causal")
        x = x + attention(q, k, v, None, None, groups, scale=1.0, mask="causal")
        q, k, v = (y[:, :, :4] for y in (q, k, v))
        short = attention(q, k, v, None, groups[:, :4], scale=1.0, mask="causal")
        return x.square().mean() + short.square().mean()


def _batch(*rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.stack([torch.cat([torch.arange(size) for size in sizes]) for sizes in rows])
    return torch.randn(*positions.shape, 4), positions, torch.zeros_like(positions)


def _program(batch: Any, model: nn.Module | None = None, **options: Any) -> Any:
    return Normalize(len(batch[0]), torch.device("cpu"), **options)(capture(model or _Packed(), batch, None))


def test_lengths_are_those_of_the_longest_rows() -> None:
    batch = _batch([3, 1, 4], [8])
    program = _program(batch)
    assert documents_in(program, batch) == (3, 1, 4, 8)
    assert documents_in(program, (batch[0].to("meta"), batch[1], batch[2])) == (3, 1, 4, 8)


def test_without_values_nothing_is_known() -> None:
    batch = _batch([3, 1, 4], [8])
    program = _program(batch)
    assert documents_in(program, [x.to("meta") for x in batch]) == ()
    assert documents_in(program, ()) == documents_in(program, batch[:2]) == ()
    ids = next(node for node in program.graph.nodes if "cumsum" in str(node.target))
    assert known_value(ids, {}) is None


def test_of_many_documents_those_of_the_first_rows_count() -> None:
    half = MOST_DOCUMENTS // 2 + 1
    batch = _batch([1] * half, [half], [half])
    assert documents_in(_program(batch), batch) == (1,) * half + (half, half)
    batch = _batch([1] * half, [1] * half)
    assert documents_in(_program(batch), batch) == (1,) * half
    batch = _batch([1] * (MOST_DOCUMENTS + 5))
    assert documents_in(_program(batch), batch) == (1,) * MOST_DOCUMENTS


def test_the_model_may_be_elsewhere() -> None:
    """What a model on the meta device makes of a batch's values is computed on the host."""

    class Made(_Packed):
        def forward(self, x: Tensor, positions: Tensor, groups: Tensor) -> Tensor:
            ahead = torch.zeros(1, 1, dtype=positions.dtype, device=x.device)
            ids = (torch.cat([ahead.expand(len(x), 1), positions[:, 1:]], 1) == 0).cumsum(1)
            q, k, v = (y[:, None] for y in self.qkv(x).chunk(3, -1))
            return attention(q, k, v, None, ids, scale=1.0, mask="causal").square().mean()

    batch = _batch([3, 5])
    with torch.device("meta"):
        model = Made()
    program = _program((batch[0].to("meta"), *batch[1:]), model)
    assert documents_in(program, (batch[0].to("meta"), *batch[1:])) == (3, 5)


def test_attention_with_documents_has_the_fact() -> None:
    program = _program(_batch([3, 1, 4], [8]), expect=Expectations(documents=(3, 5)))
    found = program.graph.find_nodes(op="call_function", target=attention)
    assert [facts(node).documents for node in found] == [(3, 5), (), (3, 5)]
    expect_documents(program.graph, (7,))
    assert [facts(node).documents for node in found] == [(7,), (), (7,)]


def test_runs_of_ids() -> None:
    assert run_lengths(torch.tensor([2, 2, 1, 2])) == [2, 1, 1] and run_lengths(torch.tensor([5])) == [1]
