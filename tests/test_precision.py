"""Compute in 16 bits with float32 parameters: as near to the model in float64 as one rank of the same precision is."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import CompileError, Mesh
from quintnet_compiler.core.annotations import value
from quintnet_compiler.ops.catalog import OPERATORS
from quintnet_compiler.ops.collectives import all_reduce, all_reduce_, reduce_scatter
from quintnet_compiler.runtime.execute.executor import Run
from quintnet_compiler.runtime.execute.loss_scale import LossScale
from quintnet_compiler.simulation.rehearsal import rehearse

from .models import CASES, build

torch.set_num_threads(1)
aten = torch.ops.aten
Tensors = dict[str, Tensor]


def _batch(name: str, dtype: torch.dtype, rows: int = 8) -> Any:
    def typed(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    batch = CASES[name].batch(rows)
    return {k: typed(x) for k, x in batch.items()} if isinstance(batch, dict) else tuple(map(typed, batch))


def _compile(
    name: str, axes: dict[str, int], dtype: torch.dtype = torch.float32, rows: int = 8, **options: Any
) -> quintnet.CompiledProgram:
    model, batch = build(name).to(dtype), _batch(name, dtype, rows)
    return quintnet.compile(model, Mesh(**axes), batch, loss_fn=CASES[name].loss_fn, **options)


def _trained(
    name: str, axes: dict[str, int], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Tensors, Tensors]:
    """The gradients of the first step, and the parameters after three of AdamW."""
    program, batch = _compile(name, axes, dtype, **options), _batch(name, dtype)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-3)
    gradients: Tensors = {}
    for _ in range(3):
        program.step(batch)
        gradients = gradients or {n: p.grad.full_tensor().clone() for n, p in program.named_parameters()}  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return gradients, {n: p.detach().full_tensor().clone() for n, p in program.named_parameters()}  # type: ignore[attr-defined]


_unsplit = cache(lambda name: (_trained(name, {}, torch.float64), _trained(name, {}, precision="bf16")))


def _distance(found: Tensors, exact: Tensors) -> float:
    assert found.keys() == exact.keys()
    return float(torch.stack([(found[n].double() - x).square().sum() for n, x in exact.items()]).sum().sqrt())


def _distances(found: Tensors, exact: Tensors) -> dict[str, float]:
    """Of each tensor, relative to it (or to a thousandth of the largest)."""
    floor = 1e-3 * max(float(x.norm()) for x in exact.values())
    return {n: float((found[n].double() - x).norm()) / max(float(x.norm()), floor) for n, x in exact.items()}


FAST: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("mlp", {"dp": 2}, {"microbatches": 2}),
    ("mlp", {"dp": 2, "tp": 2}, {"sequence_parallel": False, "zero": 2, "microbatches": 2}),
    ("gpt", {"tp": 2}, {}),
    ("gpt", {"pp": 2, "dp": 2}, {"microbatches": 4, "zero": 1}),
    ("gpt", {"pp": 2, "tp": 2}, {"microbatches": 2, "schedule": "zb-h1", "recompute": "full"}),
    ("gpt", {"cp": 2}, {"context": "ring"}),
    ("mixture", {"dp": 2, "ep": 2}, {"zero": 1, "microbatches": 2}),
    ("gpt", {"dp": 2}, {"zero": 3, "microbatches": 2, "recompute": "full"}),
]
MORE: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("hf_llama", {"dp": 2, "tp": 2}, {"microbatches": 2}),
    ("hf_llama", {"tp": 2, "pp": 2}, {"recompute": "selective"}),
    ("hf_gpt2", {"pp": 3}, {"microbatches": 4, "schedule": "gpipe"}),
    ("vit", {"tp": 2}, {}),
    ("encoder", {"tp": 2}, {}),
    ("cnn", {"dp": 2}, {"zero": 3}),
    ("gpt", {"tp": 4}, {"sum_dtype": "float32"}),
    ("gpt", {"dp": 2, "tp": 2}, {"sequence_parallel": False, "zero": 3, "microbatches": 2}),
    ("gpt", {"cp": 2}, {"context": "ulysses"}),
    ("gpt", {"cp": 2}, {}),
    ("gpt", {"dp": 2}, {"zero": 2, "microbatches": 2}),
    ("gpt", {"dp": 2}, {"zero": 3, "microbatches": 2, "reshard_after_forward": False}),
    ("gpt", {"pp": 2, "dp": 2}, {"microbatches": 4, "zero": 1, "schedule": "zb-v", "virtual_stages": 2}),
    ("mixture", {"dp": 2}, {"zero": 3, "microbatches": 2, "experts": ("dp",)}),
]
FEW = pytest.mark.parametrize(
    ("name", "axes", "options"), [*FAST, *(pytest.param(*c, marks=pytest.mark.slow) for c in MORE)], ids=str
)


@pytest.mark.slow
@FEW
def test_layouts_are_as_near_to_float64_as_one_rank(name: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    """Two programs that round as often, in another order, are about as far from the exact values: over all elements the
    root of squares differs little (1.5), over a few of one tensor more (3). A lost or doubled term would be 1 and not
    0.01 of a gradient."""
    (exact, weights), (own, own_weights) = _unsplit(name)
    found, found_weights = _trained(name, axes, precision="bf16", **options)
    assert {g.dtype for g in found.values()} == {w.dtype for w in found_weights.values()} == {torch.float32}
    assert _distance(found, exact) < 1.5 * _distance(own, exact)
    assert _distance(found_weights, weights) < 1.5 * _distance(own_weights, weights)
    near, ours = _distances(own, exact), _distances(found, exact)
    typical = sorted(near.values())[len(near) // 2]
    assert typical < 0.05  # else the bounds below would say little
    for tensor, error in ours.items():
        assert error < 3 * max(near[tensor], typical), tensor


@pytest.mark.slow
def test_verify_knows_the_precision() -> None:
    program = _compile("mlp", {"dp": 2, "tp": 2}, precision="bf16", microbatches=2, zero=2)
    report = program.verify()
    assert report.ok and "bfloat16" in report.notes[0], report
    assert 1e-4 < report.worst.error < report.worst.limit < 0.1
    assert program.verify(float64=True).worst.error < 1e-9  # the layout, without the rounding
    assert _compile("mlp", {"dp": 2}, reduce_dtype="bfloat16").verify().ok


@pytest.mark.slow
def test_more_bits_for_sums_are_nearer() -> None:
    """Of many microbatches of a model in bfloat16, and of eight ranks of one that computes in it."""
    low = torch.bfloat16

    def gradients(axes: dict[str, int], rows: int, dtype: torch.dtype, options: dict[str, Any]) -> Tensors:
        program, batch = _compile("mlp", axes, dtype, rows, **options), _batch("mlp", dtype, rows)
        program.step(batch)
        return {n: p.grad.full_tensor() for n, p in program.named_parameters()}  # type: ignore[union-attr]

    def error(axes: dict[str, int], rows: int, dtype: torch.dtype = torch.float32, **options: Any) -> float:
        return _distance(gradients(axes, rows, dtype, options), exact[rows])

    exact = {rows: gradients({}, rows, torch.float64, {}) for rows in (8, 128)}
    for count, limit in ((8, 0.95), (128, 0.7)):
        many = {"microbatches": count, "dtype": low}
        assert error({}, count, reduce_dtype="float32", **many) < limit * error({}, count, **many)
    eight = {"precision": "bf16"}
    assert error({"dp": 8}, 8, **eight) < 0.9 * error({"dp": 8}, 8, reduce_dtype="bfloat16", **eight)


def test_a_model_in_bfloat16_keeps_its_dtype() -> None:
    """Sums of gradients in float32; what an optimizer sees has the parameter's dtype."""
    program = _compile("mlp", {"dp": 2}, torch.bfloat16, microbatches=2, reduce_dtype="float32", zero=1)
    program.step(_batch("mlp", torch.bfloat16))
    assert {(p.dtype, p.grad.dtype) for p in program.parameters()} == {(torch.bfloat16, torch.bfloat16)}  # type: ignore[union-attr]
    state = program._primary().program.state.values()
    assert {(spec.summed, spec.reduced) for spec in state} == {(torch.float32, torch.float32)}


