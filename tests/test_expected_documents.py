"""Predictions for packed rows: ``documents`` of a plan, or of the batch that the planner is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import quintnet
from benchmarks.packed import lengths, pairs, uneven
from quintnet_compiler.core.annotations import facts
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts
from quintnet_compiler.cost_models.hardware import H100
from quintnet_compiler.cost_models.operators import attention_flops, launches_of, ring_steps
from quintnet_compiler.ops.attention.operator import attention
from quintnet_compiler.ops.catalog import op_spec
from quintnet_compiler.ops.rules.work import work_of
from quintnet_compiler.simulation.priced import ProgramPrices

pytestmark = pytest.mark.usefixtures("shared_captures")

torch.set_num_threads(1)
LENGTH, WIDTH, HEADS = 4096, 32, 4
SIZES = lengths(LENGTH, 8)
LONG = lengths(16 * LENGTH, 8)  # attention takes longer than starting its kernels
CONTEXTS: dict[str, dict[str, Any]] = {
    "gathered": {"context": "all_gather"},
    "ulysses": {"context": "ulysses"},
    "ring": {"context": "ring", "context_load_balance": False},
    "balanced": {"context": "ring"},
}


class Packed(nn.Module):
    def __init__(self, mask: str = "causal") -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.mask = mask

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        for qkv in self.qkv:
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()
            x = x + attention(q, k, v, None, documents, scale=0.3, mask=self.mask).transpose(1, 2).flatten(2)
        return x.square().mean()


def _batch(*rows: list[int], device: str = "cpu") -> tuple[Tensor, Tensor]:
    ids = torch.stack([torch.repeat_interleave(torch.tensor(sizes)) for sizes in rows])
    return torch.empty(*ids.shape, WIDTH, device=device), ids


def _program(
    mesh: quintnet.Mesh, documents: list[int] | None, sizes: list[int] = SIZES, **options: Any
) -> quintnet.CompiledProgram:
    batch = _batch(sizes)
    expect = None if documents is None else {"documents": documents}
    return quintnet.compile(Packed(), mesh, batch, expect=expect, check="off", **options)


def _attention(program: quintnet.CompiledProgram) -> list[fx.Node]:
    nodes = program._primary().program.source.graph.nodes
    return [node for node in nodes if work_of(node.target) == "attention"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_attention_is_priced_by_what_the_busiest_rank_sees(name: str, precision: str) -> None:
    """Forward and backward, by the closed form of what documents leave; programs and their digests are the same."""
    mesh, ranks, options = quintnet.Mesh(cp=4), 4, CONTEXTS[name] | {"precision": precision}
    known, unknown = (_program(mesh, given, **options) for given in (SIZES, None))
    assert known._primary().program.text == unknown._primary().program.text
    assert known._primary().program.digest == unknown._primary().program.digest
    found = _attention(known)
    assert len(found) == 4 and all(facts(node).documents == tuple(SIZES) for node in found)
    part, whole = LENGTH // (1 if name == "ulysses" else ranks), pairs(0, LENGTH, SIZES)
    over = {"ulysses": ranks, "balanced": uneven([SIZES], ranks, 4).assigned}.get(name, uneven([SIZES], ranks).in_order)
    most = whole * over / ranks - part / 2
    heads, width = HEADS // (ranks if name == "ulysses" else 1), WIDTH // HEADS
    for node in found:
        products = 5 if "backward" in str(node.target) else 2
        assert attention_flops(node) == pytest.approx(products * 2 * heads * most * width, rel=1e-12)
        assert launches_of(node) >= 1


@pytest.mark.slow
def test_one_document_is_what_no_documents_are() -> None:
    x, ids = _batch(SIZES)
    for options in CONTEXTS.values():
        known = _program(quintnet.Mesh(cp=4), [LENGTH], **options)
        unknown = quintnet.compile(Packed(), quintnet.Mesh(cp=4), (x, ids.to("meta")), check="off", **options)
        assert known.simulate().seconds == unknown.simulate().seconds


def test_simulations_read_the_latest_batch() -> None:
    """And leave the program as it was."""
    known, unknown = (_program(quintnet.Mesh(cp=4), given, LONG, context="ring") for given in (LONG, None))
    assert unknown.simulate().seconds == known.simulate().seconds
    assert not any(facts(node).documents for node in _attention(unknown))
    unknown.prepare(_batch([sum(LONG)]))
    whole = _program(quintnet.Mesh(cp=4), [sum(LONG)], LONG, context="ring").simulate()
    assert unknown.simulate().seconds == whole.seconds > known.simulate().seconds


def _in_ring(node: fx.Node) -> bool:
    kind = op_spec(node).attention
    return kind is not None and kind.positions == "ring"


def test_keys_travel_as_far_as_documents_reach() -> None:
    """Over four ranks, documents of half a row need one step of three; those of a quarter none."""
    sent = []
    for size in (LENGTH, LENGTH // 2, LENGTH // 4):
        program = _program(quintnet.Mesh(cp=4), [size], **CONTEXTS["ring"])
        prices = ProgramPrices(program._primary().program, replace(ClusterCosts(Cluster("h100")), overlaps=False))
        stage = program.ranks[0].stages[0]
        rings = [time for piece in stage.pieces for time in prices.node_times(stage, piece)
                 if "ring" in str(time.node.target)]  # fmt: skip
        steps = {ring_steps(node) for node in _attention(program) if _in_ring(node)}
        sent.append((*steps, sum(time.communication for time in rings)))
    assert [steps for steps, _ in sent] == [4, 2, 1]
    assert sent[0][1] > 2 * sent[1][1] > 0 and sent[2][1] == 0


@pytest.mark.slow
def test_windows_end_a_ring() -> None:
    for mask, steps in (("causal", 4), (f"causal_window_{LENGTH // 4}", 2), (f"causal_chunk_{LENGTH // 4}", 1)):
        x, _ = _batch(SIZES)
        model = Packed(mask)
        program = quintnet.compile(model, quintnet.Mesh(cp=4), (x, torch.zeros(1, LENGTH)), check="off",
                                   **CONTEXTS["ring"])  # fmt: skip
        assert {ring_steps(node) for node in _attention(program)} == {steps}


@pytest.mark.slow
def test_estimates_read_the_batch() -> None:
    """Of two rows with documents of their own; given as a plan's option they cost the same."""
    sizes = [LONG, lengths(sum(LONG), 3)]
    model, (x, ids), cluster = Packed(), _batch(*sizes), quintnet.Cluster(_quick(), gpus_per_node=4)
    for options in ({"mesh": {"cp": 4}, "context": "ring"}, {"mesh": {"dp": 2, "cp": 2}}):
        read = quintnet.estimate(model, cluster, (x, ids), options)
        said = quintnet.estimate(
            model, cluster, (x, ids.to("meta")), {**options, "expect": {"documents": [*sizes[0], *sizes[1]]}}
        )
        none = quintnet.estimate(model, cluster, (x, ids.to("meta")), options)
        assert read.seconds == said.seconds < none.seconds
        assert read.figures.flops == said.figures.flops < none.figures.flops
        whole = {**options, "expect": {"documents": [sum(LONG)]}}
        assert quintnet.estimate(model, cluster, (x, ids), whole).seconds == none.seconds


