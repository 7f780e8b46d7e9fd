"""State in slices over data ranks (ZeRO): the unsplit model's values, in the memory and traffic of the closed forms."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import CompileError, Mesh
from quintnet_compiler.runtime.local import LocalTransport
from quintnet_compiler.simulation.rehearsal import rehearse

from .models import CASES, build

torch.set_num_threads(1)


def _compile(name: str, axes: dict[str, int], **options: Any) -> quintnet.CompiledProgram:
    case = CASES[name]
    return quintnet.compile(build(name), Mesh(**axes), case.batch(8), loss_fn=case.loss_fn, **options)


LAYOUTS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("gpt", {"dp": 2}, {"microbatches": 2}),
    ("cnn", {"dp": 4}, {}),
    ("gpt", {"dp": 2, "tp": 2}, {"microbatches": 2}),
    ("vit", {"tp": 2, "dp": 2}, {"sequence_parallel": False}),
    ("gpt", {"dp": 2, "pp": 2}, {"microbatches": 4}),
    ("gpt", {"pp": 2, "dp": 2}, {"microbatches": 2, "schedule": "gpipe"}),
    ("gpt", {"dp": 2, "cp": 2}, {"microbatches": 2, "context": "ring"}),
    ("gpt", {"cp": 2, "dp": 2}, {"microbatches": 2, "zero_axes": ("dp", "cp")}),
    ("mixture", {"dp": 2, "ep": 2}, {"microbatches": 2}),
    ("mixture", {"dp": 2, "ep": 2}, {"zero_axes": ("dp", "ep")}),
    ("mixture", {"dp": 2}, {"microbatches": 2, "experts": ("dp",)}),
    # hybrid: slices within groups of ep, copies of them over dp
    ("mlp", {"dp": 2, "ep": 2}, {"microbatches": 2, "zero_axes": ("ep",)}),
    ("hf_llama_double", {"dp": 2, "tp": 2, "pp": 2}, {"microbatches": 2}),
]
SLOW = [(zero, recompute) for zero in (1, 2, 3) for recompute in ("none", "full")]


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_state_in_slices_equals_the_unsplit_model(number: int) -> None:
    """Each layout with one of the six; the slow test has the others."""
    _equal(number, *SLOW[(5 * number + 4) % 6])


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "recompute"), SLOW)
@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_all_stages_and_recompute(number: int, zero: int, recompute: str) -> None:
    _equal(number, zero, recompute)


def _equal(number: int, zero: int, recompute: str) -> None:
    name, axes, options = LAYOUTS[number]
    program = _compile(name, axes, zero=zero, recompute=recompute, **options)
    report = program.verify()
    assert report.ok, report


@pytest.mark.parametrize(("number", "zero"), [(8, 1), (9, 2), (10, 3), (11, 1)])
def test_a_complete_plan_gives_the_same_program(number: int, zero: int) -> None:
    name, axes, options = LAYOUTS[number]
    program = _compile(name, axes, zero=zero, **options)
    again = _compile(name, axes, plan=program.plan)
    assert again._leader().program.digest == program._leader().program.digest
    sliced = [s for s in program._leader().program.state.values() if s.kind == "parameter" and s.resident != s.sharding]
    assert len(sliced) > 1 or zero == 3


def test_slices_that_a_plan_asks_for() -> None:
    """Any dim, in parts, beside others that stay whole; and a dim that tp slices too, where that can be."""
    fixed = {"*qkv.weight": {"dp": "S(0,3)"}, "*up.weight": {"dp": "S(1)"}, "*down.weight": {"dp": "R"}}
    for zero in (0, 1):
        program = _compile("gpt", {"dp": 2}, microbatches=2, zero=zero, plan={"parameters": fixed})
        assert program.verify().ok
        state = program._leader().program.state
        assert str(state["blocks.1.qkv.weight"].sharding[0]) == "S(0,3)"
        assert [state[f"blocks.1.{n}.weight"].sharding == state["wte.weight"].sharding for n in ("up", "down")] == [
            False,
            zero == 0,
        ]
    both = {"parameters": {"*up.weight": {"dp": "S(0)", "tp": "S(0)"}}}
    assert _compile("gpt", {"dp": 2, "tp": 2}, microbatches=2, zero=2, plan=both).verify(steps=1).ok
    with pytest.raises(CompileError, match="one dim, with zero=1"):
        _compile("gpt", {"dp": 2, "tp": 2}, zero=1, plan=both)


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
    sent: Counter[str] = Counter()
    meet = LocalTransport._meet

    def counted(self: LocalTransport, kind: str, x: Tensor, ranks: tuple[int, ...], *rest: Any, **more: Any) -> Tensor:
        if x.dim() and self.rank == 0 and "loss" not in rest[0]:
            sent[kind] += x.nbytes * (len(ranks) if kind == "gather" else 1)
        return meet(self, kind, x, ranks, *rest, **more)

    program = _square(zero, microbatches=microbatches)
    monkeypatch.setattr(LocalTransport, "_meet", counted)
    program.step((torch.randn(16, 16, dtype=torch.float64),))
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


def test_gathered_parameters_die_after_their_last_use() -> None:
    """After every action ranks hold what they hold where nothing is gathered; kept, the gathered come on top."""
    plain = rehearse(_square(0, microbatches=2)._leader().program)[0]
    again = rehearse(_square(3, microbatches=2)._leader().program)[0]
    kept = rehearse(_square(3, microbatches=2, regather=False)._leader().program)[0]
    assert [held for held, _ in again.points] == [held for held, _ in plain.points]
    matrix = 16 * 16 * 8
    # one matrix is whole at a time, and the gradient of one
    assert max(peak for _, peak in again.points) <= max(peak for _, peak in plain.points) + 2 * matrix
    assert kept.points[0][0] - again.points[0][0] == 3 * matrix


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
}


def _memory(tensors: list[Tensor]) -> int:
    """Bytes, each piece of memory once."""
    pieces = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in pieces if x.dim()}.values())


def _train(name: str, axes: dict[str, int], zero: int, optimizer: str, options: dict[str, Any]):  # type: ignore[no-untyped-def]
    """Weights after two clipped steps, and the bytes of parameters, gradients and optimizer state."""
    torch.set_num_threads(1)
    program = _compile(name, axes, zero=zero, **options)
    made = OPTIMIZERS[optimizer](list(program.parameters()))
    for _ in range(2):
        program.step(CASES[name].batch(8))
        torch.nn.utils.clip_grad_norm_(program.parameters(), 0.5)
        made.step()
        program.zero_grad()
    loss = float(program.step(CASES[name].batch(8)))
    parameters = list(program.parameters())
    bytes_ = (
        _memory(parameters),
        _memory([p.grad for p in parameters]),  # type: ignore[misc]
        _memory([x for state in made.state.values() for x in state.values()]),
    )
    return loss, {n: p.full_tensor() for n, p in program.named_parameters()}, bytes_  # type: ignore[attr-defined]


def _trainings() -> list[Any]:
    found = []
    for zero in (0, 1, 2, 3):
        for optimizer in OPTIMIZERS:
            found.append(_train("mlp", {"dp": 2}, zero, optimizer, {"microbatches": 2}))
    return found


def test_processes_have_the_memory_of_the_closed_forms() -> None:
    """Rajbhandari et al. 2019: with P bytes of parameters and s optimizer moments on N ranks, P + P + s P without
    ZeRO, P + P + s P / N, P + P / N + s P / N, and (P + P + s P) / N. And every optimizer gives the unsplit model's
    weights."""
    whole = sum(p.nbytes for p in build("mlp").parameters())
    expected = {name: _train("mlp", {}, 0, name, {}) for name in OPTIMIZERS}
    for found in quintnet.launch(_trainings, 2, timeout=240):
        runs = iter(found)
        for zero in (0, 1, 2, 3):
            for optimizer in OPTIMIZERS:
                loss, weights, (parameters, gradients, moments) = next(runs)
                each = 1 if optimizer == "sgd" else 2
                assert loss == pytest.approx(expected[optimizer][0], rel=1e-11)
                for name, x in expected[optimizer][1].items():
                    assert float((weights[name] - x).detach().abs().max()) < 1e-10, (zero, optimizer, name)
                assert parameters == (whole // 2 if zero == 3 else whole)
                assert gradients == (whole // 2 if zero >= 2 else whole)
                assert moments == each * (whole // 2 if zero else whole)