@pytest.mark.slow
def test_every_reduction_shows_its_dtype() -> None:
    def sums(**options: Any) -> set[torch.dtype]:
        graph = _compile("mlp", {"tp": 2}, **options)._primary().program.source.graph
        wide = [
            n for n in graph.nodes if n.target in (all_reduce, all_reduce_, reduce_scatter) and value(n).shape[-1] == 16
        ]
        found = {value(n).dtype for n in wide}  # but for two numbers per row of the loss
        assert found
        return found

    assert sums() == {torch.float32}
    assert sums(precision="bf16") == {torch.bfloat16}
    assert sums(precision="bf16", sum_dtype="float32") == {torch.float32}
    program = _compile("mlp", {"dp": 2, "tp": 2}, precision="bf16", zero=2)._primary().program
    sites = [site for site in program.sites if site.startswith("reduce_scatter[dp]")]
    assert sites and all(" float32" in site for site in sites)
    sums = ("all_reduce[tp] bfloat16", "all_reduce_[tp] bfloat16", "reduce_scatter[tp] bfloat16")
    assert any(site.startswith(sums) for site in program.sites)
    assert any(site.startswith("gather_early[dp] bfloat16") for site in program.sites)


class Everything(nn.Module):
    """Operators of both lists, positions that bfloat16 cannot tell apart, and a scale that is read in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)
        self.log_scale = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.sin(torch.arange(1000, 1016, dtype=torch.float32))
        x = x + self.down(F.gelu(self.up(self.norm(x)))) * self.log_scale.exp()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x.float() - 1).square().mean()


def _everything(**options: Any) -> quintnet.CompiledProgram:
    torch.manual_seed(0)
    return quintnet.compile(Everything(), Mesh(dp=2), (torch.randn(8, 16),), precision="bf16", **options)


def test_operators_compute_in_the_dtype_of_their_list() -> None:
    program = _everything()._primary().program
    graph = program.source.local.staged.sharded.program.graph
    seen: dict[str, set[torch.dtype]] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            read = {value(n).dtype for n in node.all_input_nodes if value(n).is_floating_point()}
            seen.setdefault(getattr(node.target, "_opname", ""), set()).update(read)
            assert len(read) < 2
    for name, read in seen.items():
        bits = OPERATORS[name].autocast if name in OPERATORS else None
        assert bits is None or read <= {{16: torch.bfloat16, 32: torch.float32}[bits]}, name
    assert seen["linear"] == seen["layer_norm"] == seen["gelu"] == {torch.bfloat16}
    assert seen["exp"] == seen["pow"] == seen["sin"] == seen["sum"] == {torch.float32}
    assert {spec.name: spec.read for spec in program.state.values() if spec.name == "log_scale"} == {
        "log_scale": torch.float32
    }
    assert {spec.dtype for spec in program.state.values() if spec.kind == "parameter"} == {torch.float32}
    assert program.results[0].dtype is torch.float32
    once = program.stages[0].once.module.graph.nodes
    casts = [n for n in once if n.name.startswith("_to_copy") and value(n).dtype is torch.bfloat16]
    assert len(casts) == 8  # six parameters, once a step; the batch and the sines


@pytest.mark.parametrize("norm", [nn.LayerNorm(4096), nn.RMSNorm(4096), nn.GroupNorm(4, 64)], ids=str)
def test_kernels_of_norms_keep_statistics_in_float32(norm: nn.Module) -> None:
    """Else they would belong to the other list: values far from 0 lose everything in bfloat16."""
    torch.manual_seed(0)
    shape = (8, 64, 256) if isinstance(norm, nn.GroupNorm) else (8, 4096)
    x = (torch.randn(shape) + 30).bfloat16()
    with torch.no_grad():
        expected = norm(x.float())
        found = norm.bfloat16()(x).float()
    assert float((found - expected).abs().max() / expected.abs().max()) < 2**-8


class Tokens(nn.Module):
    """A lookup that a hand-written norm reads in float32 and the residual stream in 16 bits, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(8, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x + self.down(F.gelu(self.up(y)))) * self.gain