@pytest.mark.slow
def test_plans_keep_what_they_expect() -> None:
    """So that a program that is compiled with one is simulated with the same documents, on any rank."""
    model, batch, cluster = Packed(), _batch(SIZES, SIZES), quintnet.Cluster(_quick(), gpus_per_node=2)
    report = quintnet.plan(model, cluster, batch, plan={"mesh": {"dp": 2}}, top_k=1)
    plan = report.best
    assert plan.expect.documents == (*SIZES, *SIZES) and quintnet.Plan.from_json(plan.to_json()) == plan
    assert f"documents of {min(SIZES)} to {max(SIZES)} positions" in str(report)
    known = quintnet.compile(model, quintnet.Mesh(**plan.mesh), batch, plan=plan, check="off").simulate(cluster)
    assert "rows are taken to have 8 documents" in str(known)
    hidden = batch[0], batch[1].to("meta")
    unknown = quintnet.compile(model, quintnet.Mesh(dp=2), hidden, check="off").simulate(cluster)
    assert "each row is taken to be one document" in str(unknown)
    whole = quintnet.estimate(model, cluster, batch, {"mesh": {"dp": 2}, "expect": {"documents": [LENGTH]}})
    saved = whole.seconds - report.found.ranked[0].seconds
    assert unknown.seconds - known.seconds == pytest.approx(saved, rel=1e-6) and saved > 0
    with pytest.raises(quintnet.CompileError, match=r"documents.0: Input should be greater"):
        quintnet.estimate(model, cluster, batch, {"mesh": {"dp": 2}, "expect": {"documents": [0]}})


