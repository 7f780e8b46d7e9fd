"""Stage cuts: optimal against brute force, legal everywhere, reproducible from a plan."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.cost_models.roofline import Roofline
from quintnet_compiler.ir.program import ShardedProgram
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.frontend.normalize import Normalize
from quintnet_compiler.passes.sharding.choose_sharding import ChooseSharding
from quintnet_compiler.passes.stages.cut_stages import CutStages, _Loads, boundaries, parameter_stages, staged_operators
from quintnet_compiler.passes.strategies.rule_book import RuleBook

from ..models import CASES, GPT, build

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


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("kind", ["mlp", "skips"])
def test_cut_equals_brute_force(kind: str, num_stages: int) -> None:
    case = CASES["mlp"]
    program = (
        _sharded(build("mlp"), case.batch(4), case.loss_fn) if kind == "mlp" else _sharded(Skips(), (torch.ones(4, 8),))
    )
    order = staged_operators(program.program.graph)
    loads = _Loads(program, order, Roofline())

    def slowest(starts: tuple[int, ...]) -> float:
        edges = (0, *starts, len(order))
        return max(float(loads.from_start(a)[b]) for a, b in itertools.pairwise(edges))

    staged = CutStages(num_stages, Roofline())(program)
    found = tuple(order.index(next(n for n in order if staged.stage[n] == s)) for s in range(1, num_stages))
    best = min(slowest(starts) for starts in itertools.combinations(range(1, len(order)), num_stages - 1))
    assert slowest(found) == pytest.approx(best, rel=1e-9)


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
