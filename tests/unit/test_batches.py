"""Steps that consist of several batches: which rows, what is handed on, and batch norms as they are traced."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quintnet
from quintnet_compiler.capture.batch_norms import cumulative_averages, one_process
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.checks.code import check_batches
from quintnet_compiler.core.annotations import facts, operators_of_parameters
from quintnet_compiler.driver.compiler import Runner, compile_program
from quintnet_compiler.driver.pipeline import Request
from quintnet_compiler.equivalence.module_training import batches_of
from quintnet_compiler.ir.distributed_program import DistributedProgram
from quintnet_compiler.passes.frontend.normalize import Normalize
from quintnet_compiler.passes.stages.cut_stages import _uncut_places


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.linear = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(self.norm(self.first(x))))


def _program(**axes: int) -> DistributedProgram:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    batch = torch.randn(8, 4), torch.arange(8) % 2
    plan = quintnet.Plan(microbatches=2, batch_statistics="microbatch")
    request = Request(quintnet.Mesh(**axes), plan, 8, torch.device("cpu"))
    return compile_program(capture(model, batch, F.cross_entropy), request, Runner()).program


def test_a_microbatch_has_rows_of_every_data_rank() -> None:
    program = _program(dp=2)
    first, second = batches_of(program, {"x": torch.arange(8), "flag": True, "scale": torch.ones(3)})
    assert first["x"].tolist() == [0, 1, 4, 5] and second["x"].tolist() == [2, 3, 6, 7]
    assert first["flag"] and second["scale"].tolist() == [1, 1, 1]


def test_what_is_handed_on_is_checked() -> None:
    program = _program(pp=2)
    check_batches(program)
    (index,) = (stage.index for stage in program.stages if len(stage.carried) == 2)  # the mean and the variance
    stage = program.stages[index]
    crossed = dict(zip(stage.carried, reversed(stage.carried.values()), strict=True))
    for carried in (crossed, {}):
        stages = tuple(replace(one, carried=carried) if one is stage else one for one in program.stages)
        with pytest.raises(quintnet.CompileError, match=r"QN209[\s\S]*running_(mean|var) becomes"):
            check_batches(replace(program, stages=stages))
    late = tuple(replace(piece, static=(*piece.static, *stage.carried)) for piece in (stage.forward,))
    stages = tuple(replace(one, forward=late[0]) if one is stage else one for one in program.stages)
    with pytest.raises(quintnet.CompileError, match="as it was before the step"):
        check_batches(replace(program, stages=stages))


def test_no_stage_begins_between_a_buffer_and_its_new_value() -> None:
    captured = capture(_Twice(), (torch.randn(8, 4), torch.arange(8) % 4), F.cross_entropy)
    made = Normalize(4, torch.device("cpu"), batches=2)(captured)
    order = operators_of_parameters(made.graph)
    inside = _uncut_places(made, order)
    linear = next(place for place, node in enumerate(order) if facts(node).where.module == "linear")
    assert inside[linear] == min(inside.values()) < linear
    assert order[max(inside)].target is torch.ops.aten.add.Tensor  # the last of the two averages
    assert not _uncut_places(replace(made, batches=1), order)


def test_a_cumulative_average_is_that_of_the_module() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, momentum=None).double()
    twin, theirs = copy.deepcopy(norm), nn.BatchNorm1d.forward
    for _ in range(3):
        x = torch.randn(8, 4).double()
        with cumulative_averages():
            found = norm(x)
        assert torch.equal(found, twin(x))
        for a, b in zip(norm.buffers(), twin.buffers(), strict=True):
            assert torch.allclose(a, b, atol=1e-15)
    assert nn.BatchNorm1d.forward is theirs and "forward" not in vars(nn.BatchNorm1d)


def test_synchronised_norms_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    norm, x = nn.SyncBatchNorm(4), torch.randn(8, 4)
    twin, theirs = copy.deepcopy(norm), nn.SyncBatchNorm.forward
    expected = twin(x)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="GPU"):
        norm(x)
    norm = copy.deepcopy(twin)
    with one_process():
        assert torch.equal(norm(x), expected)
    assert nn.SyncBatchNorm.forward is theirs
