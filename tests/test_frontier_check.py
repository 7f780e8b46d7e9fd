"""The comparison of what was traced with the module itself: it finds what tracing lost, and nothing else."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import quintnet
import quintnet_compiler.capture.capture as tracing
import quintnet_compiler.driver.variants as programs
import quintnet_compiler.equivalence.module_check as module_check
from quintnet import CompileError, Mesh
from quintnet_compiler.checks.derivatives import proven
from quintnet_compiler.equivalence.module_check import ModuleCheck
from quintnet_compiler.equivalence.module_step import Owner
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.autodiff.vector_jacobian import _BY_HAND, VectorJacobian
from tests import zoo

BATCH = (torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4)


class Rounded(torch.autograd.Function):
    """A derivative of its own: straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Odd(nn.Module):
    """What it computes beside two layers depends on ``fault``; without one it is plain."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(8))
        self.fault, self.count = fault, 0
        self.beside = [nn.Linear(8, 8)]  # no part of the module

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        fault = self.fault
        if fault == "value":
            h = h * 1.01
        if fault == "hook" and h.requires_grad:
            h.register_hook(lambda gradient: gradient * 3)
        if fault == "function":
            h = h + Rounded.apply(h * 3)
        if fault == "mode":
            h = self.drop(h)
        if fault == "buffer":
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            h = h - self.mean
        if fault == "in place":
            self.mean += 0.1 * h.detach().mean(0)
        if fault == "parameter":
            with torch.no_grad():
                self.b.weight.clamp_(-0.1, 0.1)
        if fault == "python":
            h = h * (1 + random.random())
        if fault == "numpy":
            h = h * (1 + float(numpy.random.rand()))
        if fault == "attribute":
            self.count += 1
            h = h * self.count
        if fault == "closure":
            h = h + self.beside[0](h)
        if fault == "detached":
            h = h.detach() + h * 0
        return self.b(h)


FAULTS = {
    "value": "made by Tensor.mul",
    "hook": "the result of tanh",
    "function": "gradient a.weight",
    "mode": "nn.functional.dropout",
    "buffer": "forward changes mean",
    "in place": "forward changes mean",
    "parameter": "forward changes b.weight",
    "python": "Python's random",
    "numpy": "numpy.random",
    "attribute": "forward sets count",
    "closure": "is no parameter of the program",
    "detached": "gradient a.weight",
}


def _marked(*faults: str, fast: tuple[str, ...]) -> list[Any]:
    return [pytest.param(fault, marks=[] if fault in fast else [pytest.mark.slow]) for fault in faults]


@pytest.fixture
def plain_traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is traced of an odd module is the plain one, with the same parameters: all faults of tracing at once."""
    trace_plainly(monkeypatch)
    yield


def trace_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, Odd):
            model = copy.copy(model)  # the same parts
            model.fault = ""
        return tracing.capture(model, *args, **kwargs)

    monkeypatch.setattr(programs, "capture", capture)


def compiled(model: nn.Module, **options: Any) -> quintnet.CompiledProgram:
    return quintnet.compile(model, Mesh(dp=2), BATCH, loss_fn=F.cross_entropy, **options)


def test_the_plain_module_is_equal() -> None:
    assert compiled(Odd("")).verify().ok


@pytest.mark.sample(1)
@pytest.mark.usefixtures("plain_traces")
@pytest.mark.parametrize("fault", _marked(*FAULTS, fast=("hook", "mode", "buffer", "python", "attribute", "closure")))
def test_what_tracing_loses_is_refused_by_compile(fault: str) -> None:
    with pytest.raises(CompileError) as caught:
        compiled(Odd(fault))
    assert caught.value.code == "QN111"
    assert FAULTS[fault] in str(caught.value)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("plain_traces")
@pytest.mark.parametrize("fault", _marked(*FAULTS, fast=("hook", "mode", "buffer")))
def test_without_the_check_verify_finds_it(fault: str) -> None:
    assert not compiled(Odd(fault), check="off").verify().ok


