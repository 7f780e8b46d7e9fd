"""Passes one at a time, on a linear layer and its sum: what each makes of the program before it."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

from quintnet_compiler.checks.backward import check_backward
from quintnet_compiler.checks.code import check_code
from quintnet_compiler.checks.expected_calls import ExpectedCalls
from quintnet_compiler.checks.notation import check_notation
from quintnet_compiler.checks.reductions import check_reductions
from quintnet_compiler.checks.rewrites.overlap import check_overlap
from quintnet_compiler.checks.slices import check_slices
from quintnet_compiler.checks.types import check_types
from quintnet_compiler.core.annotations import shape, tensor_inputs, value
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.core.precision import Precision
from quintnet_compiler.core.sharding import I, P, R, S
from quintnet_compiler.cost_models.roofline import Roofline
from quintnet_compiler.driver.pipeline import PIPELINE, PassSetting, Request
from quintnet_compiler.equivalence.dry_run import check_ranks
from quintnet_compiler.ir.invariants import verify_invariants
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ir.printer import code_text, program_text
from quintnet_compiler.ir.program import (
    Axis,
    DifferentiatedProgram,
    LocalProgram,
    ShardedProgram,
    StagedProgram,
    Strategy,
)
from quintnet_compiler.ops.catalog import spec_of
from quintnet_compiler.ops.collectives import COMMUNICATION, convert, wait
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.autodiff.differentiate import Differentiate
from quintnet_compiler.passes.autodiff.recompute import Recompute
from quintnet_compiler.passes.codegen.functions import Functions, written_module
from quintnet_compiler.passes.codegen.generate_ranks import GenerateRanks
from quintnet_compiler.passes.codegen.stage_cut import StageCut
from quintnet_compiler.passes.frontend.lower_precision import LowerPrecision
from quintnet_compiler.passes.lowering.coalesce_collectives import CoalesceCollectives
from quintnet_compiler.passes.lowering.conversions import Conversions
from quintnet_compiler.passes.lowering.fuse_token_dispatch import FuseTokenDispatch
from quintnet_compiler.passes.lowering.insert_communication import InsertCommunication
from quintnet_compiler.passes.lowering.lower_cross_entropy import LowerCrossEntropy
from quintnet_compiler.passes.lowering.padding import Padding
from quintnet_compiler.passes.overlap.order import Order
from quintnet_compiler.passes.overlap.overlap import Overlap
from quintnet_compiler.passes.sharding.choose_sharding import ChooseSharding
from quintnet_compiler.passes.sharding.shard_parameters import ShardParameters, storing_axes
from quintnet_compiler.passes.stages.cut_stages import CutStages
from quintnet_compiler.passes.stages.follow_stages import FollowStages
from quintnet_compiler.passes.stages.partition import balanced_starts
from quintnet_compiler.schedules.kinds import one_f_one_b
from quintnet_compiler.strategies.rule_book import RuleBook

from .graphs import DP, LOSS, TP, builder, column, leaf, linear

ROW = {
    "x": Strategy((), (S(1),)), "w": Strategy((), (S(1),)), "y": Strategy((S(1), S(1)), (P,), "split c 1"),
    "loss": Strategy((P,), (P,), "partial"),
}  # fmt: skip


def _row_parallel() -> tuple[ShardedProgram, dict[str, fx.Node]]:
    """The features of a linear layer split over tp: each rank has a term of its output."""
    made, nodes = linear()
    strategies = {nodes[name]: (one,) for name, one in ROW.items()}
    return ShardedProgram(made, (TP,), strategies | {made.graph.output_node(): (LOSS,)}), nodes


def _staged() -> StagedProgram:
    sharded, _ = _row_parallel()
    return FollowStages(1, {"w": (0,)})(sharded)


def _local() -> LocalProgram:
    return InsertCommunication(dict(RULES), True)(_staged())


def _differentiated() -> DifferentiatedProgram:
    return Differentiate(True)(_local())


def _targets(program: Any) -> list[str]:
    return [str(n.target).removesuffix(".default") for n in program.graph.nodes if n.op == "call_function"]


def test_users_of_one_value_share_its_conversion() -> None:
    staged, to = _staged(), builder()
    source = next(n for n in staged.sharded.program.graph.nodes if n.name == "x")
    local = leaf(to, "input", "x", 2, 3)
    stages: dict[fx.Node, int] = {}
    conversions = Conversions(to, staged, Padding(to, (TP,)), {(source, 0): local}, stages)
    whole = conversions.converted(source, 0, (R,), False, 0)
    assert whole.target is convert and whole.args[1:] == ("tp", 2, "S(1)", "I")
    assert conversions.converted(source, 0, (R,), False, 0) is whole
    assert conversions.converted(source, 0, (R,), True, 0) is not whole  # I and R have different transposes


def test_ranks_that_split_classes_exchange_three_numbers_of_each_row() -> None:
    to = builder()
    logits, labels = leaf(to, "input", "logits", 4, 3), leaf(to, "input", "labels", 4)
    losses = LowerCrossEntropy(to, Padding(to, (TP,)), (S(1),))((4, 6), logits, labels, -100)
    (terms,) = [node for node in to.graph.nodes if node.target is convert]
    assert shape(terms) == (2, 3, 4) and shape(losses) == (4,)
    time = Axis("microbatch", 2, "time")
    with pytest.raises(CompileError, match="QN104"):
        LowerCrossEntropy(to, Padding(to, (time,)), (S(1),))((4, 6), logits, labels, -100)


def test_what_computes_in_16_bits() -> None:
    made, _ = linear()
    lowered = LowerPrecision(Precision(compute=torch.bfloat16))(made)
    dtypes = {node.name: node.meta["val"].dtype for node in lowered.graph.nodes if "val" in node.meta}
    assert dtypes["linear"] is torch.bfloat16 and "aten._to_copy" in _targets(lowered)
    assert spec_of(torch.ops.aten.linear.default).autocast == 16
    assert spec_of(torch.ops.aten.log_softmax.int).autocast == 32 and spec_of(len).autocast is None
    assert _targets(LowerPrecision(Precision())(made)) == _targets(made)


def test_a_search_finds_a_legal_program_that_the_invariants_accept() -> None:
    made, nodes = linear()
    sharded = ChooseSharding((DP,), RuleBook(RULES), Roofline())(made)
    verify_invariants(sharded)
    assert sharded.produced(nodes["x"]) == (S(0),) and sharded.produced(nodes["loss"]) == (P,)
    stored = ShardParameters(1, ("dp",), {})(sharded)
    assert (stored.produced(nodes["w"]) == (S(0),) and storing_axes(stored) == [0]) or storing_axes(stored)
    assert ShardParameters(0, (), {})(sharded).produced(nodes["w"]) == (R,)


def test_stages_follow_parameters() -> None:
    staged, (sharded, _) = _staged(), _row_parallel()
    assert set(staged.stage.values()) == {0} and len(staged.stage) == 2
    with pytest.raises(CompileError, match="QN206"):
        CutStages(3, Roofline(), ())(sharded)
    assert [*balanced_starts(_price([1.0, 1.0, 4.0, 1.0]), 2)] == [2]


def _price(work: list[float]) -> Any:
    total = np.concatenate([[0.0], np.cumsum(work)])
    return total[None, :] - total[:, None]


def test_ranks_have_local_shapes_and_conversions_are_nodes() -> None:
    local = _local()
    verify_invariants(local)
    shapes = {node.name: shape(node) for node in local.graph.nodes if node.op != "output"}
    assert shapes["w"] == (4, 3) and shapes["x"] == (8, 3) and shapes["linear"] == (8, 4)
    check_types(local, RuleBook(RULES))
    check_reductions(local)
    check_notation(local.staged.sharded.program.graph, RULES)
    assert _targets(FuseTokenDispatch(RULES)(local)) == _targets(local)  # there are no tokens


def test_the_types_check_notices_a_wrong_strategy() -> None:
    sharded, nodes = _row_parallel()
    strategies = {**sharded.strategies, nodes["y"]: (Strategy((S(1), S(1)), (I,), "split c 1"),)}
    wrong = FollowStages(1, {"w": (0,)})(ShardedProgram(sharded.program, (TP,), strategies))
    with pytest.raises(CompileError, match="type check"):
        check_types(InsertCommunication(dict(RULES), True)(wrong), RuleBook(RULES))


def test_the_backward_follows_from_the_types() -> None:
    differentiate = Differentiate(True)
    made = differentiate(_local())
    verify_invariants(made)
    check_backward(made, True, differentiate.templates)
    (gradient,) = made.gradients.values()
    assert shape(gradient) == (4, 3) and gradient.target is torch.ops.aten.mm.default
    assert set(_targets(made)) & {str(op) for op in COMMUNICATION} <= {"quintnet.all_reduce"}
    inference = Differentiate(False)(_local())
    assert inference.gradients == {} and len(inference.graph.nodes) < len(made.graph.nodes)


def test_equal_calls_have_one_pattern() -> None:
    local, templates = _local(), dict[Any, Any]()
    node = next(n for n in local.graph.nodes if n.target is torch.ops.aten.linear.default)
    expected = ExpectedCalls(local, templates)
    forward = expected.pattern(node, tensor_inputs(node), [None], needs_backward=False)
    assert forward is expected.pattern(node, tensor_inputs(node), [None], needs_backward=False)
    assert forward.outputs[0] is not None and forward.outputs[0].target is node.target
    backward = expected.pattern(node, tensor_inputs(node), [value(node)], needs_backward=True)
    assert forward.gradients == (None, None) and any(gradient is not None for gradient in backward.gradients)


def test_nothing_is_recomputed_outside_of_repeated_blocks() -> None:
    made = _differentiated()
    assert _targets(Recompute("full", False, None)(made)) == _targets(made)
    assert _targets(CoalesceCollectives()(made)) == _targets(made)


def test_communication_starts_early_where_something_hides_it() -> None:
    before = column()
    after = Overlap(lambda node: 1.0)(before)
    check_overlap(before, after)
    starts = [target for target in _targets(after) if target.startswith("quintnet.start_")]
    waits = [node for node in after.graph.nodes if node.target is wait]
    assert starts == ["quintnet.start_reduce_scatter"] and len(waits) == 1
    # the gradient of w hides the way back of the gradient of h
    order = _targets(after)
    assert "aten.mm" in order[order.index(starts[0]) : order.index("quintnet.wait")]
    backward = [n for n in before.graph.nodes if n.op == "call_function" and n in before.stage]
    assert {getattr(item, "node", item) for item in Order(before, backward, lambda n: 1.0).items()} == set(backward)


def test_code_of_every_rank_is_checked_and_runs_on_shapes() -> None:
    program = GenerateRanks(Mesh(tp=2), one_f_one_b(1, 1))(_differentiated())
    verify_invariants(program)
    check_code(program)
    check_slices(program)
    check_ranks(program)
    text = code_text(program, program.rank(1))
    assert "# rank 1 of Mesh(tp=2): tp=1" in text and "comm.accumulate_matmul(" in text
    assert "parameter 'w' float32[4, 6] {tp: S(1)} stages [0]" in program_text(program)


def test_a_pass_gets_the_options_of_a_plan_that_it_has_fields_for() -> None:
    plan = Plan(context_load_balance=False, reshard_after_forward=False, recompute="full")
    request = Request(Mesh(tp=2), plan, 4, torch.device("cpu"))
    setting = PassSetting(request, 1, Roofline(), lambda node: 0.0, Differentiate())
    passes = {spec.kind: spec.make for spec in PIPELINE}
    assert all(is_dataclass(kind) for kind in passes)
    assert passes[InsertCommunication](setting, None) == InsertCommunication(dict(RULES), False)
    assert passes[Recompute](setting, None) == Recompute("full", False)


def test_a_stage_is_cut_and_its_functions_are_generated() -> None:
    program = column()
    cut = StageCut(program, 0, 1)
    assert not cut.received and not cut.slices and {*cut.forward, *cut.backward} <= set(program.graph.nodes)
    assert set(cut.results().values()) <= {*cut.forward, *cut.once}
    sites: list[str] = []
    leaves = {node for node in program.graph.nodes if node.op == "placeholder"}
    piece = Functions(sites, written_module).piece(cut.forward, cut.saved_values(), leaves, {})
    assert piece.outputs == tuple(node.name for node in cut.saved_values())
    assert set(piece.static) <= {node.name for node in leaves}
    assert len(sites) == 1 and sites[0].startswith("all_gather[tp]")
