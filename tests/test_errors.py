"""Wrong uses: each gives one error, before anything runs, with this very message."""
# ruff: noqa: E501  messages are as long as they are

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh, Plan

from .models import CASES, MLP, build, reference, worst_error
from .unruled import cubed

torch.set_num_threads(1)


class OneLinear(nn.Module):
    """A linear with something wrong around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)


class Branch(OneLinear):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 2
        return self.layer(x)


class Item(OneLinear):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[: int(x.max().item())]


class Numpy(OneLinear):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.from_numpy(x.detach().numpy()))


class FixedBatch(OneLinear):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(8, 16))


class Cubed(OneLinear):
    def forward(self, x: Tensor) -> Tensor:
        return cubed(self.layer(x)).sum()


class Norm(OneLinear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


class Clamped(OneLinear):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.layer(x) @ self.layer.weight)
        with torch.no_grad():
            self.layer.weight.clamp_(-1, 1)
        return out


class Instances(OneLinear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.norm.running_mean, self.norm.running_var
        return torch.instance_norm(self.layer(x).view(-1, 4, 2), None, None, *kept, True, 0.1, 1e-5, False).flatten(1)


class Counts(OneLinear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.poisson(self.layer(x).abs())


class Contrast(OneLinear):
    """Every row is compared with every other: the loss couples samples."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        similarity = self.layer(x) @ self.layer(y).T
        return F.cross_entropy(similarity, torch.arange(x.shape[0]))