@pytest.mark.slow
def test_every_gather_of_16_bits_is_in_16_bits() -> None:
    ids, labels = torch.randint(8, (8, 4)), torch.randn(8, 4, 16)
    program = quintnet.compile(Tokens(), Mesh(dp=2), (ids, labels), loss_fn=F.mse_loss, zero=3, precision="bf16")
    assert program.verify().ok
    sites = program._primary().program.sites
    gathers = [site for site in sites if "gather" in site]
    assert gathers and all(" bfloat16" in site for site in gathers)
    scatters = [site for site in sites if "scatter" in site]
    assert scatters and all(" float32" in site for site in scatters)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({}, {}),
        ({"dp": 2}, {"zero": 3, "microbatches": 2}),
        ({"tp": 2}, {"plan": {"parameters": {"weight": {"tp": "S(0)"}}}}),
    ],
    ids=str,
)
def test_gradients_of_tables_are_summed_in_float32(axes: dict[str, int], options: dict[str, Any]) -> None:
    """As if rows were cast behind the lookup. In bfloat16, 256 + 1 is 256."""
    torch.manual_seed(0)
    table, ids = nn.Embedding(8, 16), torch.randint(1, 8, (8, 512))
    ids[:, :300] = 3
    slope = torch.randn(8, 512, 16)

    def loss(rows: Tensor, slope: Tensor) -> Tensor:
        return (rows.relu() * slope).float().sum()

    whole = table.weight.detach().clone().requires_grad_()
    loss(F.embedding(ids, whole).bfloat16(), slope.bfloat16()).backward()  # type: ignore[no-untyped-call]
    program = quintnet.compile(table, Mesh(**axes), (ids, slope), loss_fn=loss, precision="bf16", **options)
    program.step((ids, slope))
    (found,) = (p.grad.full_tensor() for p in program.parameters())  # type: ignore[union-attr]
    assert whole.grad is not None and found.dtype is torch.float32
    error = float((found - whole.grad).abs().max() / whole.grad.abs().max())
    assert error == 0 if not axes else error < 1e-6  # ranks add up in another order
    narrow = whole.detach().bfloat16().requires_grad_()
    loss(F.embedding(ids, narrow), slope.bfloat16()).backward()  # type: ignore[no-untyped-call]
    assert narrow.grad is not None  # what torch makes of a table of 16 bits on a CPU
    assert float((narrow.grad - whole.grad).abs().max() / whole.grad.abs().max()) > 1e-3