@pytest.mark.slow
def test_plans_of_packed_rows_try_rings_in_order() -> None:
    """Where a row holds several documents, be they equal, and positions may be split; no decision is overruled."""
    cluster, length = quintnet.Cluster(_quick(), gpus_per_node=2), 2 * LENGTH
    batch = torch.empty(1, length, WIDTH), torch.zeros(1, length, device="meta")
    found = {}
    for size, options in (
        (512, {}),
        (length, {}),
        (512, {"context_load_balance": True}),
        (512, {"context": "ulysses"}),
    ):
        plan = {"mesh": {"cp": 2}, "expect": {"documents": [size]}, **options}
        report = quintnet.plan(Packed(), cluster, batch, plan=plan, top_k=1)
        found[size, *options] = [one.decisions["context_load_balance"] for one in report.alternatives]
    assert found.pop((512,)) == [True, False] and not any(found.values())
    report = quintnet.plan(Packed(), cluster, batch, plan={"mesh": {"dp": 1}}, expect={"documents": [512]})
    assert not report.alternatives and report.best.expect.documents == (512,)


def _llama(rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = transformers.LlamaForCausalLM(config), torch.zeros(rows, LENGTH, dtype=torch.int64)
    positions = torch.cat([torch.arange(size) for size in SIZES]).expand(rows, -1)
    return model, {"input_ids": ids, "labels": ids, "position_ids": positions}


@pytest.mark.slow
def test_position_ids_are_read() -> None:
    model, batch = _llama(1)
    cluster, plan = quintnet.Cluster(_quick(), gpus_per_node=1), {"mesh": {"dp": 1}}
    read, whole = (
        quintnet.estimate(model, cluster, batch, plan | more) for more in ({}, {"expect": {"documents": [LENGTH]}})
    )
    rows = [p.numel() for name, p in model.named_parameters() if "norm" not in name and "embed" not in name]
    flops = [one.figures.flops - 3 * 2 * LENGTH * sum(rows) for one in (read, whole)]
    seen = sum(size * size for size in SIZES) / LENGTH**2
    assert flops[0] == pytest.approx(seen * flops[1], rel=0.01)
    assert quintnet.plan(model, cluster, batch, top_k=1, plan=plan).best.expect.documents == tuple(SIZES)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_what_is_computed_again_expects_the_same(precision: str) -> None:
    model, batch = _llama(4)
    program = quintnet.compile(
        model, quintnet.Mesh(pp=2, dp=2, cp=2), batch, expect={"documents": SIZES}, precision=precision,
        recompute="full", zero=3, microbatches=2, context="ring", device="cuda", check="off",
    )  # fmt: skip
    found = _attention(program)
    assert len(found) == 3 * 2, "forward, forward again, and backward of two layers"
    assert {facts(node).documents for node in found} == {tuple(SIZES)}


def _of_an_example(rank: int) -> tuple[str, float]:
    """A program of a rank whose example batch has documents of its own, and a step of the batch that all have."""
    torch.manual_seed(0)
    model, (x, ids) = Packed(), _batch(SIZES, SIZES)
    example = torch.empty_like(x), _batch(lengths(LENGTH, 2 + rank), [LENGTH])[1]
    cluster = quintnet.Cluster("h100", gpus_per_node=2)
    program = quintnet.compile(model, cluster, example, plan={"mesh": {"cp": 2}}, device="cpu", check="off")
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    loss = float(program.step((x, ids)))
    return program._primary().program.digest, program.plan.expect.documents[0] + loss


@pytest.mark.slow
def test_ranks_agree_whatever_their_examples_expect() -> None:
    found = quintnet.launch(_rank, 2)
    assert found[0][0] == found[1][0]
    firsts = [lengths(LENGTH, 2 + rank)[0] for rank in range(2)]
    assert found[0][1] - firsts[0] == pytest.approx(found[1][1] - firsts[1], rel=1e-6)


def _rank() -> tuple[str, float]:
    return _of_an_example(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)


def _quick() -> Any:
    """An H100 whose host takes no time, so that small models are not the host's."""
    return replace(H100, efficiency=replace(H100.efficiency, host_seconds=0.0))
