"""Mixtures of experts: rows travel to the ranks of their experts, none is dropped, gradients of the unsplit model."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.runtime.transport.token_dispatch import Router

from .models import EXPERTS, WIDTH, Mixture
from .zoo import ZOO, InDouble

pytestmark = pytest.mark.usefixtures("shared_captures")

torch.set_num_threads(1)


def _batch(rows: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH, dtype=torch.float64), torch.randint(0, 8, (rows,))


def _batch_of_sequences() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 12, WIDTH, dtype=torch.float64), torch.randint(0, 8, (8, 12))


def _calls(program: quintnet.CompiledProgram) -> Counter[str]:
    return Counter(re.findall(r"comm\.(?:start_)?(\w+)\(", program.ranks[0].forward.code))


@pytest.mark.sample(1)
@pytest.mark.parametrize("skew", [0.0, 10.0])
@pytest.mark.parametrize(
    ("axes", "experts", "microbatches"),
    [
        ({"ep": 4}, None, 1),
        ({"dp": 2, "ep": 2}, None, 2),
        ({"ep": 2, "tp": 2}, None, 2),
        ({"dp": 4}, ["dp"], 1),
        ({"dp": 2, "ep": 2, "tp": 2}, ["dp", "ep"], 2),
        ({"tp": 4}, None, 1),
        ({"dp": 4}, None, 2),
    ],
    ids=str,
)
def test_spread_experts_are_exact(axes: dict[str, int], experts: Any, microbatches: int, skew: float) -> None:
    options = {"experts": experts, "microbatches": microbatches}
    program = quintnet.compile(Mixture(skew).double(), quintnet.Mesh(**axes), _batch(), **options)
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


def test_no_row_is_dropped_however_uneven_the_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, received = [], []
    plan = Router.dispatch_plan

    def spy(self: Router, *args: Any) -> tuple[Tensor, Tensor]:
        found = plan(self, *args)
        if not found[0].is_meta:
            for told, total in zip((sent, received), found[1].sum((1, 2)).tolist(), strict=True):
                told.append(total)
        return found

    monkeypatch.setattr(Router, "dispatch_plan", spy)
    program = quintnet.compile(Mixture(skew=10.0).double(), quintnet.Mesh(ep=4), _batch())
    program.step(_batch())
    assert sent == [8] * 4 and sum(received) == 32  # 16 rows, two experts each
    assert sorted(received)[0] == 0 and max(received) > 12  # one rank has nothing to do, another most of it


def test_rows_travel_once_to_the_experts_and_once_back() -> None:
    program = quintnet.compile(Mixture().double(), quintnet.Mesh(ep=2), _batch())
    calls = _calls(program)
    assert (
        calls["dispatch_plan"] == 1 and calls["dispatch"] == 2 and calls["combine"] == 1
    )  # experts' numbers, rows; rows
    assert program.plan.experts == ()
    up = program.ranks[0].stages[0].state
    assert any(name == "up" for name in up.values())


def test_each_rank_keeps_its_experts_only() -> None:
    program = quintnet.compile(Mixture().double(), quintnet.Mesh(dp=2, ep=2, tp=2), _batch())
    nodes = program.ranks[0].stages[0].forward.module.graph.nodes
    shapes = {n.name: tuple(n.meta["val"].shape) for n in nodes if n.op == "placeholder" and "val" in n.meta}
    assert shapes["p_model_up"] == (2, 16, 16) and shapes["p_model_down"] in [(2, 16, 8), (2, 8, 16)]


@pytest.mark.slow
def test_a_loss_curve_of_mixtral_with_spread_experts() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 32, (50, 8, 8)) // 3]
    program = quintnet.compile(model, quintnet.Mesh(dp=2, ep=2), batches[0])
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-3)
    found = []
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for batch in batches:
        found.append(program.step(batch).item())
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch, expected in zip(batches, found, strict=True):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert abs(loss.item() - expected) < 1e-4
    assert found[-1] < 0.9 * found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [{"dp": 2}, *(pytest.param(axes, marks=pytest.mark.slow) for axes in ({"dp": 2, "tp": 2}, {"ep": 2, "pp": 2}))],
    ids=str,
)
def test_the_loss_that_balances_experts_has_global_statistics(axes: dict[str, int]) -> None:
    balanced = replace(
        ZOO["Mixtral"], config={**ZOO["Mixtral"].config, "num_hidden_layers": 1, "output_router_logits": True}
    )
    with InDouble():
        program = quintnet.compile(balanced.build(), quintnet.Mesh(**axes), balanced.batch(8))
        assert program.verify().ok
        with pytest.raises(quintnet.CompileError, match=r"needs the sum over all rows|brings rows together") as error:
            quintnet.compile(balanced.build(), quintnet.Mesh(**axes), balanced.batch(8), microbatches=2)
    assert error.value.code == "QN104" and "microbatches=1" in str(error.value)


def _process(axes: dict[str, int]) -> tuple[float, Tensor, Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    program = quintnet.compile(
        Mixture(skew=5.0).double(), quintnet.Mesh(**axes), _batch(24), microbatches=2, zero=2 if axes["dp"] > 1 else 0
    )
    loss = program.step(_batch(24)).item()
    gradients = {name: p.grad.full_tensor() for name, p in program.named_parameters()}  # type: ignore[union-attr]
    return loss, gradients["up"], gradients["router.weight"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [{"dp": 1, "ep": 3}, *(pytest.param({"dp": 2, "ep": n}, marks=pytest.mark.slow) for n in (2, 3))],
    ids=str,
)
def test_processes_exchange_rows(axes: dict[str, int]) -> None:
    expected = _process(axes)
    for loss, up, router in quintnet.launch(_process, axes["dp"] * axes["ep"], (axes,), timeout=120):
        assert loss == pytest.approx(expected[0], rel=1e-12)
        assert torch.allclose(up, expected[1], atol=1e-14) and torch.allclose(router, expected[2], atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "rows", "options"),
    [
        ({"ep": 3}, 12, {}),  # 2, 2 and no experts
        ({"ep": 3}, 11, {"zero": 1, "zero_axes": ("ep",)}),
        ({"dp": 2, "ep": 3}, 6, {"microbatches": 1, "zero": 3}),
        ({"ep": 3, "tp": 2}, 12, {"microbatches": 2, "recompute": "full"}),
        ({"dp": 3}, 9, {"experts": ["dp"], "zero": 2}),
        ({"ep": 3, "pp": 2}, 12, {"microbatches": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("skew", [0.0, 10.0])
def test_experts_that_do_not_divide(axes: dict[str, int], rows: int, options: dict[str, Any], skew: float) -> None:
    program = quintnet.compile(Mixture(skew).double(), quintnet.Mesh(**axes), _batch(rows), **options)
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


def test_ranks_have_whole_chunks_of_experts_and_send_what_is_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 experts over 3 ranks each has room for 2; rows travel to the experts that there are, and no others."""
    counts: list[Tensor] = []
    plan = Router.dispatch_plan

    def spy(self: Router, *args: Any) -> tuple[Tensor, Tensor]:
        found = plan(self, *args)
        if not found[0].is_meta:
            counts.append(found[1])
        return found

    monkeypatch.setattr(Router, "dispatch_plan", spy)
    program = quintnet.compile(Mixture().double(), quintnet.Mesh(ep=3), _batch(12))
    nodes = program.ranks[0].stages[0].forward.module.graph.nodes
    shapes = {n.name: tuple(n.meta["val"].shape) for n in nodes if n.op == "placeholder" and "val" in n.meta}
    assert shapes["p_model_up"] == (2, 32, 16) and shapes["p_model_up_bias"] == (2, 32)
    program.step(_batch(12))
    sent = sum(found[0] for found in counts)
    assert [tuple(found.shape) for found in counts] == [(2, 3, 3)] * 3
    assert sent.sum() == 24 and not sent[2].any() and not sent[:, 2].any()  # type: ignore[index]


