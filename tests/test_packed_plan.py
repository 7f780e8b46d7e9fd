"""The path of benchmarks/packed_plan.py, with few tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import quintnet
from benchmarks.packed_plan import answer, documents_of, llama, packed_batch, uneven_in_order
from quintnet_compiler.core.slices import runs
from quintnet_compiler.cost_models.hardware import H100
from quintnet_compiler.ops.attention.blocks import Sight
from quintnet_compiler.ops.attention.seen_keys import SeenKeys

pytest.importorskip("transformers")
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256,
}  # fmt: skip


def test_rows_hold_documents_in_another_order_each() -> None:
    batch = packed_batch(3, 4096, 8)
    for row, positions in enumerate(batch["position_ids"]):
        begins = (positions == 0).nonzero().flatten().tolist()
        sizes = [end - begin for begin, end in zip(begins, [*begins[1:], 4096], strict=True)]
        assert sizes == documents_of(row, 4096, 8) and sorted(sizes) == documents_of(0, 4096, 8)
    assert batch["input_ids"].is_meta and batch["position_ids"].shape == (3, 4096)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_a_packed_plan_is_made_and_simulated() -> None:
    """One row over two devices whose host takes no time, as a small model would be the host's."""
    device = replace(H100, efficiency=replace(H100.efficiency, host_seconds=0.0), launch_seconds=0.0)
    cluster = quintnet.Cluster(device, gpus_per_node=2)
    found = answer(llama(2, **SMALL), cluster, 1, 2**16, 16)
    assert found["documents"] == 16 and found["ranks"] == 2
    assert found["planned_s"] == pytest.approx(found["simulated_s"], rel=0.05)
    assert found["simulated_gib"] < found["planned_gib"] < 80
    assert found["one_document_s"] > found["one_document_for_these_s"] >= found["planned_s"]
    assert any(note.startswith("rows are taken to have 16 documents") for note in found["notes"])


@pytest.mark.parametrize("ranks", [1, 2, 8, 32])
def test_what_is_uneven_is_what_prices_have(ranks: int) -> None:
    rows = [documents_of(row, 2**16, 32) for row in range(3)]
    mine = [runs(2**16, (1,), (ranks,), (rank,)) for rank in range(ranks)]
    each = [SeenKeys(Sight(causal=True), 2**16, mine, sizes).uneven for sizes in rows]
    assert uneven_in_order(rows, ranks) == pytest.approx(sum(each) / len(each), rel=2e-3)
