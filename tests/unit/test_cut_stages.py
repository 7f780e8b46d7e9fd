"""Stage cuts: optimal against brute force, legal everywhere, reproducible from a plan."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet import Cluster, CompiledProgram, Mesh
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.core.annotations import operators_of_parameters
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts
from quintnet_compiler.cost_models.roofline import Roofline
from quintnet_compiler.ir.program import ShardedProgram
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.frontend.normalize import Normalize
from quintnet_compiler.passes.sharding.choose_sharding import ChooseSharding
from quintnet_compiler.passes.stages.cut_stages import (
    CutStages,
    boundaries,
    parameter_stages,
    stage_times,
)
from quintnet_compiler.passes.stages.fastest_cut import SEND_PENALTY, UNEVEN_PENALTY, FastestCut
from quintnet_compiler.passes.stages.stage_loads import EMPTY_STAGE_SECONDS, StageLoads, collectives
from quintnet_compiler.passes.stages.step_clock import StepClock
from quintnet_compiler.schedules.kinds import Generator, gpipe, one_f_one_b, zero_bubble_h1
from quintnet_compiler.schedules.schedule import Action, Op, Schedule, chain, earliest_spans, with_transfers
from quintnet_compiler.schedules.synthesis import StageTimes
from quintnet_compiler.simulation.priced import ProgramPrices
from quintnet_compiler.simulation.run import simulate_schedule as simulate_events
from quintnet_compiler.simulation.work import Given
from quintnet_compiler.strategies.rule_book import RuleBook

from ..models import CASES, GPT, build

pytestmark = pytest.mark.usefixtures("shared_captures")
torch.set_num_threads(1)


class Skips(nn.Module):
    """A U of linears: the first feeds the last, the second the last but one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, layer in enumerate(self.layers):
            x = layer(x).relu()
            x = x + kept[5 - i] if i > 3 else x
            kept.append(x)
        return x.sum()


def _sharded(model: nn.Module, batch: object, loss_fn: object = None) -> ShardedProgram:
    program = Normalize(4, torch.device("cpu"))(capture(model, batch, loss_fn))  # type: ignore[arg-type]
    return ChooseSharding((), RuleBook(RULES), Roofline())(program)


@functools.cache
def _gpt() -> ShardedProgram:
    return _sharded(GPT(width=64, depth=8, heads=4), CASES["gpt"].batch(4))


def _starts(program: ShardedProgram, num_stages: int, schedule: Schedule | None = None) -> tuple[int, ...]:
    staged, order = (
        CutStages(num_stages, Roofline(), (), schedule)(program),
        operators_of_parameters(program.program.graph),
    )
    return tuple(order.index(next(n for n in order if staged.stage[n] == s)) for s in range(1, num_stages))


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("kind", ["mlp", "skips"])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, zero_bubble_h1])
def test_cut_equals_brute_force(kind: str, num_stages: int, make: Generator) -> None:
    """One cut after another, run by the plain simulation of the schedule."""
    case = CASES["mlp"]
    program = (
        _sharded(build("mlp"), case.batch(4), case.loss_fn) if kind == "mlp" else _sharded(Skips(), (torch.ones(4, 8),))
    )
    order, schedule = operators_of_parameters(program.program.graph), make(num_stages, 3)
    loads = StageLoads(program, order, Roofline())

    def score(starts: tuple[int, ...]) -> float:
        edges = [*itertools.pairwise((0, *starts, len(order)))]
        times = [StageTimes(*(float(one[b] - one[a]) for one in (loads.forward, loads.input, loads.weight)))
                 for a, b in edges]  # fmt: skip

        def send(source: int, target: int) -> float:
            return float(loads.sends[int(source > target), starts[min(source, target)]])

        lines = earliest_spans(schedule, chain(num_stages), lambda action: times[action.stage].time_of(action.op), send)
        work = np.array([one.forward + one.input + one.weight for one in times])
        uneven = 1 + UNEVEN_PENALTY * work.var() / work.mean() ** 2
        empty = sum(loads.reads[a] == loads.reads[b] for a, b in edges)
        travels = SEND_PENALTY * loads.sends[:, list(starts)].sum()
        return float((max(line[-1].end for line in lines) + travels) * uneven + EMPTY_STAGE_SECONDS * empty)

    best = min(score(starts) for starts in itertools.combinations(range(1, len(order)), num_stages - 1))
    assert score(_starts(program, num_stages, schedule)) == pytest.approx(best, rel=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("num_stages", "microbatches"), [(3, 4), (4, 2), (4, 8), (6, 12)])
