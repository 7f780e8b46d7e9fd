"""Small modules of several layers: names, errors, weights, manifests, operators, invariants, prices."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import quintnet
from benchmarks.closed_forms.layer_kernels import Shapes, head, layer
from benchmarks.closed_forms.transformer import Decoder, ParallelLayout
from quintnet_compiler.api.moe import expert_linear
from quintnet_compiler.core.error_help import ErrorHelp, error_help
from quintnet_compiler.core.error_table import ERRORS
from quintnet_compiler.core.errors import CheckpointError, CompileError
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.core.names import check_batch_names, check_names, is_safe, one_line
from quintnet_compiler.core.precision import Precision, narrows
from quintnet_compiler.core.sharding import I, S
from quintnet_compiler.cost_models.calibration import MeasuredMatmul, Point, interpolated, matmul_seconds
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts
from quintnet_compiler.driver.task import Task, modules_of
from quintnet_compiler.features.text_generation.ops import PageAccess, attend_pages
from quintnet_compiler.features.text_generation.sampling import Ends, Sampling, ends_of
from quintnet_compiler.ir.codegen_allowlist import check_source
from quintnet_compiler.ir.cost_protocol import CostModel, RankCosts
from quintnet_compiler.ir.expectations import Expectations
from quintnet_compiler.ir.invariants import verify_invariants
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ir.plan_options import ExpectationOptions, PlanOptions, decided, lists_options, read_options
from quintnet_compiler.ir.program import ShardedProgram, StagedProgram, Strategy
from quintnet_compiler.ir.repeated_blocks import as_block, block_members, block_of
from quintnet_compiler.ops.attention.blocks import Sight
from quintnet_compiler.ops.attention.operator import attention, visible
from quintnet_compiler.weights.files import open_weights
from quintnet_compiler.weights.names import assign, misread_names
from quintnet_compiler.weights.sources import Join, Stack, runs_of

from ..golden.models import Transformer
from ..golden.programs import TOKENS
from .graphs import TP, builder, leaf, linear

# -- names and errors


def test_names_that_can_stand_in_code() -> None:
    assert is_safe("layer_1") and not is_safe('a"b') and one_line("a\nb") == "a\\nb"
    model = nn.Sequential(nn.Linear(1, 1))
    check_names(model)
    model.add_module('x"', nn.Linear(1, 1))
    with pytest.raises(CompileError, match="QN701"):
        check_names(model)
    check_batch_names({"ids": 1})
    with pytest.raises(CompileError, match="QN701"):
        check_batch_names({"a\nb": torch.ones(1)})


def test_every_error_has_an_entry_and_a_near_one_is_found() -> None:
    found = error_help("qn203")
    assert isinstance(found, ErrorHelp) and found.summary == ERRORS["QN203"].summary
    assert "QN203" in list(error_help("QN204x")) or "QN204" in list(error_help("QN204x"))


def test_dtypes_of_sums() -> None:
    assert narrows(torch.float32, torch.bfloat16) and not narrows(torch.bfloat16, torch.float32)
    plain, wide = Precision(), Precision(compute=torch.bfloat16, reduce=torch.float32)
    assert plain.reduced(torch.bfloat16) is torch.bfloat16 and wide.reduced(torch.bfloat16) is torch.float32
    assert wide.rounds and not plain.rounds


# -- weights


def test_weights_of_a_folder(tmp_path: Path) -> None:
    save_file({"weight": torch.arange(6.0).view(2, 3), "extra": torch.ones(1)}, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights:
        found = assign(nn.Linear(3, 2, bias=False), weights.stored)
        assert [one.name for one in found.unexpected] == ["extra"] and not found.problems
        out = torch.zeros(1, 2)
        found.sources["weight"].read([((1, 2),), ((0, 1), (2, 3))], out)
        assert out.tolist() == [[3, 5]]
        both = Join(0, (weights.stored["weight"], weights.stored["weight"]))
        out = torch.zeros(2, 3)
        both.read([((1, 3),), ((0, 3),)], out)
        assert both.shape == (4, 3) and out.tolist() == [[3, 4, 5], [0, 1, 2]]
        assert Stack(0, (weights.stored["extra"],) * 2).shape == (2, 1)
    assert misread_names(nn.Linear(1, 1), ["weight"]) == [] and runs_of(torch.tensor([2, 3, 7])) == ((2, 4), (7, 8))


def test_pickled_and_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="QN601"), open_weights(tmp_path):
        pytest.fail("opened")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"), open_weights(tmp_path):
        pytest.fail("opened")


# -- operators


def test_who_sees_whom() -> None:
    rows = torch.arange(3)
    assert visible(rows, rows, Sight(causal=True)).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    padding = torch.tensor([[True, False, True]])
    assert visible(rows, rows, Sight(), padding=padding)[0, 0, 0].tolist() == [True, False, True]
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind(0)
    found = attention(q, k, v, padding=None, segments=None, scale=8**-0.5, mask="causal")
    assert torch.allclose(found, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)


@pytest.mark.parametrize(("groups", "window"), [(4, 0), (2, 0), (2, 3)])
def test_a_token_alone_sees_what_was_kept(groups: int, window: int) -> None:
    """Two texts of two pools, whose pages are in any order, and a row without tokens between them."""
    q, k, v = (torch.randn(2, heads, 7, 8) for heads in (4, groups, groups))
    kept = torch.zeros(2, 9, 2, groups, 8), torch.zeros(2, 9, 2, groups, 8)
    near = torch.ones(7, 7, dtype=torch.bool).tril() & torch.ones(7, 7, dtype=torch.bool).triu(1 - (window or 7))
    whole = F.scaled_dot_product_attention(q, k, v, near, enable_gqa=True)
    table = torch.tensor([[7, 2, 5, 1], [0] * 4, [3, 8, 4, 6], [0] * 4])
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        new = [F.pad(x[:, None, :, start:stop], (0, 0, 1, 0, 0, 0, 0, 1), value=9.0).flatten(0, 1) for x in (q, k, v)]
        places = torch.tensor([[-1, *range(start, stop)], [-1] * (stop - start + 1)]).repeat(2, 1)
        access = PageAccess.of(kept[0], table, places, window, q.dtype)
        found = attend_pages((new[0], new[1], new[2]), kept, access, 8**-0.5)
        assert torch.allclose(found[::2, :, 1:], whole[:, :, start:stop], atol=1e-6)
        assert found.isfinite().all()


def test_experts_refuse_shapes_that_do_not_fit() -> None:
    rows, ids = torch.ones(2, 3), torch.tensor([0, 1])
    weight = torch.stack([torch.ones(4, 3), 2 * torch.ones(4, 3)])
    assert expert_linear(rows, ids, weight, torch.ones(2, 4))[:, 0].tolist() == [4, 7]
    assert torch.equal(expert_linear(rows, ids, weight.mT, transposed=True), expert_linear(rows, ids, weight))
    with pytest.raises(ValueError, match=r"\[E, O, I\] are expected"):
        expert_linear(rows, ids, weight.mT)
    with pytest.raises(ValueError, match="bias"):
        expert_linear(rows, ids, weight, torch.ones(4))


# -- ir


def test_what_generated_code_may_be() -> None:
    head = "def forward(self, args):\n    comm, x, = args\n    args.clear()\n"
    check_source(f"{head}    y = torch.add(x, 1);  x = None\n    return (y,)")
    for line in ("y = x.data", "y = __import__('os')", "y = torch.load(x)", "import os", "y = open(x)"):
        with pytest.raises(CompileError, match="QN701"):
            check_source(f"{head}    {line}\n    return (y,)")


def test_invariants_name_the_node() -> None:
    made, nodes = linear(features=3)
    verify_invariants(made)
    strategy = {node: (Strategy((I, I), (S(1, 2),)),) for node in (nodes["w"], nodes["y"])}
    with pytest.raises(CompileError, match=r"w of \(4, 3\) cannot be S\(1,2\)"):
        verify_invariants(ShardedProgram(made, (TP,), strategy))
    sharded = ShardedProgram(made, (), {})
    with pytest.raises(CompileError, match="sum_1 in stage 0 reads stage 1"):
        verify_invariants(StagedProgram(sharded, 2, {nodes["y"]: 1, nodes["loss"]: 0}))


def test_blocks_of_a_graph() -> None:
    assert as_block("model.layers.3") == ("model.layers.", "3")
    compiled = quintnet.compile(Transformer(depth=2), Mesh(dp=1), TOKENS, loss_fn=F.mse_loss, check="off")
    name, normalized = compiled.passes()[0]
    members = block_members(normalized.graph)
    assert name == "Normalize" and list(members) == [("blocks.", "0"), ("blocks.", "1")]
    assert len(members["blocks.", "0"]) == len(members["blocks.", "1"])
    assert block_of(members["blocks.", "1"][0]) == ("blocks.", "1")
    to = builder()
    assert block_of(leaf(to, "parameter", "head.weight", 1)) is None


# -- prices


def test_prices_between_measurements() -> None:
    points = (Point(size=1, seconds=1), Point(size=100, seconds=10))
    assert [interpolated(points, size) for size in (0.5, 10, 200)] == [1, pytest.approx(10**0.5), 20]
    sizes = [MeasuredMatmul(order="nn", m=m, k=8, n=8, seconds=m * 1e-6) for m in (8, 64)]
    assert matmul_seconds(tuple(sizes), "nn", 64, 8, 8) == 64e-6
    assert 8e-6 < matmul_seconds(tuple(sizes), "nn", 16, 8, 8) < 64e-6


def test_costs_of_a_cluster_fit_the_protocols() -> None:
    costs: RankCosts = ClusterCosts(Cluster("h100"))
    assert costs.send_seconds(2**30, 0, 1) > costs.send_seconds(2**20, 0, 1) > 0
    assert costs.optimizer_seconds(2**30) > 0 and "h100" in costs.source.lower()
    each = costs.host_seconds(None)
    node = torch.fx.Graph().call_function(torch.ops.aten.t.default)
    assert each == Cluster("h100").device.efficiency.host_seconds and costs.host_seconds(node) == 0  # a view
    assert ClusterCosts(Cluster("cpu")).host_seconds(None) == 0 and ClusterCosts(Cluster("h100"), graphs=True).graphs
    assert {"operator_seconds", "collective_seconds", "parameter_seconds"} <= set(dir(CostModel))


def test_kernels_of_a_layer_split_with_tensor_parallelism() -> None:
    model = Decoder(2, 64, 256, 4, 100, 32)
    one, two = (layer(model, ParallelLayout(tp=tp, microbatch=2, global_batch=2)) for tp in (1, 2))
    flops = [sum(kernel.flops for kernel in work.forward) for work in (one, two)]
    assert flops[0] == pytest.approx(2 * flops[1], rel=0.01) and not one.forward_communication
    assert {c.axis for c in two.forward_communication} == {"tp"}
    assert Shapes(model, ParallelLayout(microbatch=2, global_batch=2)).tokens == 64
    assert sum(k.flops for k in head(model, ParallelLayout(microbatch=2, global_batch=2)).forward) >= 2 * 64 * 64 * 100


# -- driver


def test_the_next_token() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    assert Sampling().choose(logits, [0], []) == [1]
    assert Sampling(True, top_k=1).choose(logits, [0], [0.999]) == [1]
    assert Sampling(True, top_p=0.5).choose(logits, [0], [0.999]) == [1]
    assert {Sampling(True, temperature=50.0).choose(logits, [0], [i / 50])[0] for i in range(50)} == {0, 1, 2}
    for wrong in ({"temperature": 0.0}, {"top_k": 0}, {"top_p": 1.5}):
        with pytest.raises(CompileError, match="QN108"):
            Sampling(**wrong)  # type: ignore[arg-type]
    assert ends_of(nn.Identity(), [3, 4]) == Ends(frozenset({3, 4}), 3) and not ends_of(nn.Identity(), None).ends


def test_modules_whose_parameters_a_task_trains() -> None:
    model, loss_fn = nn.Linear(1, 1), nn.MSELoss()
    rest: dict[str, Any] = {"mesh": Mesh(dp=1), "plan": Plan(), "rules": {}, "device": torch.device("cpu")}
    task = Task(model, loss_fn, **rest)
    assert modules_of(task) == {"": model, "loss_fn": loss_fn} and task.primary_kind == "train"
    assert modules_of(Task(model, F.mse_loss, training=False, **rest)) == {"": model}


def test_options_of_a_plan_as_keyword_arguments() -> None:
    assert decided("f", {"zero": 3, "experts": ["ep"], "seed": None, "schedule": "1f1b"}) == {
        "zero": 3, "experts": ("ep",), "schedule": "1f1b",
    }  # fmt: skip
    with pytest.raises(TypeError, match=r"f\(\) got an unexpected keyword argument 'zeros'. Did you mean 'zero'\?"):
        decided("f", {"zeros": 3})

    @lists_options
    def function(x: int, **options: Any) -> None: ...

    assert list(inspect.signature(function).parameters) == ["x", *PlanOptions.__annotations__]
    fields = {name: hint for name, hint in get_type_hints(Plan).items() if name in Plan.model_fields}
    expected = {name: _argument(hint) | None for name, hint in fields.items() if name not in ("version", "mesh")}
    assert get_type_hints(PlanOptions) == expected


def _argument(hint: Any) -> Any:
    """What a keyword argument may be for a field of a plan: any sequence for a tuple, any mapping for a dict."""
    if get_origin(hint) is tuple:
        return Sequence[get_args(hint)[0]]  # type: ignore[misc]
    if hint is Expectations:
        return ExpectationOptions
    if get_origin(hint) is dict:
        key, value = get_args(hint)
        return Mapping[key, _argument(value)]  # type: ignore[valid-type,misc]
    return hint


def test_decisions_are_read_from_texts() -> None:
    plan = Plan(
        microbatches=4, stages=("a", "b"), experts=("dp", "ep"), zero=3, overlap=False, async_tp=True,
        recompute="auto", activation_memory_budget=2.5, offload=("activations",), offload_folder="/nvme",
        expect={"hot_rows": 0.25}, parameters={"*.w": {"tp": "S(0)"}}, loss_scale=8.0,
    )  # fmt: skip
    texts = []
    for name in PlanOptions.__annotations__:
        value = plan.model_dump(mode="json")["expect"] if name == "expect" else getattr(plan, name)
        text = json.dumps(value) if isinstance(value, dict) else ",".join(value) if isinstance(value, tuple) else value
        texts.append(f"{name}={text}")
    assert Plan().changed(read_options(texts)) == plan
    assert read_options(["overlap=true", " stages = "]) == {"overlap": True, "stages": ()}


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["zero"], "'zero' is not NAME=VALUE; write for example zero=3"),
        (["mesh=dp"], "there is no option 'mesh'; the options are microbatches, batch_statistics, schedule, "),
        (["overlapp=true"], "there is no option 'overlapp'; did you mean overlap? the options are "),
        (["zero=1", "zero=2"], "zero is given twice"),
        (["overlap=1"], "overlap=1: overlap is one of true, false"),
        (["recompute=half"], "recompute=half: recompute is one of none, selective, full, auto"),
        (["microbatches=2.5"], "microbatches=2.5: microbatches is an integer"),
        (["loss_scale=x"], "loss_scale=x: loss_scale is a number"),
        (["experts=dp,tp"], "experts is a list, separated by commas; each element is one of dp, ep, cp"),
        (["parameters=w"], 'parameters is JSON, such as {"*.up_proj.weight": {"tp": "S(0)"}}'),
    ],
)
def test_a_text_that_is_no_decision_is_refused_with_what_is_possible(texts: list[str], told: str) -> None:
    with pytest.raises(ValueError) as refused:
        read_options(texts)
    assert told in str(refused.value)
