"""State in slices over data ranks (ZeRO): the unsplit model's values, in the memory and traffic of the closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import CompileError, Mesh
from quintnet_compiler.simulation.rehearsal import rehearse

from .beside_plain import sent_in_a_step
from .models import CASES, build

pytestmark = pytest.mark.usefixtures("shared_captures")

torch.set_num_threads(1)


def _compile(name: str, axes: dict[str, int], **options: Any) -> quintnet.CompiledProgram:
    case = CASES[name]
    return quintnet.compile(build(name), Mesh(**axes), case.batch(8), loss_fn=case.loss_fn, **options)


FAST: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("cnn", {"dp": 4}, {"zero": 3}),
    ("vit", {"tp": 2, "dp": 2}, {"zero": 1, "recompute": "full", "sequence_parallel": False}),
    ("gpt", {"dp": 2, "pp": 2}, {"zero": 1, "microbatches": 4, "schedule": "zb-v", "virtual_stages": 2}),
    ("gpt", {"pp": 2, "dp": 2}, {"zero": 3, "microbatches": 2, "schedule": "gpipe", "recompute": "full"}),
    ("gpt", {"cp": 2, "dp": 2}, {"zero": 1, "microbatches": 2, "zero_axes": ("dp", "cp")}),
    ("mixture", {"dp": 2, "ep": 2}, {"zero": 1, "microbatches": 2}),
    ("mixture", {"dp": 2, "ep": 2}, {"zero": 2, "zero_axes": ("dp", "ep")}),
    ("mixture", {"dp": 2}, {"zero": 3, "microbatches": 2, "experts": ("dp",)}),
    # hybrid: slices within groups of ep, copies of them over dp
    ("mlp", {"dp": 2, "ep": 2}, {"zero": 1, "microbatches": 2, "zero_axes": ("ep",)}),
]
MORE: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("gpt", {"dp": 2}, {"microbatches": 2}),
    ("gpt", {"dp": 2, "pp": 2}, {"microbatches": 4}),
    ("gpt", {"dp": 2, "tp": 2}, {"microbatches": 2}),
    ("gpt", {"dp": 2, "cp": 2}, {"microbatches": 2, "context": "ring"}),
    ("hf_llama_double", {"dp": 2, "tp": 2, "pp": 2}, {"microbatches": 2}),
    *((name, axes, {k: x for k, x in o.items() if k not in ("zero", "recompute")}) for name, axes, o in FAST),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "axes", "options"), FAST, ids=str)
def test_state_in_slices_equals_the_unsplit_model(name: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    """Loss, outputs, every gradient, and the parameters after two steps; and the complete plan gives it all again."""
    program = _compile(name, axes, **options)
    report = program.verify()
    assert report.ok, report
    primary = program._primary().program
    gathered = primary.source.local.staged.sharded.gathered
    trained = [node for node, leaf in primary.source.local.staged.sharded.program.leaves.items() if leaf.trainable]
    assert len(gathered) > len(trained) / 2
    assert _compile(name, axes, plan=program.plan)._primary().program.digest == primary.digest


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("name", "axes", "options"), MORE, ids=str)
def test_all_stages(name: str, axes: dict[str, int], options: dict[str, Any], zero: int, recompute: str) -> None:
    report = _compile(name, axes, zero=zero, recompute=recompute, **options).verify()
    assert report.ok, report


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero", [0, 1])
def test_slices_that_a_plan_asks_for(zero: int) -> None:
    """Any dim, in parts, beside others that stay whole."""
    fixed = {"*qkv.weight": {"dp": "S(0,3)"}, "*up.weight": {"dp": "S(1)"}, "*down.weight": {"dp": "R"}}
    program = _compile("gpt", {"dp": 2}, microbatches=2, zero=zero, plan={"parameters": fixed})
    assert program.verify(steps=1).ok
    state = program._primary().program.state
    kinds = [str(state[f"blocks.1.{n}.weight"].sharding[0]) for n in ("qkv", "up", "down", "proj")]
    assert kinds == ["S(0,3)", "S(1)", "R", "S(0)" if zero else "R"]


def test_one_dim_in_slices_of_two_axes() -> None:
    """Gathered in every microbatch it is right, if slow; a sum of whole gradients cannot be scattered that way."""
    both = {"parameters": {"*ups.*.weight": {"dp": "S(0)", "tp": "S(0)"}}}
    assert _compile("mlp", {"dp": 2, "tp": 2}, microbatches=2, zero=2, plan=both).verify(steps=1).ok
    with pytest.raises(CompileError, match="one dim, with zero=1"):
        _compile("mlp", {"dp": 2, "tp": 2}, zero=1, plan=both)


@pytest.mark.parametrize(
    ("axes", "options", "code"),
    [
        ({"tp": 2}, {"zero": 3}, "QN201"),
        ({"dp": 2}, {"zero": 3, "zero_axes": ()}, "QN201"),
        ({"dp": 2}, {"zero": 4}, "QN207"),
        ({"dp": 2}, {"zero": 1, "zero_axes": ("tp",)}, "QN207"),
        ({"dp": 4}, {"plan": {"parameters": {"ln_f.weight": {"dp": "S(1)"}}}}, "QN203"),
        ({"dp": 8}, {"plan": {"parameters": {"ln_f.weight": {"dp": "S(0,8)"}}}}, "QN203"),
    ],
    ids=str,
)
def test_nonsense_is_refused(axes: dict[str, int], options: dict[str, Any], code: str) -> None:
    with pytest.raises(CompileError) as found:
        _compile("gpt", axes, **options)
    assert found.value.code == code and found.value.fix


class Square(nn.Module):
    """Products alone, whose backward reads every parameter (but the first: nobody asks for its input's gradient)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return (x * x).mean()


def _square(zero: int, **options: Any) -> quintnet.CompiledProgram:
    torch.manual_seed(0)
    model = Square().double()
    return quintnet.compile(model, Mesh(dp=4), (torch.randn(16, 16, dtype=torch.float64),), zero=zero, **options)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_on_the_wire(zero: int, microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ring collectives send per rank, in units of all parameters x 3/4: 2 with and without ZeRO 1."""
    program = _square(zero, microbatches=microbatches)
    sent = sent_in_a_step(program, (torch.randn(16, 16, dtype=torch.float64),), monkeypatch)
    whole, matrix = 4 * 16 * 16 * 8, 16 * 16 * 8
    m = microbatches
    assert (
        sent
        == {
            0: {"sum": whole},
            1: {"gather": whole, "scatter": whole},
            2: {"gather": whole, "scatter": m * whole},
            3: {"gather": m * (2 * whole - matrix), "scatter": m * whole},  # the backward needs no first matrix
        }[zero]
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_predicted_memory_is_that_of_the_closed_forms(zero: int) -> None:
    """And after every action ranks hold what they hold where nothing is gathered."""
    whole = 4 * 16 * 16 * 8
    plain, found = (rehearse(_square(z, microbatches=2)._primary().program)[0] for z in (0, zero))
    assert (plain.parameters, plain.gradients) == (whole, whole)
    assert found.parameters == (whole // 4 if zero == 3 else whole)
    assert found.gradients == (whole // 4 if zero >= 2 else whole)
    assert [point.held for point in found.points] == [point.held for point in plain.points]


def test_gathered_parameters_die_after_their_last_use() -> None:
    """A rank has one matrix whole at a time, and the gradient of one (where communication runs beside computing, one
    more of each is on its way); kept, what the backward reads comes on top."""
    plain = rehearse(_square(0, microbatches=2)._primary().program)[0]
    alone = rehearse(_square(3, microbatches=2, overlap=False)._primary().program)[0]
    again = rehearse(_square(3, microbatches=2)._primary().program)[0]
    kept = rehearse(_square(3, microbatches=2, reshard_after_forward=False)._primary().program)[0]
    matrix = 16 * 16 * 8
    assert max(point.peak for point in alone.points) <= max(point.peak for point in plain.points) + 2 * matrix
    assert max(point.peak for point in again.points) <= max(point.peak for point in plain.points) + 4 * matrix
    assert kept.points[0].held - again.points[0].held == 3 * matrix


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
}


def _memory(tensors: list[Tensor]) -> int:
    """Bytes, each piece of memory once."""
    pieces = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in pieces if x.dim()}.values())


def _trainings(axes: dict[str, int], zeros: tuple[int, ...], folder: str) -> list[Any]:
    """For each stage and optimizer: the loss and the weights after two clipped steps, and the bytes of parameters,
    gradients and optimizer state. All start from the same weights, which travel through a folder."""
    torch.set_num_threads(1)
    found, batch = [], CASES["mlp"].batch(8)
    for zero in zeros:
        program = _compile("mlp", axes, zero=zero, microbatches=2)
        parameters = list(program.parameters())
        for optimizer in OPTIMIZERS:
            program.load_pretrained(folder)
            made = OPTIMIZERS[optimizer](parameters)
            for _ in range(2):
                program.zero_grad()
                program.step(batch)
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
                made.step()
            sizes = (
                _memory(parameters),
                _memory([p.grad for p in parameters]),  # type: ignore[misc]
                _memory([x for state in made.state.values() for x in state.values()]),
            )
            weights = {n: p.detach().full_tensor().clone() for n, p in program.named_parameters()}  # type: ignore[attr-defined]
            found.append((float(program.evaluate(batch)), weights, sizes))
    return found


@pytest.mark.slow
def test_processes_have_the_memory_of_the_closed_forms(tmp_path: Path) -> None:
    """Rajbhandari et al. 2019: with P bytes of parameters and s optimizer moments on N ranks, P + P + s P without
    ZeRO, P + P + s P / N, P + P / N + s P / N, and (P + P + s P) / N. And every optimizer gives the unsplit model's
    weights."""
    whole = sum(p.nbytes for p in build("mlp").parameters())
    folder = str(tmp_path / "start")
    _compile("mlp", {"dp": 2}, zero=3).save_pretrained(folder)
    expected = _trainings({}, (0,), folder)
    for found in quintnet.launch(_trainings, 2, ({"dp": 2}, (0, 1, 2, 3), folder), timeout=240):
        for number, (loss, weights, (parameters, gradients, moments)) in enumerate(found):
            zero, optimizer = divmod(number, len(OPTIMIZERS))
            each = 1 if list(OPTIMIZERS)[optimizer] == "sgd" else 2
            assert loss == pytest.approx(expected[optimizer][0], rel=1e-11)
            for name, x in expected[optimizer][1].items():
                assert float((weights[name] - x).abs().max()) < 1e-10, (zero, optimizer, name)
            assert parameters == (whole // 2 if zero == 3 else whole)
            assert gradients == (whole // 2 if zero >= 2 else whole)
            assert moments == each * (whole // 2 if zero else whole)
        assert len(found) == 4 * len(OPTIMIZERS)


@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_what_a_step_begins_with_travels_together(precision: str) -> None:
    """Parameters that are gathered once a step: in as many messages as the plan's size of buckets says."""
    torch.manual_seed(0)
    model, batch = Square(), (torch.randn(8, 16),)
    each = 16 * 16 * (4 if precision == "model" else 2) / 2**20
    for mib, messages in ((25.0, [4]), (2 * each, [2, 2]), (each, [1, 1, 1, 1])):
        program = quintnet.compile(model, Mesh(dp=2), batch, zero=1, precision=precision, bucket_mib=mib)  # type: ignore[arg-type]
        code = program.ranks[0].stages[0].once.module.code
        found = [line.split("], 'dp'")[0].count(",") + 1 for line in code.splitlines() if "gather_early(" in line]
        assert found == messages and "gather_state(" not in code
        assert program.verify(steps=1).ok


def test_slices_of_a_block_travel_together() -> None:
    """Two messages of a block's parameters and one of its gradients, whatever it consists of; and as many for the table
    of tokens and that of positions, and for what follows the blocks."""
    program = _compile("gpt", {"dp": 2}, zero=3, microbatches=2, recompute="full")
    stage = program.ranks[0].stages[0]
    forward, backward = stage.forward.module.code, stage.backward.module.code
    blocks = sum(name.endswith("ln1.weight") for name, _ in program.named_parameters())
    assert forward.count("gather_together(") == blocks + 2 and "all_gather(" not in forward
    assert backward.count("scatter_together(") == blocks + 2
    assert backward.count("gather_together(") == blocks + 1  # of what comes before them, nothing is read again