def test_a_search_finds_nearly_what_trying_all_cuts_finds(num_stages: int, microbatches: int) -> None:
    program = _sharded(GPT(width=64, depth=8, heads=4), CASES["gpt"].batch(8 * 5), None)
    loads = StageLoads(program, operators_of_parameters(program.program.graph), Roofline())
    loads.places = [*range(0, loads.count, 9 if num_stages < 6 else 14), loads.count]
    clock = StepClock(one_f_one_b(num_stages, microbatches))
    search = FastestCut(loads, clock)
    every = list(itertools.combinations(range(1, len(loads.places) - 1), num_stages - 1))
    _, best = search._best(np.array(every))
    found, left = search._best(search._first()), 20
    while left and (better := search._best(search._moved(found[0])))[1] < found[1]:
        found, left = better, left - 1
    assert left and best <= found[1] <= 1.005 * best


@pytest.mark.parametrize("num_stages", range(1, 10))
def test_no_edge_points_back_and_no_stage_is_empty(num_stages: int) -> None:
    staged = CutStages(num_stages, Roofline())(_gpt())
    assert set(staged.stage.values()) == set(range(num_stages))
    for node, stage in staged.stage.items():
        assert all(staged.stage.get(source, 0) <= stage for source in node.all_input_nodes)
    tied = {n.name: s for n, s in parameter_stages(staged).items()}["p_model_wte_weight"]
    assert tied == ((0, num_stages - 1) if num_stages > 1 else (0,))


def test_equal_blocks_are_balanced() -> None:
    staged = CutStages(2, Roofline())(_gpt())
    leaves = staged.sharded.program.leaves
    blocks = {
        leaves[n].name.split(".")[1]: s for n, s in parameter_stages(staged).items() if "blocks" in leaves[n].name
    }
    assert list(blocks.values()).count((0,)) in (3, 4, 5)


@pytest.mark.parametrize(("width", "num_stages", "cut"), [(128, 2, (4,)), (1024, 2, (4,)), (1024, 4, (2, 4, 6))])
def test_equal_layers_are_cut_evenly(width: int, num_stages: int, cut: tuple[int, ...]) -> None:
    """However small they are: what a stage sends travels while it computes."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    program = _sharded(model, (torch.ones(4, width), torch.ones(4, width)), nn.functional.mse_loss)
    assert _starts(program, num_stages, one_f_one_b(num_stages, 8)) == cut


def _compiled(kind: str, num_stages: int, *stages: str) -> CompiledProgram:
    """Of layers that are alike, for eight microbatches."""
    loss_fn: Any = nn.functional.mse_loss
    if kind == "gpt":
        model, batch, loss_fn = GPT(width=64, depth=4, heads=4), CASES["gpt"].batch(16), None
    elif kind == "linear":
        model, batch = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), (torch.ones(64, 64), torch.ones(64, 64))
    else:
        model = nn.Sequential(*(nn.Conv2d(32, 32, 3, padding=1) for _ in range(4)), nn.Flatten(), nn.Linear(8192, 1))
        batch = torch.ones(16, 32, 16, 16), torch.ones(16, 1)
    plan = {"stages": stages} if stages else {}
    return quintnet.compile(model, Mesh(pp=num_stages), batch, loss_fn=loss_fn, microbatches=8, check="off", plan=plan)


def _prices(program: CompiledProgram) -> ProgramPrices:
    return ProgramPrices(program._primary().program, ClusterCosts(Cluster("h100")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "gpt"])
def test_no_other_cut_is_simulated_to_be_faster(kind: str) -> None:
    """Of all cuts between layers, by the simulation's own prices of each layer; but for what an even cut may cost."""
    layers = [f"blocks.{i}" for i in range(4)] + ["ln_f"] if kind == "gpt" else [str(i) for i in range(6)]
    prices = _prices(_compiled(kind, len(layers), *layers[1:]))
    forward, backward = ([prices.work(Action(op, stage, 0)).seconds for stage in range(len(layers))]
                         for op in (Op.FORWARD, Op.BACKWARD))  # fmt: skip
    send = prices.transfer(Action(Op.SEND_FORWARD, 0, 0, 1))  # as much between any two
    for num_stages in (3,) if kind == "gpt" else (2, 3, 4):
        program = _compiled(kind, num_stages)
        end = sum(meeting.seconds for meeting in _prices(program).meetings())
        schedule, found = with_transfers(one_f_one_b(num_stages, 8), chain(num_stages)), []
        for cut in itertools.combinations(range(1, len(layers)), num_stages - 1):
            edges = [*itertools.pairwise((0, *cut, len(layers)))]
            one, other = ({stage: sum(each[a:b]) for stage, (a, b) in enumerate(edges)} for each in (forward, backward))
            given = Given(one, other, transfer_seconds=send)
            found.append(simulate_events(schedule, chain(num_stages), given).seconds + end)
        assert program.simulate().seconds <= 1.015 * min(found), num_stages


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["linear", "gpt", "cnn"])
def test_stages_are_priced_before_there_is_a_backward_as_after(kind: str) -> None:
    """By the simulation's prices of the functions that ranks run; the last stage's loss has kernels of its own."""
    names = ["blocks.1", "blocks.2", "blocks.3"] if kind == "gpt" else ["1", "2", "3"]
    program = _compiled(kind, 4, *names)
    for stage, found in enumerate(stage_times(program._primary().program.source.local.staged, Roofline())):
        for op in (Op.FORWARD, Op.BACKWARD):
            simulated = _prices(program).work(Action(op, stage, 0)).device_seconds
            assert found.time_of(op) == pytest.approx(simulated, rel=0.08 if stage < 3 else 0.2), (stage, op)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(pp=4, tp=2), Mesh(pp=4, cp=2)], ids=["tp", "cp"])
