"""Further modules, each on the smallest thing that it can do: launching, segments, records, blocks, checks, verbs."""

from __future__ import annotations

import math
import operator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, fx, nn

import quintnet
from quintnet_compiler.api.compile import compile as compile_model
from quintnet_compiler.api.program_state import ProgramState
from quintnet_compiler.cli import calibrate as calibrate_verb
from quintnet_compiler.cli.app import VERBS, Verbs, app, loaded
from quintnet_compiler.core.errors import CompileError, InputError, RunError
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.driver.compiler import Runner
from quintnet_compiler.driver.refusals import check_divides, no_parameter
from quintnet_compiler.driver.variants import _difference
from quintnet_compiler.equivalence.unchanged import reseed_all
from quintnet_compiler.equivalence.verify import Comparison, coarsest_of
from quintnet_compiler.huggingface.parallel_plan import generic
from quintnet_compiler.huggingface.registries import traced_as_few_nodes
from quintnet_compiler.ir.builder import aten
from quintnet_compiler.passes.autodiff.recompute_cut import cheapest_cut
from quintnet_compiler.passes.sharding.fold_blocks import FoldBlocks
from quintnet_compiler.reports.calibrate import CalibrationEffort
from quintnet_compiler.runtime.execute.comm import Comm
from quintnet_compiler.runtime.execute.cuda_graphs.replay_safety import Observed
from quintnet_compiler.runtime.execute.gradient_calls import OPERATORS, handle
from quintnet_compiler.runtime.execute.record import Clock, Recorded, RecordedSpan
from quintnet_compiler.runtime.execute.segments import Segment, split
from quintnet_compiler.runtime.launch import consistency, launchers
from quintnet_compiler.runtime.launch.attempt import PRELOADED
from quintnet_compiler.runtime.launch.board import Board, last_step
from quintnet_compiler.runtime.launch.faults import report
from quintnet_compiler.runtime.launch.heartbeat import dump_stacks
from quintnet_compiler.runtime.transport.local import LocalWorld
from quintnet_compiler.simulation.footprint import storage
from quintnet_compiler.simulation.measured import shown_ranks
from quintnet_compiler.simulation.rehearsal import Allocation, Ledger
from quintnet_compiler.training.validation import validate

from ..golden.programs import golden_passes
from .graphs import builder, leaf

# -- launching


def test_fork_servers_import_modules_that_exist() -> None:
    assert all(find_spec(name) is not None for name in PRELOADED)


def test_who_started_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for launcher in launchers.LAUNCHERS:
        monkeypatch.delenv(launcher.size, raising=False)
    assert launchers.started() is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    found = launchers.started()
    assert found is not None and found.size == 4 and found.launcher.name == "srun"
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RunError, match=r"srun started 4 processes .* no SLURM_PROCID, MASTER_ADDR"):
        found.join()
    monkeypatch.setenv("WORLD_SIZE", "1")  # one process is none
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    assert launchers.started() is None


def test_the_step_that_a_rank_began_last(tmp_path: Path) -> None:
    assert last_step(tmp_path, 0) == -1
    Board(tmp_path, 1, 3).enter(1, "step", 7)
    assert [last_step(tmp_path, rank) for rank in range(4)] == [-1, 7, -1, -1]
    dump_stacks(tmp_path, 0)
    assert "test_the_step_that_a_rank_began_last" in (tmp_path / "rank0.txt").read_text()


def test_what_is_told_of_an_error() -> None:
    own = InputError("QN106", "5 rows\nmore")
    found = report(2, own)
    assert (found.rank, found.line, found.error, found.distant) == (2, "QN106 5 rows", own, False)
    assert report(0, RuntimeError("[/gloo/pair.cc] Connection reset")).distant


def test_ranks_that_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(rows: list[Tensor], row: Tensor) -> None:
        for rank, other in enumerate(rows):
            other.copy_(row)
            if rank == 1:
                other[1] = ord("X")

    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "all_gather", gather)
    with pytest.raises(RunError, match="plan: rank 1: Xlan A; all others: plan A"):
        consistency.agree({"plan": "plan A"}, torch.device("cpu"))

    def send(x: Tensor, source: int) -> None:
        if source == 1 and x.dtype is torch.uint8:
            x[:] = torch.tensor(list(long.replace("zero: 0", "zero: 3").encode()), dtype=torch.uint8)

    long = "\n".join(["mesh: dp=2", "zero: 0", *(f"parameter {i}: I" for i in range(100))])
    monkeypatch.setattr(dist, "broadcast", send)
    with pytest.raises(RunError, match=r"plan: rank 1: zero: 3; all others: zero: 0\n"):
        consistency.agree({"plan": long}, torch.device("cpu"))
    assert consistency.first_difference("a\nb", "a") == ("b", "(nothing)")
    assert consistency.first_difference("x" * 500 + "1", "x" * 500 + "2") == ("x" * 60 + "1", "x" * 60 + "2")


# -- segments, records, replays