def test_experts_that_an_axis_has_split_must_divide() -> None:
    with pytest.raises(quintnet.CompileError, match="4 experts cannot be spread over ep=2: what is left") as error:
        quintnet.compile(Mixture().double(), quintnet.Mesh(dp=3, ep=2), _batch(12), experts=["dp", "ep"])
    assert error.value.code == "QN203" and quintnet.compile(
        Mixture().double(), quintnet.Mesh(dp=3, ep=2), _batch(12), experts=["dp"]
    )


def test_axes_and_experts_that_are_not_there() -> None:
    with pytest.raises(quintnet.CompileError, match="has no such axis"):
        quintnet.compile(Mixture().double(), quintnet.Mesh(dp=2), _batch(), experts=["cp"])
    with pytest.raises(quintnet.CompileError, match="the model has no expert_linear") as error:
        quintnet.compile(Capacity().double(), quintnet.Mesh(dp=2), _batch_of_sequences(), experts=["dp"])
    assert error.value.code == "QN204"


class Capacity(nn.Module):
    """Experts of limited capacity with one-hot dispatch (Lepikhin et al. 2020), one group per sequence: what comes too
    late in a sequence is dropped."""

    def __init__(self, capacity: int = 3) -> None:
        super().__init__()
        self.first, self.head, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.2)
        self.capacity = capacity

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        weight, chosen = torch.softmax(self.router(x), -1).max(-1)
        hot = F.one_hot(chosen, EXPERTS)
        place = (hot.cumsum(1) - 1) * hot
        kept = hot * (place < self.capacity)
        slot = F.one_hot((place * hot).sum(-1).clamp(max=self.capacity - 1), self.capacity)
        mask = (kept.unsqueeze(-1) * slot.unsqueeze(-2)).to(x.dtype)  # [B, S, E, C]
        inside = torch.einsum("bsec,bsh->bech", mask, x)
        made = torch.einsum("bech,efh->becf", inside, self.up).relu()
        back = torch.einsum("bsec,becf->bsf", mask * weight[..., None, None], made)
        return F.cross_entropy(self.head(x + back).flatten(0, 1), labels.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"ep": 4}, {"dp": 2, "ep": 2}, {"ep": 2, "tp": 2}, {"tp": 4}], ids=str)