class OwnCast(nn.Module):
    """A parameter in float32 that the model reads in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight.bfloat16()).float()


def test_a_cast_of_the_models_own_is_before_the_gather() -> None:
    torch.manual_seed(0)
    model, batch = OwnCast(), (torch.randn(8, 16), torch.randn(8, 16))
    weight = model.weight.detach().clone().requires_grad_()
    F.mse_loss(F.linear(batch[0].bfloat16(), weight.bfloat16()).float(), batch[1]).backward()  # type: ignore[no-untyped-call]
    program = quintnet.compile(model, Mesh(dp=2), batch, loss_fn=F.mse_loss, zero=3)
    program.step(batch)
    (found,) = (p.grad.full_tensor() for p in program.parameters())  # type: ignore[union-attr]
    assert weight.grad is not None and found.dtype is torch.float32
    assert float((found - weight.grad).norm() / weight.grad.norm()) < 2**-8
    sites = program._primary().program.sites
    assert [site.split()[1] for site in sites if site.startswith(("all_gather", "start_all_gather"))] == ["bfloat16"]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(CompileError) as found:
        _compile("mlp", {"dp": 2}, torch.bfloat16, precision="bf16")
    assert found.value.code == "QN215" and "this model's are bfloat16" in found.value.message
    assert _compile("mlp", {"dp": 2}, precision="bf16").plan.precision == "bf16"  # its fix: in float32
    with pytest.raises(CompileError) as found:
        _compile("mlp", {"dp": 2}, precision="fp4")
    assert found.value.code == "QN207"


class RowThenCast(nn.Module):
    """A product in float32 whose result is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(x))).to(torch.bfloat16) * 3).float().square().mean()