def test_operators_between_communication() -> None:
    graph = fx.Graph()
    comm, x = graph.placeholder("comm"), graph.placeholder("x")
    y = graph.call_function(torch.relu, (x,))
    z = graph.call_method("all_reduce", (comm, y, "tp", 0))
    graph.call_method("accumulate", (comm, y, "w"))
    parts = graph.call_function(torch.split, (z, 1))
    w = graph.call_function(torch.neg, (graph.call_function(operator.getitem, (parts, 0)),))
    graph.output((w,))
    steps = split(graph, pure=True)
    kinds = [step.target if isinstance(step, fx.Node) else "segment" for step in steps]
    assert kinds == ["segment", "all_reduce", "segment", "accumulate"]  # a gradient waits for its segment's end
    first = steps[0]
    assert isinstance(first, Segment) and first.inputs == (x,) and first.outputs == (y,)
    first, _, second = split(graph)  # or it is handed over within
    assert isinstance(first, Segment) and isinstance(second, Segment)
    assert second.inputs == (comm, y, z) and second.outputs == (w,) and (first.settles, second.settles) == ((), ("w",))


def test_gradients_are_handed_over_by_number() -> None:
    class Comm:
        def accumulate(self, gradient: Tensor, value: str) -> None:
            found.append((gradient.sum().item(), value))

        def accumulate_matmul(self, left: Tensor, right: Tensor, value: str) -> None:
            self.accumulate(left @ right, value)

    found: list[tuple[float, str]] = []
    ones, here = torch.ones(2, 2), handle(Comm(), ("w", "b"))
    OPERATORS["accumulate"](here, ones, 1)
    OPERATORS["accumulate_matmul"](here, ones, ones, 0)
    assert found == [(4.0, "b"), (8.0, "w")]


def test_what_a_replay_would_not_do_again() -> None:
    x = torch.ones(2, 3)
    with Observed([x]) as seen:
        (x + 1).view(-1)
    assert (seen.operators, seen.reason) == (1, None)
    for act, why in (
        (lambda: torch.rand(2), "draws random numbers"), (lambda: x.add_(1), "writes into an input"),
        (lambda: x.nonzero(), "the host must know the result of"),
    ):  # fmt: skip
        with Observed([x]) as seen:
            act()
        assert seen.reason is not None and why in seen.reason


def test_a_record_goes_to_another_rank_as_text() -> None:
    span = RecordedSpan(0.0, 1.0, "send", "x", 0, 1, "pp", 0.5, (1, 2, 3))
    one = Recorded(2, 3.0, (span, RecordedSpan(1.0, 2.0, "F", "f")), "host", 5.0)
    assert Recorded.from_json(one.to_json()) == one
    clock = Clock(torch.device("cpu"))
    assert clock.mark() >= clock.zero
    assert shown_ranks(Mesh(dp=2, tp=2)) >= {0}


def test_what_depends_on_where_a_rank_stands() -> None:
    mesh = Mesh(tp=2)
    comm = Comm(LocalWorld(mesh, ["here"]).transport(1), mesh, {"tp": 1})
    x = torch.arange(6.0)
    assert comm.shard_slice(x, "tp", 0, 1, 0).tolist() == [3, 4, 5]
    assert comm.shard_pad(x[:3], "tp", 0, 1, 0).tolist() == [0, 0, 0, 0, 1, 2]


# -- blocks


def test_what_is_made_again_is_the_cheapest_cut() -> None:
    to = builder()
    x, w = leaf(to, "input", "x", 64, 4), leaf(to, "parameter", "w", 64, 4)
    h = to.call(aten.linear.default, x, w)
    a, b = to.call(aten.gelu.default, h), to.call(aten.sigmoid.default, h)
    with to.at(a, backward=True):
        to.call(aten.mul.Tensor, a, b)
    size = 64 * 64 * 4 + 1
    cheap = cheapest_cut([h, a, b], lambda node: math.inf if node is h else 1e-12, 1.0)
    assert (cheap.again, cheap.bytes) == ({a, b}, size)  # h is kept alone, and both are made again of it
    dear = cheapest_cut([h, a, b], lambda node: 1e3, 1e-9)
    assert (dear.again, dear.bytes) == (frozenset(), 2 * size)


def test_what_of_others_is_held_anyway_costs_nothing() -> None:
    to = builder()
    h = to.call(aten.linear.default, leaf(to, "input", "x", 64, 4), leaf(to, "parameter", "w", 64, 4))
    a = to.call(aten.gelu.default, h)
    with to.at(a, backward=True):
        to.call(aten.neg.default, a)
    # h, which is not of the block, would be kept instead of a: that takes as many bytes
    assert cheapest_cut([a], lambda node: 1e-12, 1.0).again == set()
    assert cheapest_cut([a], lambda node: 1e-12, 1.0, {h}).again == {a}


def test_equal_blocks_are_folded() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for one in self.layers:
                x = one(x).relu()
            return x

    made = compile_model(Stack(), Mesh(dp=1), (torch.ones(2, 4), torch.ones(2, 4)), loss_fn=F.mse_loss, check="off")
    folded = FoldBlocks()(made.passes()[0][1])
    # the first one is another: no gradient flows into its input
    assert [len(numbers) for numbers in folded.blocks.values()] == [1, 1, 3, 1]
    linears = [node for node in folded.program.graph.nodes if node.target is aten.linear.default]
    assert sum(folded.repeats.get(node, 1) for node in linears) == 6 and len(linears) == 4


