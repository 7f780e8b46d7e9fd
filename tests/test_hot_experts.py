"""Experts to which most rows go are on every rank, and their rows stay: exact, and priced by what travels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quintnet
from quintnet_compiler.checks.types import check_types
from quintnet_compiler.core.annotations import num_bytes, values
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts
from quintnet_compiler.features.hot_experts.copies import HotExpertCopies
from quintnet_compiler.features.hot_experts.ops import pick_experts
from quintnet_compiler.ir.program import LocalProgram
from quintnet_compiler.ops.collectives import convert, dispatch_plan
from quintnet_compiler.ops.experts.grouped_rows import group_plan
from quintnet_compiler.ops.rank_local import local_experts
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.lowering.insert_communication import InsertCommunication
from quintnet_compiler.runtime.transport.token_dispatch import Router
from quintnet_compiler.simulation.priced import ProgramPrices, expert_loads
from quintnet_compiler.strategies.rule_book import RuleBook

from .models import WIDTH, Mixture
from .mutations import copied
from .test_experts import WholeCapacity
from .zoo import ZOO, InDouble

pytestmark = pytest.mark.usefixtures("shared_captures")

aten = torch.ops.aten
torch.set_num_threads(1)
HOT = {"up": [0]}


def _batch(rows: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH, dtype=torch.float64), torch.randint(0, 8, (rows,))


def _program(axes: dict[str, int], rows: int = 16, skew: float = 5.0, **options: Any) -> quintnet.CompiledProgram:
    torch.manual_seed(0)
    return quintnet.compile(Mixture(skew).double(), quintnet.Mesh(**axes), _batch(rows), **options)


LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"ep": 4}, {}),
    ({"ep": 3}, {"microbatches": 2}),  # 2, 2 and no experts
    ({"dp": 2, "ep": 2}, {"microbatches": 2, "zero": 3}),
    ({"dp": 4}, {"experts": ["dp"], "zero": 2}),
    ({"dp": 2, "ep": 2}, {"experts": ["dp", "ep"], "overlap": False}),
    ({"ep": 2, "tp": 2}, {"microbatches": 2}),
    ({"ep": 2, "tp": 2}, {"plan": {"parameters": {"up": {"tp": "S(0)"}, "down": {"tp": "S(0)"}}}}),
    ({"ep": 2, "pp": 2}, {"microbatches": 2, "recompute": "full"}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("hot", [[0], [3, 1], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize(("axes", "options"), LAYOUTS, ids=str)
def test_hot_experts_are_exact(axes: dict[str, int], options: dict[str, Any], hot: list[int]) -> None:
    rows = 12 if axes["ep" if "ep" in axes else "dp"] == 3 else 16
    report = _program(axes, rows, hot_experts={"down": hot}, **options).verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3", "Qwen2-MoE", "gpt-oss"])
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 2, "ep": 2}, {"microbatches": 2, "zero": 1}),
        ({"dp": 2, "cp": 2}, {"experts": ("dp", "cp"), "zero": 3}),
        ({"ep": 2, "tp": 2}, {}),
    ],
    ids=str,
)
def test_hot_experts_of_models_of_transformers(name: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    hot = {"*.experts.*": [2], "*.layers.1.*.experts.*": [0, 3]}
    with InDouble():
        program = quintnet.compile(
            ZOO[name].build(), quintnet.Mesh(**axes), ZOO[name].batch(8), hot_experts=hot, **options
        )
        report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)
    assert "pick_experts" in program.ranks[0].forward.code


@pytest.mark.slow
def test_what_a_capacity_drops_of_hot_experts() -> None:
    options = {"hot_experts": {"up": [1]}}
    report = quintnet.compile(WholeCapacity().double(), quintnet.Mesh(dp=2, ep=2), _batch(), **options).verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


@pytest.mark.slow
def test_rows_of_hot_experts_do_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the routing itself: to other ranks goes each row of an expert that is theirs, and none of a hot one."""
    sent, ids = dict[int, Tensor](), dict[int, Tensor]()
    plan = Router.dispatch_plan

    def spy(self: Router, of: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        found = plan(self, of, *args)
        if not of.is_meta:
            sent[self.transport.rank], ids[self.transport.rank] = found[1].sum(-1), of
        return found

    monkeypatch.setattr(Router, "dispatch_plan", spy)
    for hot in ([], [0], [0, 2]):
        _program({"ep": 4}, 32, hot_experts={"up": hot}).step(_batch(32))
        for rank, chosen in ids.items():
            stays = torch.isin(chosen, torch.tensor([*hot, rank], dtype=chosen.dtype))
            goes = torch.where(stays, rank, chosen).bincount(minlength=4)
            assert torch.equal(sent[rank][0], goes)
        received = torch.stack([sent[rank][1] for rank in range(4)])
        assert torch.equal(received.T, torch.stack([sent[rank][0] for rank in range(4)]))


def test_parameters_and_checkpoints_are_those_without_hot_experts(tmp_path: Path) -> None:
    plain, hot = (_program({"dp": 2, "ep": 2}, hot_experts=one) for one in ({}, HOT))
    assert plain._primary().program.state == hot._primary().program.state
    plain.save(tmp_path / "plain", step=1)
    hot.load(tmp_path / "plain")
    for (name, a), (other, b) in zip(plain.named_parameters(), hot.named_parameters(), strict=True):
        assert name == other and torch.equal(a.full_tensor(), b.full_tensor())  # type: ignore[operator]


def test_a_plan_keeps_them() -> None:
    program = _program({"ep": 2}, hot_experts=HOT, expect={"hot_rows": 0.75})
    again = quintnet.Plan.from_json(program.plan.to_json())
    assert again.hot_experts == {"up": (0,)} and again.expect.hot_rows == 0.75
    assert _program({"ep": 2}, plan=again).ranks[0].forward.code == program.ranks[0].forward.code


# -- which are worth it


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_experts_that_are_worth_a_copy(ranks: int) -> None:
    """Against all sets of experts: none has fewer bytes through the busiest rank."""
    dice = torch.Generator().manual_seed(ranks)
    for _ in range(20):
        load = (torch.rand(7, generator=dice) ** 4 * 1000).long().tolist()
        found = quintnet.hot_experts(load, ranks, row_bytes=32, expert_bytes=1000)
        own = -(-7 // ranks)

        def busiest(hot: Sequence[int], load: list[int] = load, own: int = own) -> int:
            return max(sum(n for e, n in enumerate(load) if e // own == r and e not in hot) for r in range(ranks))

        def moved(hot: Sequence[int], busiest: Callable[..., int] = busiest) -> int:
            return 32 * busiest(hot) + 1000 * len(hot)

        least = min(moved(hot) for size in range(8) for hot in itertools.combinations(range(7), size))
        assert moved(found.experts) == least
        stays = sum(load[e] for e in found.experts)
        assert found.hot_rows == pytest.approx(stays / sum(load))
        rows = busiest(found.experts) + stays / ranks
        assert found.expert_imbalance == pytest.approx(max(1.0, rows * ranks / sum(load)))


def test_what_is_known_of_loads_goes_into_a_plan() -> None:
    found = quintnet.hot_experts(torch.tensor([90, 2, 4, 4]), 2, row_bytes=128, expert_bytes=4096)
    assert found.experts == (0,) and found.hot_rows == 0.9 and found.expert_imbalance == pytest.approx(1.06)
    expect = {"hot_rows": found.hot_rows, "expert_imbalance": found.expert_imbalance}
    assert _program({"ep": 2}, hot_experts={"up": found.experts}, expect=expect).verify().ok
    even = quintnet.hot_experts([25] * 4, 2, row_bytes=128, expert_bytes=4096)
    assert (even.experts, even.hot_rows, even.expert_imbalance) == ((), 0.0, 1.0)
    assert quintnet.hot_experts([0, 0], 2, row_bytes=8, expert_bytes=8).expert_imbalance == 1.0
    with pytest.raises(ValueError, match="numbers of rows"):
        quintnet.hot_experts([1, -1], 2, row_bytes=8, expert_bytes=8)


# -- prices


@pytest.mark.sample(1)
@pytest.mark.parametrize(("imbalance", "hot_rows"), [(1.0, None), (1.0, 0.75), (2.5, 0.75)])
def test_what_stays_is_not_sent(imbalance: float, hot_rows: float | None) -> None:
    """``hot_rows`` of what a rank has; of the busiest rank, all but these come from others."""
    options = {"overlap": False, "hot_experts": {"up": [0, 1]}}
    even, busy = (
        _program({"ep": 2}, 64, **options, expect={"expert_imbalance": a, "hot_rows": b})
        for a, b in ((1.0, 0.0), (imbalance, hot_rows))
    )
    times = [
        {time.node.name: time for name in program.ranks[0].stages[0].pieces for time in prices.node_times(stage, name)}
        for program in (even, busy)
        for prices in [ProgramPrices(program._primary().program, ClusterCosts(Cluster("h100"), unknown="memory"))]
        for stage in [program.ranks[0].stages[0]]
    ]
    loads = {node.name: node for node in expert_loads(busy._primary().program)}
    sent = imbalance - (0.5 if hot_rows is None else hot_rows)
    compared = 0
    for name, time in times[1].items():
        other = times[0][name]
        travels = str(time.node.target) in ("dispatch", "combine")
        factor = sent if travels else imbalance if name in loads else 1.0
        assert time.communication == pytest.approx(factor * other.communication)
        assert time.compute == pytest.approx((imbalance if name in loads else 1.0) * other.compute)
        compared += travels and other.communication > 0
    assert compared >= 4  # there and back, forward and backward


def test_gathered_weights_are_priced_by_their_bytes() -> None:
    """Of each hot expert both matrices and the bias, forward, and their gradients."""
    program = _program({"ep": 2}, hot_experts={"up": [0, 3]}, overlap=False)._primary().program
    source = program.source.graph
    summed = [n for n in source.nodes if any(x.target is pick_experts for x in n.all_input_nodes)]
    one = 8 * (2 * WIDTH * WIDTH + 2 * WIDTH + WIDTH * WIDTH)
    assert sum(num_bytes(values(n)[0]) for n in summed) == 2 * one
    prices = ProgramPrices(program, ClusterCosts(Cluster("h100"), unknown="memory"))
    times = {time.node.name: time for time in prices.node_times(program.stages[0], "forward")}
    assert all(times[n.name].communication > 0 for n in summed)


# -- what cannot be


@pytest.mark.parametrize(
    ("hot", "options", "code", "told"),
    [
        ({"sideways": [0]}, {}, "QN204", "'sideways' matches no parameter of experts"),
        ({"first.weight": [0]}, {}, "QN204", "matches no parameter of experts"),
        ({"up": [4]}, {}, "QN203", r"hot experts \[4\] are not numbers of 4 experts"),
        ({"up": [1, 1]}, {}, "QN203", "each once"),
        ({"up": [0], "down": [1]}, {}, "QN203", "are not those of the other layers of its mixture"),
        ({"up": [-1]}, {}, "QN207", "hot_experts"),
        ({"up": [0]}, {"precision": "fp8"}, "QN203", "a layer that multiplies 8-bit numbers"),
    ],
)
def test_what_cannot_be_hot(hot: dict[str, list[int]], options: dict[str, Any], code: str, told: str) -> None:
    model, batch = Mixture(), (torch.randn(16, WIDTH), torch.randint(0, 8, (16,)))
    with pytest.raises(CompileError, match=told) as error:
        quintnet.compile(model, quintnet.Mesh(ep=2), batch, hot_experts=hot, **options)
    assert error.value.code == code


@pytest.mark.slow
def test_plans_have_them() -> None:
    batch, cluster = (torch.randn(16, WIDTH), torch.randint(0, 8, (16,))), quintnet.Cluster("h100", gpus_per_node=2)
    plan = {"mesh": {"ep": 2}, "hot_experts": HOT, "expect": {"hot_rows": 0.75}}
    assert quintnet.plan(Mixture(), cluster, batch, plan=plan).best.hot_experts == {"up": (0,)}
    with pytest.raises(CompileError, match="matches no parameter of experts"):
        quintnet.plan(Mixture(), cluster, batch, plan={**plan, "hot_experts": {"left": [0]}})


# -- mutations


def _at(target: Any, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Callable[[LocalProgram], None]:
    def apply(mutant: LocalProgram) -> None:
        node = next(n for n in mutant.graph.nodes if n.target is target and _of_hot(n))
        node.args = change(node.args)

    return apply


def _of_hot(node: Any) -> bool:
    return node.target is not convert or any(n.target is pick_experts for n in node.all_input_nodes)


def _unsummed(mutant: LocalProgram) -> None:
    node = next(n for n in mutant.graph.nodes if n.target is convert and _of_hot(n))
    node.replace_all_uses_with(node.args[0])


MUTATIONS: dict[str, Callable[[LocalProgram], None]] = {
    "rows of another expert stay": _at(dispatch_plan, lambda a: (*a[:5], [1])),
    "no rows stay": _at(dispatch_plan, lambda a: (*a[:5], [])),
    "they are counted as another's": _at(local_experts, lambda a: (*a[:4], [1])),
    "they are counted as nobody's": _at(local_experts, lambda a: (*a[:4], [])),
    "their group is left out": _at(group_plan, lambda a: (a[0], a[1] - 1, *a[2:])),
    "the weights of another": _at(pick_experts, lambda a: (a[0], [1], *a[2:])),
    "weights from another place": _at(pick_experts, lambda a: (*a[:2], a[2] + 1, *a[3:])),
    "weights of one rank alone": _unsummed,
    "weights in front": _at(aten.cat.default, lambda a: (a[0][::-1], *a[1:])),
    "a gradient that is not added up": _at(convert, lambda a: (*a[:4], "I")),
}


@pytest.fixture(scope="module")
def communicating() -> LocalProgram:
    """Return a program with hot experts as it was before rows that come back and leave again stayed."""
    local = _program({"ep": 2}, hot_experts=HOT)._primary().program.source.local
    return InsertCommunication(dict(RULES), copies=HotExpertCopies(HOT))(local.staged)


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_check_sees_each_mistake(communicating: LocalProgram, what: str) -> None:
    mutant, _ = copied(communicating)
    check_types(mutant, RuleBook(RULES))
    MUTATIONS[what](mutant)
    with pytest.raises(CompileError, match="type check"):
        check_types(mutant, RuleBook(RULES))


# -- processes


def _process(axes: dict[str, int]) -> list[Tensor]:
    torch.set_num_threads(1)
    program = _program(axes, 24, microbatches=2, hot_experts={"up": [0, 3]})
    torch.manual_seed(1)
    loss = program.step(_batch(24))
    return [loss.detach(), *(p.grad.full_tensor() for _, p in program.named_parameters())]  # type: ignore[union-attr]


@pytest.mark.slow
def test_processes_keep_rows_of_hot_experts() -> None:
    expected = _process({"ep": 2})
    for found in quintnet.launch(_process, 2, ({"ep": 2},), timeout=120):
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(found, expected, strict=True))