def test_one_hot_dispatch_with_capacity_drops_what_the_reference_drops(axes: dict[str, int]) -> None:
    batch = _batch_of_sequences()
    plan = {"parameters": {"up": {"ep": "S(0)"}}} if "ep" in axes else None
    program = quintnet.compile(Capacity().double(), quintnet.Mesh(**axes), batch, plan=plan)
    assert program.verify().ok
    if "ep" in axes:
        assert _calls(program)["all_to_all"] >= 2  # slots to their experts, and back


class WholeCapacity(nn.Module):
    """What comes too late in the whole batch gets nothing of its expert (Fedus et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        weight, chosen = torch.softmax(self.router(x), -1).max(-1)
        hot = F.one_hot(chosen, EXPERTS)
        place = ((hot.cumsum(0) - 1) * hot).sum(-1)
        kept = (place < x.shape[0] // EXPERTS).to(x.dtype)
        made = quintnet.expert_linear(x, chosen, self.up).relu() * (kept * weight)[:, None]
        return F.cross_entropy(self.head(x + made), labels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"ep": 2}, {}),
        ({"dp": 2, "tp": 2}, {"zero": 3}),
        ({"pp": 2, "ep": 2}, {}),
        ({"dp": 2}, {"microbatches": 2, "batch_statistics": "microbatch"}),
    ],
    ids=str,
)
def test_capacity_counts_rows_of_all_ranks(axes: dict[str, int], options: dict[str, Any]) -> None:
    model = WholeCapacity().double()
    report = quintnet.compile(model, quintnet.Mesh(**axes), _batch(), **options).verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


def test_capacity_of_the_whole_batch_needs_all_microbatches() -> None:
    with pytest.raises(quintnet.CompileError, match=r"cumsum\.default does not split the dim of the batch") as error:
        quintnet.compile(WholeCapacity().double(), quintnet.Mesh(dp=2), _batch(), microbatches=2)
    assert error.value.code == "QN104"


class Listed(nn.Module):
    """A list of experts; ``dense``: each sees every row, behind a mask."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(EXPERTS))
        self.dense = dense

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weight, chosen = torch.softmax(self.router(x), -1).max(-1)
        out = x.new_zeros(x.shape[0], 8)
        for number, expert in enumerate(self.experts):
            if self.dense:
                out = out + torch.where((chosen == number)[:, None], expert(x) * weight[:, None], 0.0)
            else:
                rows = torch.where(chosen == number)[0]
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return F.cross_entropy(out, labels)


@pytest.mark.slow
def test_a_list_of_experts_behind_masks() -> None:
    program = quintnet.compile(Listed(dense=True).double(), quintnet.Mesh(dp=2, tp=2), _batch(), microbatches=2)
    assert program.verify().ok


@pytest.mark.slow
def test_a_list_of_experts_that_pick_their_rows() -> None:
    program = quintnet.compile(Listed(dense=False).double(), quintnet.Mesh(dp=2, tp=2), _batch(), microbatches=2)
    assert program.verify().ok


class Gated(nn.Module):
    """Two layers of experts read the same rows, and a third one what both make."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = (nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.2) for _ in range(2))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x, ids = torch.tanh(self.first(x)), labels % EXPERTS
        made = F.silu(quintnet.expert_linear(x, ids, self.gate)) * quintnet.expert_linear(x, ids, self.up)
        return F.cross_entropy(x + quintnet.expert_linear(made, ids, self.down), labels)


@pytest.mark.parametrize("axes", [{"ep": 2}, {"ep": 2, "tp": 2}], ids=str)
def test_rows_that_several_layers_read_travel_once(axes: dict[str, int]) -> None:
    program = quintnet.compile(Gated().double(), quintnet.Mesh(**axes), _batch(), microbatches=2)
    calls = _calls(program)
    assert calls["dispatch"] == 2 and calls["combine"] == 1  # experts' numbers, rows; rows
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)