def test_names_with_layer_numbers() -> None:
    assert generic("model.layers.12.mlp.experts.3.up") == "model.layers.*.mlp.experts.*.up"
    with traced_as_few_nodes(nn.Linear(1, 1)):  # a model that is not Hugging Face's needs nothing
        pass


# -- comparisons


def test_the_coarsest_dtype_says_how_much_may_differ() -> None:
    to = builder()
    x = leaf(to, "parameter", "x", 2, dtype=torch.float64)
    assert coarsest_of(to.graph) is torch.float64
    to.call(aten._to_copy.default, x, dtype=torch.bfloat16)
    assert coarsest_of(to.graph) is torch.bfloat16
    reseed_all(5)
    first = torch.rand(1)
    reseed_all(5)
    assert torch.equal(torch.rand(1), first)
    assert Comparison("loss", "", 0, 0.1, 0.2).ok and not Comparison("loss", "", 0, 0.3, 0.2).ok


def test_rows_that_do_not_divide() -> None:
    check_divides(Mesh(dp=2), 2, 8)
    for mesh, microbatches, rows in ((Mesh(dp=2), 2, 6), (Mesh(dp=2), 1, 7), (Mesh(dp=2, ep=2), 1, 6)):
        with pytest.raises(InputError, match="QN106"):
            check_divides(mesh, microbatches, rows)


def test_a_runner_keeps_times_and_programs() -> None:
    runner = Runner(keep=True)

    class Same:
        def __call__(self, program: Any) -> Any:
            return program

    made = golden_passes("mixture")[0][1]
    assert runner(Same(), made) is made and runner.programs == [("Same", made)] and runner.seconds["Same"] >= 0


def test_memory_is_counted_while_somebody_holds_it() -> None:
    ledger = Ledger()
    one, other = Allocation(ledger, 100), Allocation(ledger, 50)
    assert ledger.bytes == 150
    del one
    assert ledger.bytes == 50 and other is not None
    x = torch.empty(4, 2)
    assert storage(x.t()) == storage(x) != storage(x.clone())


# -- programs and verbs


def test_validation_weighs_batches_by_their_rows() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    batch = (torch.ones(4, 2), torch.zeros(4, 1))
    program = quintnet.compile(model, Mesh(dp=2), batch, loss_fn=F.mse_loss, check="off")
    assert isinstance(program, ProgramState) and dict(program.named_parameters())["weight"] is model.weight
    last = (torch.zeros(1, 2), torch.zeros(1, 1))
    assert validate(program, [batch, last], {})["loss"] == pytest.approx(4 * 4 / 5)
    with pytest.raises(InputError, match="no batches"):
        validate(program, [], {})


def test_a_wrong_option_is_refused_before_anything_is_traced() -> None:
    for options, told in (({"backend": "x"}, "there is no backend"), ({"check": "x"}, "there is no check")):
        with pytest.raises(CompileError, match=told):
            compile_model(nn.Linear(1, 1), Mesh(dp=1), **options)  # type: ignore[arg-type]
    with pytest.raises(CompileError, match="a str is not a mesh"):
        compile_model(nn.Linear(1, 1), "dp=2")  # type: ignore[arg-type]


def test_the_calibration_that_was_measured_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[tuple[int, ...], CalibrationEffort]] = []
    made = SimpleNamespace(
        save=lambda path: path.write_text("saved"), summary=lambda: "text", model_dump_json=lambda indent: "{}"
    )
    monkeypatch.setattr("quintnet_compiler.reports.calibrate.calibrate", lambda *given: asked.append(given) or made)
    out = tmp_path / "machine.json"
    found = calibrate_verb.calibrate(out, [2, 4])
    assert (
        asked == [((2, 4), CalibrationEffort())]
        and out.read_text() == "saved"
        and (found.text, found.document) == ("text", "{}")
    )
    calibrate_verb.calibrate(dtype="bfloat16", largest=8192)
    wide = asked[-1][1]
    assert (wide.dtype, wide.sides[-1], wide.most_flops) == (torch.bfloat16, 8192, 2.0 * 8192**3)
    with pytest.raises(typer.BadParameter, match="none of float32, bfloat16, float16"):
        calibrate_verb.calibrate(dtype="int8")
    assert app.info.cls is Verbs and "calibrate" in VERBS and loaded("calibrate").name == "calibrate"


@pytest.mark.parametrize(("rows", "text"), [(8, ""), (4, "the first batch had 8 rows")])
def test_a_number_of_rows_is_named_where_it_changed(rows: int, text: str) -> None:
    form: Any = SimpleNamespace(difference_from=lambda _first: "")
    first: Any = SimpleNamespace(form=form, only_rows=8)
    assert _difference(form, first, rows).startswith(text) and bool(_difference(form, first, rows)) is bool(text)


def test_a_parameter_that_a_program_lacks_is_named() -> None:
    error = no_parameter("model.scale", "is another object now")
    assert error.code == "QN112" and "model.scale, which is another object now" in error.message