class Tall(nn.Module):
    """Divides by a statistic of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y / y.std(dim=0).mean()


def _batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 16), torch.randint(0, 8, (rows,))


def _pair(rows: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(rows, 16, generator=g), torch.randn(rows, 16, generator=g)


def _compile(model: Any = None, mesh: Any = None, batch: Any = None, **options: Any) -> quintnet.CompiledProgram:
    """A good call, but for what a test puts in its place."""
    options.setdefault("loss_fn", F.cross_entropy)
    model, mesh = MLP() if model is None else model, Mesh(dp=2) if mesh is None else mesh
    return quintnet.compile(model, mesh, _batch() if batch is None else batch, **options)


def _fix(**kinds: dict[str, str]) -> Plan:
    return Plan(parameters={name.replace("__", "."): kind for name, kind in kinds.items()})


WRONG: dict[str, Callable[[], object]] = {
    "unknown axis": lambda: Mesh(xp=2),
    "an axis of no ranks": lambda: Mesh(dp=0),
    "an axis of a fraction": lambda: Mesh(dp=2.0),  # type: ignore[arg-type]
    "an axis of True": lambda: Mesh(dp=True),
    "not a model": lambda: quintnet.compile(3, Mesh(dp=2)),  # type: ignore[arg-type]
    "not a mesh": lambda: quintnet.compile(MLP(), 8),  # type: ignore[arg-type]
    "no microbatches": lambda: _compile(microbatches=0),
    "unknown schedule": lambda: _compile(schedule="zigzag"),
    "zero without data ranks": lambda: _compile(mesh=Mesh(tp=2), zero=3),
    "slices that do not divide": lambda: _compile(plan={"parameters": {"head.bias": {"dp": "S(0,3)"}}}),
    "no plan file": lambda: _compile(plan="/nowhere/plan.json"),
    "a plan of a name": lambda: _compile(plan="automatic"),
    "a cluster and no batch": lambda: quintnet.compile(MLP(), quintnet.Cluster("h100")),
    "a cluster of nothing": lambda: quintnet.Cluster("h100", nodes=0),
    "a cluster of unknown devices": lambda: quintnet.Cluster("h1000"),
    "unknown key in a plan": lambda: _compile(plan={"microbatchs": 2}),
    "not a plan": lambda: _compile(plan=7),
    "plan for another mesh": lambda: _compile(plan=Plan(mesh={"tp": 2})),
    "rule for no parameter": lambda: _compile(mesh=Mesh(tp=2), plan=_fix(up__0__weight={"tp": "S(0)"})),
    "malformed type": lambda: _compile(mesh=Mesh(tp=2), plan=_fix(ups__0__weight={"tp": "S0"})),
    "rule over the pipeline": lambda: _compile(plan=_fix(ups__0__weight={"pp": "S(0)"})),
    "type that does not divide": lambda: _compile(mesh=Mesh(tp=3), plan=_fix(ups__0__weight={"tp": "S(0,5)"})),
    "operator without a rule": lambda: quintnet.compile(Cubed(), Mesh(dp=2), (torch.randn(8, 16),)),
    "branch on data": lambda: _compile(Branch()),
    "item": lambda: _compile(Item()),
    "numpy": lambda: _compile(Numpy()),
    "fixed batch size": lambda: _compile(FixedBatch()).step((torch.randn(16, 16), torch.randint(0, 8, (16,)))),
    "no loss": lambda: quintnet.compile(MLP(), Mesh(dp=2), (torch.randn(8, 16),)),
    "a dict beside a loss function": lambda: _compile(batch={"x": torch.randn(8, 16), "y": torch.zeros(8)}),
    "loss of every row": lambda: _compile(loss_fn=lambda a, b: F.cross_entropy(a, b, reduction="none")),
    "batch is a tensor": lambda: _compile(batch=torch.randn(8, 16)),
    "batch is a string": lambda: _compile(batch="rows"),
    "empty batch": lambda: quintnet.compile(MLP(), Mesh(dp=2), ()),
    "batch does not divide": lambda: _compile(batch=_batch(7), microbatches=2, batch_statistics="microbatch"),
    "dtype at step": lambda: _compile().step((torch.randn(8, 16).double(), torch.randint(0, 8, (8,)))),
    "shape at step": lambda: _compile().step((torch.randn(8, 17), torch.randint(0, 8, (8,)))),
    "structure at step": lambda: _compile().step({"x": torch.randn(8, 16)}),
    "batch at step does not divide": lambda: _compile(microbatches=2, batch_statistics="microbatch").step(_batch(7)),
    "parameters before a batch": lambda: list(quintnet.compile(MLP(), Mesh(dp=2)).parameters()),
    "loss that couples samples": lambda: quintnet.compile(Contrast(), Mesh(), _pair(), microbatches=2),
    "statistics of the batch": lambda: _compile(Tall(), Mesh(), microbatches=2),
    "batch norm": lambda: _compile(Norm(), microbatches=2),
    "clamped weight": lambda: _compile(Clamped()),
    "instance norm": lambda: _compile(Instances()),
    "random numbers": lambda: _compile(Counts()),
    "more stages than operators": lambda: _compile(mesh=Mesh(pp=64)),
    "no values": lambda: _compile(MLP().to("meta")).step(_batch()),
    "local rows of all ranks": lambda: _compile().step(_batch(), batch_is_local=True),
}

MESSAGES: dict[str, str] = {
    "unknown axis": ("QN201 the mesh is not valid\n  unknown axis 'xp'\n  fix: use some of pp, dp, ep, cp, tp"),
    "an axis of no ranks": (
        "QN201 the mesh is not valid\n  axis dp has size 0\n  fix: give each axis a whole number of ranks, 1 or more"
    ),
    "an axis of a fraction": (
        "QN201 the mesh is not valid\n  axis dp has size 2.0\n  fix: give each axis a whole number of ranks, 1 or more"
    ),
    "an axis of True": (
        "QN201 the mesh is not valid\n  axis dp has size True\n  fix: give each axis a whole number of ranks, 1 or more"
    ),
    "not a model": (
        "QN105 the model uses something that is not supported yet\n  a int is not a model\n  fix: pass an nn.Module"
    ),
    "not a mesh": ("QN201 the mesh is not valid\n  a int is not a mesh\n  fix: pass quintnet.Mesh(dp=2, tp=2)"),
    "no microbatches": (
        "QN207 the plan document is not valid\n  microbatches: Input should be greater than or equal to 1\n"
        "  fix: a plan has the keys version, mesh, microbatches, batch_statistics, schedule, virtual_stages, sequence_parallel, parameters, stages, "
        "context, context_load_balance, attention_tile_bytes, experts, hot_experts, zero, zero_axes, reshard_after_forward, overlap, async_tp, recompute, activation_memory_budget, offload, offload_folder, loss_chunks, precision, fp8_recipe, fp8_skip, loss_scale, reduce_dtype, sum_dtype, bucket_mib, seed, expect, unknown_ops"
    ),
    "zero without data ranks": (
        "QN201 the mesh is not valid\n  the plan has zero=3 over dp, which Mesh(tp=2) does not have\n"
        "  fix: use zero=0, or give dp a size"
    ),
    "slices that do not divide": (
        "QN203 the layout does not divide\n  head.bias of shape (8,) cannot be S(0,3) over dp=2\n"
        "  fix: let the plan leave dp open for it"
    ),
    "unknown schedule": (
        "QN208 the schedule is not valid\n  unknown schedule 'zigzag'\n  fix: use one of 1f1b, dualpipe-v, gpipe, interleaved, synthesized, zb-h1, zb-v"
    ),
    "no plan file": (
        "QN207 the plan document is not valid\n"
        "  there is no plan file '/nowhere/plan.json'\n"
        "  fix: pass a Plan, or the path of one"
    ),
    "a plan of a name": (
        "QN207 the plan document is not valid\n"
        "  there is no plan file 'automatic'\n"
        "  fix: pass a Plan, or the path of one"
    ),
    "a cluster and no batch": (
        "QN102 the batch does not fit the program\n"
        "  the planner needs to see a batch\n"
        "  fix: compile(model, cluster, batch)"
    ),
    "a cluster of nothing": (
        "QN210 the cost model has no price for this\n  0 nodes of 8\n  fix: give whole numbers, 1 or more"
    ),
    "a cluster of unknown devices": (
        "QN210 the cost model has no price for this\n"
        "  unknown hardware 'h1000'\n"
        "  fix: use one of h100, v100, h800, h200"
    ),
    "unknown key in a plan": (
        "QN207 the plan document is not valid\n"
        "  microbatchs: Extra inputs are not permitted\n"
        "  fix: a plan has the keys version, mesh, microbatches, batch_statistics, schedule, virtual_stages, sequence_parallel, parameters, stages, context, context_load_balance, attention_tile_bytes, experts, hot_experts, zero, zero_axes, reshard_after_forward, overlap, async_tp, recompute, activation_memory_budget, offload, offload_folder, loss_chunks, precision, fp8_recipe, fp8_skip, loss_scale, reduce_dtype, sum_dtype, bucket_mib, seed, expect, unknown_ops"
    ),
    "not a plan": (
        "QN207 the plan document is not valid\n  a int is not a plan\n  fix: pass a Plan, a dict, or a path"
    ),
    "plan for another mesh": (
        "QN207 the plan document is not valid\n"
        "  the plan is for Mesh(tp=2), and the mesh is Mesh(dp=2)\n"
        "  fix: compile on the plan's mesh"
    ),
    "rule for no parameter": (
        "QN204 the plan names something that the model does not have\n"
        "  the plan's rule 'up.0.weight' matches no parameter\n"
        "  fix: did you mean ups.0.weight, ups.1.weight, norms.0.weight?"
    ),
    "malformed type": (
        "QN207 the plan document is not valid\n"
        "  parameters.ups.0.weight: 'S0' is not a sharding type; use I, R, P, S(dim), S(dim,parts) or S(dim,parts,unit)"
    ),
    "rule over the pipeline": (
        "QN201 the mesh is not valid\n  the plan shards 'ups.0.weight' over 'pp'\n  fix: name one of dp, ep, cp, tp"
    ),
    "type that does not divide": (
        "QN203 the layout does not divide\n"
        "  ups.0.weight of shape (32, 16) cannot be S(0,5) over tp=3\n"
        "  fix: use one of I, R, S(0), S(1)"
    ),
    "operator without a rule": (
        "QN202 an operator has no sharding rule\n"
        "  quintnet_tests.cubed.default has no sharding rule\n"
        "  at: test_errors.py:N: return cubed(self.layer(x)).sum()\n"
        '  fix: run it unsplit: plan={"unknown_ops": "replicate"}'
    ),
    "branch on data": (
        "QN101 the model cannot be traced\n"
        "  control flow depends on the values of a tensor, which a compiled program cannot follow\n"
        "  at: Branch  test_errors.py:N: if x.sum() > 0:\n"
        "  fix: use torch.where (or a mask) instead of `if`, `.item()` or `nonzero` on tensor values"
    ),
    "item": (
        "QN101 the model cannot be traced\n"
        "  control flow depends on the values of a tensor, which a compiled program cannot follow\n"
        "  at: Item  test_errors.py:N: return self.layer(x)[: int(x.max().item())]\n"
        "  fix: use torch.where (or a mask) instead of `if`, `.item()` or `nonzero` on tensor values"
    ),
    "numpy": (
        "QN101 the model cannot be traced\n"
        "  RuntimeError: .numpy() is not supported for tensor subclasses.\n"
        "  at: Numpy  test_errors.py:N: return self.layer(torch.from_numpy(x.detach().numpy()))"
    ),
    "fixed batch size": (
        "QN101 the model cannot be traced\n"
        "  RuntimeError: shape '[8, 16]' is invalid for input of size 16*sN\n"
        "  the first batch had 8 rows, and the model's code fixes their number\n"
        "  at: FixedBatch  test_errors.py:N: return self.layer(x.view(8, 16))"
    ),
    "no loss": (
        "QN103 there is no scalar loss\n"
        "  the model returned a tensor of shape (sN, 8) where a scalar loss is needed\n"
        "  fix: give loss_fn=, or return .mean() or .sum() of it"
    ),
    "a dict beside a loss function": (
        "QN103 there is no scalar loss\n"
        "  loss_fn takes what the model returns and the last value of a tuple; this batch is a dict (x, y), all of which "
        "the model takes\n"
        "  fix: make the batch a tuple, (*inputs, labels), or compute the loss in the model's forward and leave out "
        "loss_fn"
    ),
    "loss of every row": (
        "QN103 there is no scalar loss\n"
        "  the model returned a tensor of shape (sN,) where a scalar loss is needed\n"
        "  fix: give loss_fn=, or return .mean() or .sum() of it"
    ),
    "batch is a tensor": (
        "QN102 the batch does not fit the program\n"
        "  the batch is a Tensor\n"
        "  fix: pass what one step consumes: a tuple (arguments) or a dict (keyword arguments)"
    ),
    "batch is a string": (
        "QN102 the batch does not fit the program\n"
        "  the batch is a str\n"
        "  fix: pass what one step consumes: a tuple (arguments) or a dict (keyword arguments)"
    ),
    "empty batch": (
        "QN102 the batch does not fit the program\n"
        "  the batch holds no tensor\n"
        "  fix: pass a tuple or a dict of tensors that have rows"
    ),
    "batch does not divide": (
        "QN106 the batch does not divide\n"
        "  a batch of 7 rows does not divide over dp=2 x 2 microbatches\n"
        "  fix: use a batch of 4 rows, or drop the last incomplete batch"
    ),
    "dtype at step": (
        "QN101 the model cannot be traced\n"
        "  aten.linear.default is given torch.float64 and torch.float32, and PyTorch computes it in one dtype only\n"
        "  batch[0] is torch.float64\n"
        "  batch[0] is float64[rows, 16], and was float32[rows, 16]\n"
        "  at: ups.0  models.py:N: x = x + down(F.gelu(up(norm(x))))"
    ),
    "shape at step": (
        "QN101 the model cannot be traced\n"
        "  RuntimeError: Given normalized_shape=[16], expected input with shape [16], but got input of size "
        "torch.Size([sN, 17])\n"
        "  batch[0] is float32[rows, 17], and was float32[rows, 16]\n"
        "  at: MLP  models.py:N: x = x + down(F.gelu(up(norm(x))))"
    ),
    "structure at step": (
        "QN103 there is no scalar loss\n"
        "  loss_fn takes what the model returns and the last value of a tuple; this batch is a dict (x), all of which the "
        "model takes\n"
        "  the batch is {'x': float32[rows, 16]}, and the first one was (float32[rows, 16], int64[rows])\n"
        "  fix: make the batch a tuple, (*inputs, labels), or compute the loss in the model's forward and leave out "
        "loss_fn"
    ),
    "batch at step does not divide": (
        "QN106 the batch does not divide\n"
        "  a batch of 7 rows does not divide over dp=2 x 2 microbatches\n"
        "  fix: use a batch of 4 rows, or drop the last incomplete batch"
    ),
    "parameters before a batch": (
        "QN102 the batch does not fit the program\n"
        "  the program is not compiled yet, because it has not seen a batch\n"
        "  fix: pass batch= to quintnet.compile, call prepare(batch), or run a step"
    ),
    "loss that couples samples": (
        "QN104 the loss cannot be split into microbatches\n"
        "  aten.matmul.default brings rows together with other rows ([8, 8] and [8, 8]), and each of 2 microbatches has rows of its own\n"
        "  at: test_errors.py:N: similarity = self.layer(x) @ self.layer(y).T\n"
        '  fix: use microbatches=1, or batch_statistics="microbatch"'
    ),
    "statistics of the batch": (
        "QN104 the loss cannot be split into microbatches\n"
        "  the rule of aten.std.dim does not split the dim of the batch in [8, 8], and each of 2 microbatches has rows of its own\n"
        "  at: test_errors.py:N: return y / y.std(dim=0).mean()\n"
        '  fix: use microbatches=1, or batch_statistics="microbatch"'
    ),
    "batch norm": (
        "QN104 the loss cannot be split into microbatches\n"
        "  aten.sub.Tensor needs the sum over all rows that comes out of aten.div.Scalar, and each of 2 microbatches has"
        " rows of its own\n"
        "  at: norm  test_errors.py:N: return self.norm(self.layer(x))\n"
        '  fix: use microbatches=1, or batch_statistics="microbatch"'
    ),
    "clamped weight": (
        "QN110 forward changes something, or draws what is drawn once\n"
        "  the forward pass changes layer.weight after addmm has saved what it needs of it for the backward\n"
        "  at: layer\n"
        "  fix: change it before its first use, or after the optimizer's step"
    ),
    "instance norm": (
        "QN110 forward changes something, or draws what is drawn once\n"
        "  torch.instance_norm that trains changes running statistics; a program would not\n"
        "  at: test_errors.py:N: return torch.instance_norm(self.layer(x).view(-1, 4, 2), None, None, *kept, True, 0.1, "
        "1e-5, False).flatten(1)\n"
        "  fix: call torch.nn.functional.instance_norm"
    ),
    "random numbers": (
        "QN105 the model uses something that is not supported yet\n"
        "  aten.poisson.default draws random numbers, which would differ between layouts\n"
        "  at: test_errors.py:N: return torch.poisson(self.layer(x).abs())\n"
        "  fix: draw uniform, normal, exponential or whole numbers, or pass the random numbers in the batch"
    ),
    "more stages than operators": (
        "QN206 the pipeline cannot be cut\n"
        "  64 stages, and the model has 14 operators that use parameters\n"
        "  fix: use pp=14 or less, or fewer virtual stages"
    ),
    "no values": (
        "QN604 a tensor has no values yet\n"
        "  values are missing for downs.0.bias, downs.0.weight, downs.1.bias, downs.1.weight, head.bias,"
        " head.weight, norms.0.bias, norms.0.weight and 6 more\n"
        "  fix: call program.load_pretrained(folder), program.initialize() for the module's own initial values, or"
        " program.initialize(build), where build() makes the module"
    ),
    "local rows of all ranks": (
        "QN102 the batch does not fit the program\n"
        "  batch_is_local was given where all data ranks run in this process\n"
        "  fix: pass the global batch"
    ),
}


def _stable(error: Exception) -> str:
    """The message, without line numbers and without symbols that tracing made up."""
    return re.sub(r"\bs\d+\b", "sN", re.sub(r"(\w+\.py):\d+", r"\1:N", str(error)))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_gives_this_message(name: str) -> None:
    with pytest.raises(quintnet.QuintNetError) as caught:
        WRONG[name]()
    assert _stable(caught.value) == MESSAGES[name]


def test_malformed_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="one '->'"):
        quintnet.rule("op", "m k, k n")


def test_suggestions_work() -> None:
    """What the messages above propose, where it is mechanical."""
    assert _compile(mesh=Mesh(tp=2), zero=0).mesh["tp"] == 2 and _compile(mesh=Mesh(dp=2, tp=2), zero=3).plan.zero == 3
    assert _compile(batch=_batch(4), microbatches=2).step(_batch(4)) > 0
    plan = Plan(unknown_ops="replicate")
    program = quintnet.compile(Cubed(), Mesh(dp=2), (torch.randn(8, 16),), plan=plan)
    assert torch.isfinite(program.step((torch.randn(8, 16),)))
    assert _compile(mesh=Mesh(tp=3), plan=_fix(ups__0__weight={"tp": "I"})).plan.parameters["ups.0.weight"]["tp"] == "I"


def test_a_loss_that_couples_samples_is_exact_without_microbatches() -> None:
    torch.manual_seed(0)
    model = Contrast().double()
    batch = tuple(x.double() for x in _pair())
    loss, expected = reference(model, batch, None)
    model.zero_grad(set_to_none=True)
    program = quintnet.compile(model, Mesh(dp=2, tp=2), batch)
    assert abs(program.step(batch) - loss) / loss < 1e-9
    error, worst = worst_error({n: p.grad.full_tensor() for n, p in program.named_parameters()}, expected)  # type: ignore[union-attr]
    assert error < 1e-9, worst


def test_nothing_is_lost_on_bad_input() -> None:
    case = CASES["mlp"]
    program = quintnet.compile(build("mlp"), Mesh(dp=2), case.batch(8), loss_fn=case.loss_fn)
    before = program.step(case.batch(8))
    program.zero_grad()
    x, labels = case.batch(8)
    for bad in ((x.float(), labels), (x[:, :-1], labels), {"x": x}):
        with pytest.raises((quintnet.InputError, quintnet.CompileError)):
            program.step(bad)
    assert all(p.grad is None for p in program.parameters())
    assert torch.equal(program.step(case.batch(8)), before)


def _mesh_of_four() -> str:
    try:
        _compile(mesh=Mesh(dp=4))
    except quintnet.RunError as error:
        return str(error)
    return ""


def test_a_mesh_larger_than_the_world_is_refused() -> None:
    expected = (
        "QN301 the mesh does not fit the world\n  Mesh(dp=4) needs 4 ranks, and the world has 2\n"
        "  fix: start 4 processes, or give the mesh 2 ranks"
    )
    assert quintnet.launch(_mesh_of_four, 2, timeout=60) == [expected] * 2