@pytest.mark.slow
@pytest.mark.usefixtures("plain_traces")
def test_a_buffer_that_forward_changes_is_found_in_any_precision() -> None:
    report = compiled(Odd("in place"), check="off", precision="bf16").verify()
    assert [one.what for one in report.comparisons if not one.ok] == ["buffer", "buffer"], str(report)


def test_a_wrong_derivative_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = VectorJacobian._linear

    def wrong(self: VectorJacobian, *args: Any, **kwargs: Any) -> Any:
        made, pullback = right(self, *args, **kwargs)

        def scaled(tangents: Any) -> Any:
            return pullback([self.builder.call(torch.ops.aten.mul.Scalar, tangents[0], 1.01)])

        return made, scaled

    monkeypatch.setitem(_BY_HAND, torch.ops.aten.linear.default, wrong)
    found = difference(Odd(""), BATCH, F.cross_entropy)
    assert found is not None and "gradient" in str(found) and "backward of aten.linear.default" in str(found)


class Noisy(nn.Module):
    """Drops values in evaluation too, and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.a(x), 0.5).view(-1, 1, 4, 4)
        return self.b(F.scaled_dot_product_attention(h, h, h, dropout_p=0.3).mean((1, 2)))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_verify_draws_the_masks_of_evaluation_too() -> None:
    report = compiled(Noisy()).verify()
    assert report.ok and "output" in {c.what for c in report.comparisons}


class Normed(nn.Module):
    """The gradient that arrives at GroupNorm is a transposition."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.GroupNorm(2, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x).view(-1, 4, 2))
        return self.b(h.transpose(1, 2))[:, 0]  # type: ignore[no-any-return]


def _reads_memory_as_it_lies() -> bool:
    """Whether the kernel of GroupNorm's derivative takes all memory for contiguous, which it does up to torch 2.13."""
    x, g, ones = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3), torch.ones(4)
    _, mean, scale = torch.ops.aten.native_group_norm(x, ones, ones, 2, 4, 9, 2, 1e-5)
    right, other = (
        torch.ops.aten.native_group_norm_backward(one, x, mean, scale, ones, 2, 4, 9, 2, [True, False, False])[0]
        for one in (g, g.contiguous(memory_format=torch.channels_last))
    )
    return not torch.allclose(right, other)