def test_stages_wait_for_collectives_as_their_programs_do(mesh: Mesh) -> None:
    """But for what is gathered again for the backward, beside other work."""
    model, batch = GPT(width=64, depth=4, heads=4), CASES["gpt"].batch(16)
    plan: Any = {"stages": ["blocks.1", "blocks.2", "blocks.3"], "context": "all_gather"}
    program = quintnet.compile(model, mesh, batch, microbatches=8, check="off", plan=plan)
    primary, cost = program._primary().program, Roofline()
    prices = ProgramPrices(primary, ClusterCosts(Cluster("h100")))
    sharded = primary.source.local.staged.sharded
    waits = collectives(sharded, operators_of_parameters(sharded.program.graph), cost)
    for stage in range(1, 3):
        mine = [found for node, found in waits.items() if primary.source.local.staged.stage[node] == stage]
        parts = {op: [part for part in prices.work(Action(op, stage, 0)).parts if part.axis]
                 for op in (Op.FORWARD, Op.BACKWARD)}  # fmt: skip
        again = sum(part.seconds for part in parts[Op.FORWARD] if part.name.startswith("all_gather"))
        ahead, back = (sum(part.seconds for part in found) for found in parts.values())
        assert sum(one for one, _ in mine) == pytest.approx(ahead) and ahead > 0
        assert sum(one for _, one in mine) == pytest.approx(back - again)


def test_neighbours_in_other_nodes_are_sent_to_over_the_network() -> None:
    cost = Roofline()
    assert cost.send_seconds(2**20) == cost.send_seconds(2**20, 4) < cost.send_seconds(2**20, 8)
    assert cost.meeting_seconds("all_reduce", 2**20, 2) > cost.collective_seconds("all_reduce", 2**20, 2)


def test_every_stage_has_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    staged = CutStages(3, Roofline())(_sharded(model, (torch.ones(4, 4), torch.ones(4, 4)), nn.functional.mse_loss))
    assert {stage for stages in parameter_stages(staged).values() for stage in stages} == {0, 1, 2}


def test_boundaries_reproduce_the_cut() -> None:
    staged = CutStages(3, Roofline())(_gpt())
    again = CutStages(3, Roofline(), boundaries(staged))(_gpt())
    assert again.stage == staged.stage


def test_boundaries_by_module_path() -> None:
    staged = CutStages(2, Roofline(), ("blocks.2",))(_gpt())
    leaves = staged.sharded.program.leaves
    for node, stages in parameter_stages(staged).items():
        name = leaves[node].name
        if name.startswith("blocks"):
            assert stages == (int(int(name.split(".")[1]) >= 2),)


@pytest.mark.parametrize(
    ("num_stages", "names", "message"),
    [
        (1000, (), "1000 stages, and the model has 161 operators that use parameters"),
        (3, ("blocks.1",), "the plan names 1 boundaries for 3 stages"),
        (2, ("block.1",), "no operator or module is called 'block.1'"),
        (3, ("blocks.2", "blocks.1"), "the boundaries blocks.2, blocks.1 do not follow each other in the model"),
    ],
)
def test_bad_cuts_are_refused(num_stages: int, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(quintnet.CompileError) as caught:
        CutStages(num_stages, Roofline(), names)(_gpt())
    assert caught.value.code == "QN206"
    assert caught.value.message == message