def test_a_partial_sum_is_never_rounded() -> None:
    """By its own rule a cast that rounds takes no partial sum. A user's rule that says otherwise is caught."""
    wrong = quintnet.rule(aten._to_copy.default, "... -> ...", linear=[[0]])
    plan = {"parameters": {"up.weight": {"tp": "S(0)"}, "down.weight": {"tp": "S(1)"}}}
    batch = (torch.randn(8, 16),)
    with pytest.raises(CompileError) as found:
        quintnet.compile(RowThenCast(), Mesh(tp=2), batch, plan=plan, sequence_parallel=False, rules=[wrong])
    assert found.value.code == "QN214" and "RowThenCast" not in found.value.message
    assert "from float32 (4 bytes) to bfloat16 (2 bytes)" in found.value.message
    assert "rules=" in found.value.fix
    assert quintnet.compile(RowThenCast(), Mesh(tp=2), batch, plan=plan, sequence_parallel=False).plan  # its fix


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("axes", "options", "expected"),
    [
        # of P float32 parameters: 4 + 2 bytes in parameters, 4 in gradients
        ({"dp": 2}, {}, (6, 4)),
        ({"dp": 2}, {"zero": 1}, (2 + 2, 4)),
        ({"dp": 2}, {"zero": 2}, (2 + 2, 2)),
        ({"dp": 2}, {"zero": 3}, (2 + 1, 2)),
    ],
    ids=str,
)
def test_predicted_memory_is_by_dtype(axes: dict[str, int], options: dict[str, Any], expected: tuple[int, int]) -> None:
    """The planner's bytes, and those of the compiled program."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    batch = (torch.randn(8, 64), torch.randint(64, (8,)))
    program = quintnet.compile(model, Mesh(**axes), batch, loss_fn=F.cross_entropy, precision="bf16", **options)
    count = 4 * 64 * 64
    (estimate,) = quintnet.estimate(
        model, quintnet.Cluster("h100", nodes=1), batch, program.plan, loss_fn=F.cross_entropy
    ).memory
    assert (estimate.parameters, estimate.settled) == tuple(n * count for n in expected)
    assert estimate.optimizer == 8 * count // (2 if options else 1)
    found = rehearse(program._primary().program)[0]
    assert found.gradients == estimate.settled
    assert found.parameters == 4 * count // (2 if options else 1)  # copies are values of the step
    if not options:
        assert found.points[0].held >= 2 * count


def _steps(name: str, cases: list[tuple[dict[str, int], dict[str, Any]]]) -> list[tuple[list[float], Tensors]]:
    torch.set_num_threads(1)
    found = []
    for axes, options in cases:
        program, batch = _compile(name, axes, precision="bf16", **options), _batch(name, torch.float32)
        optimizer, losses = torch.optim.AdamW(program.parameters(), lr=1e-3), []
        for _ in range(2):
            losses.append(float(program.step(batch)))
            assert {p.grad.to_local().dtype for p in program.parameters()} == {torch.float32}  # type: ignore[union-attr]
            program.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append((losses, {n: p.detach().full_tensor() for n, p in program.named_parameters()}))  # type: ignore[attr-defined]
    return found


def _in_processes(cases: list[tuple[dict[str, int], dict[str, Any]]]) -> Any:
    return _steps("mlp", cases), _overflowing({"pp": 2}, {"microbatches": 2})


@pytest.mark.slow
def test_processes() -> None:
    """gloo gathers and adds up bfloat16, too: two terms have one sum, in whatever order. And a step that overflows on
    one stage is skipped on both."""
    cases = [({"dp": 2}, {"microbatches": 2, "zero": 2}), ({"tp": 2}, {}), ({"dp": 2}, {"reduce_dtype": "bfloat16"})]
    expected, (scales, skipped, weights) = _in_processes(cases)
    for found, scaled in quintnet.launch(_in_processes, 2, (cases,), timeout=240):
        for (losses, wanted), (here, mine) in zip(expected, found, strict=True):
            assert here == pytest.approx(losses, rel=1e-5)
            assert max(float((mine[n] - x).abs().max()) for n, x in wanted.items()) < 1e-5
        assert scaled[:2] == (scales, skipped)
        assert all(float((x - weights[n]).abs().max()) < 1e-5 for n, x in scaled[2].items())


def _overflowing(axes: dict[str, int], options: dict[str, Any]) -> tuple[list[float], list[bool], Tensors]:
    """The scale after each step, whether it was skipped, and the weights in the end."""
    torch.set_num_threads(1)
    program = _compile("mlp", axes, precision="fp16", loss_scale=2.0**22, **options)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-3)
    scales, skipped, before = [], [], [p.detach().full_tensor().clone() for p in program.parameters()]  # type: ignore[attr-defined]
    for _ in range(12):
        program.step(_batch("mlp", torch.float32))
        scales.append(program.loss_scale)
        skipped.append(all(p.grad is None for p in program.parameters()))
        assert skipped[-1] or all(p.grad is not None for p in program.parameters())
        norm = program.clip_grad_norm(1e3)
        assert bool(torch.isfinite(norm))
        optimizer.step()
        optimizer.zero_grad()
        now = [p.detach().full_tensor() for p in program.parameters()]  # type: ignore[attr-defined]
        if all(skipped):
            assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    return scales, skipped, {n: p.detach().full_tensor() for n, p in program.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("axes", "options"), [({"dp": 2}, {"microbatches": 2}), ({"pp": 2, "tp": 2}, {})], ids=str)
def test_scaled_losses(axes: dict[str, int], options: dict[str, Any]) -> None:
    """Steps that overflow are skipped, and halve the scale; the first that does not trains on."""
    scales, skipped, weights = _overflowing(axes, options)
    bad = skipped.index(False)
    assert 2 <= bad <= 9 and not any(skipped[bad:])
    assert scales == [2.0 ** max(22 - n, 22 - bad) for n in range(1, 13)]
    exact, own = (_scaled_weights(12 - bad, dtype, **more) for dtype, more in (
        (torch.float64, {}), (torch.float32, {"precision": "fp16"})))  # fmt: skip
    assert _distance(weights, exact) < 2 * _distance(own, exact) < 0.1 * _distance(build("mlp").state_dict(), exact)


def _scaled_weights(steps: int, dtype: torch.dtype, **options: Any) -> Tensors:
    program = _compile("mlp", {}, dtype, **options)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-3)
    for _ in range(steps):
        program.step(_batch("mlp", dtype))
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().full_tensor() for n, p in program.named_parameters()}  # type: ignore[attr-defined]


def test_the_scale_grows_after_good_steps() -> None:
    scaler = LossScale(8.0, patience=3)
    found = []
    for finite in (True, True, True, True, False, True, True, True):
        scaler.update(Run(train=True, scale=scaler.scale), finite)
        found.append((scaler.scale, scaler.skipped))
    assert [scale for scale, _ in found] == [8, 8, 16, 16, 8, 8, 8, 16]
    assert [skipped for _, skipped in found] == [False] * 4 + [True] + [False] * 3


def test_what_no_scale_mends_is_an_error() -> None:
    """Where the factor is 1, values that are not finite have another reason, which is named."""
    program = _compile("mlp", {"dp": 2}, precision="fp16", loss_scale=1.0)
    x, labels = _batch("mlp", torch.float32)
    with pytest.raises(quintnet.RunError) as found:
        program.step((x * 1e30, labels))
    assert found.value.code == "QN501"