@pytest.mark.slow
@pytest.mark.skipif(not _reads_memory_as_it_lies(), reason="this version of torch reads it in the order that it says")
def test_a_kernel_that_reads_memory_in_another_order_is_found_by_each_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof of derivatives, the comparison with the module, and verify: one is on at a time."""
    right = VectorJacobian._copy

    def careless(self: VectorJacobian, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        if node.target is torch.ops.aten.contiguous.default:
            return env[node.args[0]]  # type: ignore[index]
        return right(self, node, env)

    assert compiled(Normed()).verify().ok
    monkeypatch.setattr(VectorJacobian, "_copy", careless)
    with pytest.raises(CompileError, match=r"QN209[\s\S]*the derivative of aten\.group_norm\.default is wrong"):
        compiled(Normed(), check="off")
    monkeypatch.setattr(proven, "check_numbers", lambda *_: None)
    with pytest.raises(CompileError, match=r"QN111[\s\S]*gradient a\.weight[\s\S]*group_norm"):
        compiled(Normed())
    report = compiled(Normed(), check="off").verify(float64=True)
    assert not report.ok and "group_norm" in str(report)
    assert report.culprit is not None and report.culprit.direction == "backward"


def test_nothing_of_the_users_changes() -> None:
    model = Odd("")
    model.b.bias.requires_grad_(False)
    model.a.weight.grad = torch.ones_like(model.a.weight)
    model.drop.eval()
    batch = tuple(x.clone() for x in BATCH)

    def state() -> tuple[list[Tensor], Any]:
        tensors = [*model.parameters(), *model.buffers(), model.a.weight.grad, *batch, torch.get_rng_state()]
        settings = [{k: v for k, v in vars(m).items() if not k.startswith("_")} for m in model.modules()]
        grads = [p.grad is None for p in model.parameters()]
        flags = [p.requires_grad for p in model.parameters()]
        return [x.detach().clone() for x in tensors], (
            settings, grads, flags, random.getstate(), numpy.random.get_state()[1].tolist(),
        )  # fmt: skip

    tensors, rest = state()
    owner = Owner(
        model, F.cross_entropy, {**dict(model.named_parameters()), **dict(model.named_buffers())}, "loss", True
    )
    for fault in FAULTS:
        model.fault = fault
        step = module_check.module_step(owner, batch, 0)
        assert step.outputs[0].isfinite()
    model.fault = ""
    quintnet.compile(model, Mesh(dp=1), batch, loss_fn=F.cross_entropy, check="always")
    now, others = state()
    assert all(torch.equal(a, b) for a, b in zip(tensors, now, strict=True))
    assert others == rest


def test_a_module_that_is_not_deterministic_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_plainly(monkeypatch)
    model, take = Odd(""), iter(range(2, 1000)).__next__
    model.drop.forward = lambda x: x * take()  # type: ignore[method-assign]
    model.fault = "mode"
    with pytest.raises(CompileError, match="two runs of the module"):
        compiled(model)


def test_further_programs_are_compared_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_plainly(monkeypatch)

    class Evaluated(Odd):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if self.training or not self.fault else out * 2

    first, always = (compiled(Evaluated("evaluation"), check=check) for check in ("first", "always"))
    assert first.evaluate(BATCH).isfinite()
    with pytest.raises(CompileError, match="QN111"):
        always.evaluate(BATCH)


def test_an_unknown_check_is_refused() -> None:
    with pytest.raises(CompileError, match="QN108"):
        compiled(Odd(""), check="sometimes")  # type: ignore[arg-type]


def difference(model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor] | None = None) -> CompileError | None:
    captured = tracing.capture(model, batch, loss_fn)
    owner = Owner(model, loss_fn, captured.tensors, "loss", training=True)
    return ModuleCheck(owner, captured, batch, RULES, 0, torch.device("cpu")).difference()


def deep(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1)) for _ in range(12)]
    model = nn.Sequential(*layers, nn.Linear(16, 4)).to(dtype)
    model[-1].weight = nn.Parameter(model[-1].weight.detach())
    return model


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_deep_models_are_equal_in_every_precision(dtype: torch.dtype) -> None:
    assert difference(deep(dtype), (torch.randn(8, 16, dtype=dtype), BATCH[1]), F.cross_entropy) is None


FAST = ("GPT2LMHeadModel", "LlamaForCausalLM")


def _entries() -> list[Any]:
    return [
        pytest.param(entry, id=name, marks=[] if entry.architecture in FAST else [pytest.mark.slow])
        for name, entry in sorted(zoo.ZOO.items())
    ]


@pytest.mark.slow
@pytest.mark.parametrize("entry", _entries())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hugging_face_models_give_no_false_alarm(entry: zoo.Entry, dtype: torch.dtype) -> None:
    if entry.architecture == "FNetForMaskedLM" and dtype is torch.bfloat16:
        pytest.skip("PyTorch has no Fourier transform in bfloat16")
    floats = (n for n, x in entry.batch(4).items() if isinstance(x, Tensor) and x.is_floating_point())
    batch = {**entry.batch(4), **{n: entry.batch(4)[n].to(dtype) for n in floats}}
    assert difference(entry.build().to(dtype), batch) is None


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh()) for _ in range(8))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean() * self.scale


@pytest.mark.slow
def test_blocks_of_a_model_without_values_run_once_with_drawn_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model, batch = Blocks(), (torch.empty(8, 64),)
    assert difference(model, batch) is None
    assert all(p.is_meta for p in model.parameters())
    right = tracing.capture

    def scaled(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        model.scale = 1.5
        try:
            return right(model, *args, **kwargs)
        finally:
            model.scale = 1.0

    monkeypatch.setattr(module_check, "capture", scaled)
    found = difference(model, batch)
    assert found is not None and found.code == "QN111" and "differs by" in str(found)


@pytest.mark.slow
def test_a_model_that_does_not_fit_runs_by_blocks_or_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Blocks(), (torch.randn(8, 64),)
    shared: list[bool] = []
    right = module_check.with_values

    def recorded(*args: Any) -> Any:
        copies, tensors = right(*args)
        shared.append(all(a is b for a, b in zip(model.parameters(), copies[0].parameters(), strict=True)))
        return copies, tensors

    monkeypatch.setattr(module_check, "with_values", recorded)
    whole = 4 * sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(module_check, "free_bytes", lambda _: 1.5 * whole)
    assert difference(model, batch) is None and shared == [True]
    monkeypatch.setattr(module_check, "free_bytes", lambda _: 10)
    with pytest.warns(quintnet.CheckWarning, match="not compared"):
        assert difference(model, batch) is None


@pytest.mark.slow
def test_what_is_outside_of_blocks_must_fit_before_anything_is_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model, batch = nn.Sequential(OrderedDict(first=nn.Linear(64, 64), blocks=Blocks())), (torch.empty(8, 64),)
    outside = 3 * 4 * (64 * 64 + 64)
    traced: list[nn.Module] = []
    right = module_check.capture

    def seen(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        traced.append(model)
        return right(model, *args, **kwargs)

    monkeypatch.setattr(module_check, "capture", seen)
    for free, times in ((outside, 0), (outside / 0.8 + 1, 1)):  # a fifth of the memory stays free
        monkeypatch.setattr(module_check, "free_bytes", lambda _, free=free: free)
        with pytest.warns(quintnet.CheckWarning, match="not compared"):
            assert difference(model, batch) is None
        assert len(traced) == times


def _two_ranks() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        trace_plainly(patch)
        found = []
        for fault in ("", "hook"):
            program = compiled(Odd(fault))
            try:
                found.append(f"{float(program.step(BATCH)):.6f}")
            except CompileError as error:
                found.append(str(error))
        return found


@pytest.mark.slow
def test_every_rank_raises_what_one_of_them_found() -> None:
    first, second = quintnet.launch(_two_ranks, 2, timeout=240, collective_timeout=60)
    assert first == second
    assert first[0].startswith("1.") and "QN111" in first[1] and "the result of tanh" in first[1]


def test_a_step_that_only_tokens_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is not finite on few rows is compared on all of them."""
    labels = torch.full((8,), -100)
    labels[-1] = 1
    monkeypatch.setattr(module_check, "CHECKED_ELEMENTS", 1)
    assert difference(Odd(""), (BATCH[0], labels), F.cross_entropy) is None
    rows: list[int] = []
    right = module_check.unsplit_step
    monkeypatch.setattr(module_check, "unsplit_step", lambda c, n, *a, **k: rows.append(n) or right(c, n, *a, **k))
    assert difference(Odd(""), (BATCH[0], labels), F.cross_entropy) is None
    assert rows == [2, 8]


def test_a_module_that_fails_says_so() -> None:
    captured = tracing.capture(Odd(""), BATCH, F.cross_entropy)
    owner = Owner(Odd(""), F.cross_entropy, captured.tensors, "loss", training=True)
    check = ModuleCheck(owner, captured, BATCH, RULES, 0, torch.device("cpu"))
    wrong = replace(check, batch=(BATCH[0], BATCH[1] + 100)).difference()
    assert wrong is not None and "the module itself fails" in str(wrong)


class Factorised(nn.Module):
    """Its kernels factorise a contiguous matrix transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        matrices = self.layer(x).view(-1, 2, 2)
        return (torch.linalg.slogdet(matrices)[1] + torch.linalg.det(matrices.mT)).sum()


def test_derivatives_of_factorised_matrices() -> None:
    torch.manual_seed(0)
    assert difference(Factorised().double(), (torch.randn(8, 4, dtype=torch.float64),)) is None
