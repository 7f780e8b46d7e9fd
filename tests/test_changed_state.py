"""Buffers and parameters that forward changes: the module's values on every layout, written back where it reads them.

:mod:`.test_frontier_processes` runs the same modules on gloo processes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.passes.frontend import norm_rewrites
from quintnet_compiler.runtime.backends import local

from .changing_modules import (
    BY_ROWS,
    SHAPES,
    AverageLoss,
    Clipped,
    Counter,
    ResNet,
    Shortened,
    Teacher,
    Tokens,
    Twice,
    changing,
)
from .frontier import LAYOUTS, Case, compare, report, trains_equally

PARAMETERS = (Clipped, Teacher, Shortened)
MORE = {
    "pp2 x dp2, ZeRO 3": ({"pp": 2, "dp": 2}, {"zero": 3}),
    "dp2 x tp2, ZeRO 2, recomputed": ({"dp": 2, "tp": 2}, {"zero": 2, "recompute": "full"}),
    "cp2": ({"cp": 2}, {}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SHAPES)
def test_three_steps_are_those_of_the_module(kind: type[nn.Module], layout: str) -> None:
    report(changing(kind), {layout: compare(changing(kind), LAYOUTS[layout])})


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (kind, layout)
        for layout in MORE
        for kind in (Tokens, ResNet, Twice, *PARAMETERS)
        if layout != "cp2" or kind is Tokens
    ],
)
def test_other_layouts(kind: type[nn.Module], layout: str) -> None:
    axes, options = MORE[layout]
    case = changing(kind, options=options)
    report(case, {layout: compare(case, axes)})


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "layout"), list(zip(PARAMETERS, ("dp2 x tp2", "pp2", "tp2"), strict=True)))
def test_parameters_too(kind: type[nn.Module], layout: str) -> None:
    report(changing(kind), {layout: compare(changing(kind), LAYOUTS[layout])})


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [Clipped, Teacher])
def test_slices_of_a_changed_parameter_stay_where_they_are(kind: type[nn.Module]) -> None:
    case = changing(kind, options={"zero": 3})
    report(case, {"dp2": compare(case, {"dp": 2})})


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("kind", BY_ROWS)
def test_microbatches_count_once(kind: type[nn.Module], axes: dict[str, int]) -> None:
    """A counter counts a step, not its microbatches; averages are over the batch."""
    case = changing(kind, options={"microbatches": 2})
    report(case, {str(axes): compare(case, axes)})


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [ResNet, Twice, Shortened, Tokens])
def test_statistics_of_the_batch_need_all_rows(kind: type[nn.Module]) -> None:
    model, batch = _built(kind)
    with pytest.raises(quintnet.CompileError, match=r"QN104[\s\S]*microbatches=1"):
        quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy, microbatches=2)


# -- the module afterwards


def test_buffers_stay_the_tensors_that_they_are_unless_forward_assigns() -> None:
    model, batch = _built(Counter)
    twin, held, view = copy.deepcopy(model), dict(model.named_buffers()), model.count.view(1)
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy)
    assert model.count.item() == 0 and model.b.sum() == 5, "compiling is no step"
    for _ in range(2):
        program.step(batch)
        twin(batch[0])
    assert model.count is held["count"] and view.item() == 2  # in place
    assert model.a is not held["a"] and torch.equal(held["a"], torch.zeros(5)), "assigned: the old tensor is as it was"
    _same_buffers(model, twin)


def test_what_the_user_writes_between_steps_is_read() -> None:
    model, batch = _built(Twice)
    twin = copy.deepcopy(model)
    program = quintnet.compile(model, quintnet.Mesh(tp=2), batch, loss_fn=F.cross_entropy)
    for step in range(3):
        for one in (model, twin):
            with torch.no_grad():
                one.norm.running_mean.fill_(step)
                one.norm.num_batches_tracked += 10
        program.step(batch)
        twin(batch[0])
        _same_buffers(model, twin)


class Masked(nn.Module):
    """Has a buffer that is None at first."""

    mask: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 4)
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out if self.mask is None else out * self.mask


@pytest.mark.parametrize("first", [None, 1.0])
def test_a_buffer_that_may_be_none_is_assigned_again_but_not_removed(first: float | None) -> None:
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 4
    model = Masked().double()
    model.mask = None if first is None else torch.full((4,), first, dtype=torch.float64)
    program = quintnet.compile(model, quintnet.Mesh(dp=2), (x, y), loss_fn=F.cross_entropy)
    program.step((x, y))
    for factor in (2.0, 3.0, 4.0):
        model.mask = torch.full((4,), factor, dtype=torch.float64)
        expected = F.cross_entropy(model(x), y)
        torch.testing.assert_close(program.step((x, y)).detach(), expected.detach(), rtol=1e-9, atol=0)
    model.mask = None
    with pytest.raises(quintnet.RunError, match=r"(?s)QN112.*mask was removed.*fix: compile the changed module"):
        program.step((x, y))


def _differences_of_masked() -> list[float]:
    x, y = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(8, 6), torch.arange(8) % 4
    model, twin = Masked().double(), Masked().double()
    program = quintnet.compile(model, quintnet.Mesh(dp=2), (x, y), loss_fn=F.cross_entropy)
    program.step((x, y))
    differences = []
    for factor in (2.0, 3.0, 4.0):
        model.mask = twin.mask = torch.full((4,), factor, dtype=torch.float64)
        differences.append(float((program.step((x, y)) - F.cross_entropy(twin(x), y)).detach()))
    return differences


@pytest.mark.slow
def test_a_buffer_that_was_none_is_assigned_again_in_processes() -> None:
    for differences in quintnet.launch(_differences_of_masked, 2, timeout=120):
        assert differences == pytest.approx([0.0] * 3, abs=1e-9)


@pytest.mark.slow
def test_evaluation_and_inference_read_the_statistics_that_training_wrote() -> None:
    model, batch = _built(ResNet)
    twin = copy.deepcopy(model)
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy)
    for _ in range(2):
        program.step(batch)
        twin(batch[0])
    with torch.no_grad():
        assert torch.allclose(program.evaluate(batch), F.cross_entropy(twin.eval()(batch[0]), batch[1]), atol=1e-12)
        assert torch.allclose(program(batch[0]), twin(batch[0]), atol=1e-12)
    _same_buffers(model, twin)


def test_an_evaluation_that_changes_a_buffer_does_so() -> None:
    model, batch = _built(Counter)
    program = quintnet.compile(model, quintnet.Mesh(pp=2), batch, loss_fn=F.cross_entropy)
    program.step(batch)
    program.evaluate(batch)
    assert model.count.item() == 2


@pytest.mark.slow
def test_checkpoints_have_the_changed_values(tmp_path: Path) -> None:
    model, batch = _built(ResNet)
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy)
    program.step(batch)
    program.save(tmp_path, step=1)
    kept = {name: x.clone() for name, x in model.named_buffers()}
    program.step(batch)
    assert not torch.equal(model.stem[1].running_mean, kept["stem.1.running_mean"])
    other, _ = _built(ResNet)
    loaded = quintnet.compile(other, quintnet.Mesh(tp=2), batch, loss_fn=F.cross_entropy)
    loaded.load(tmp_path)
    for name, x in other.named_buffers():
        assert torch.equal(x, kept[name]), name
    loaded.step(batch)  # goes on from there; no optimizer has changed a weight
    _same_buffers(other, model)


@pytest.mark.slow
def test_a_step_that_fails_changes_nothing() -> None:
    model, batch = _built(ResNet)
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy)
    program.step(batch)
    kept = {name: x.clone() for name, x in model.named_buffers()}
    with pytest.raises(quintnet.QuintNetError):
        program.step((batch[0][:3], batch[1]))
    for name, x in model.named_buffers():
        assert torch.equal(x, kept[name]), name


# -- proofs


def test_verify_proves_the_buffers() -> None:
    model, batch = _built(AverageLoss)
    program = quintnet.compile(model, quintnet.Mesh(pp=2, dp=2), batch, microbatches=2)
    before = {name: x.clone() for name, x in model.named_buffers()}
    found = program.verify()
    assert found.ok and all(torch.equal(x, before[name]) for name, x in model.named_buffers())


@pytest.mark.slow
def test_compile_finds_a_wrong_statistic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a training step depends on running statistics: only their own comparison can find this."""
    true = norm_rewrites._averaged
    monkeypatch.setattr(norm_rewrites, "_averaged", lambda *given: true(*given[:-1], given[-1] * (1 + 1e-3)))
    model, batch = _built(Twice)
    with pytest.raises(quintnet.CompileError, match="QN111") as caught:
        quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy)
    assert "buffer norm.running_mean differs by" in str(caught.value) and "does not" not in str(caught.value)
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy, check="off")
    wrong = {one.name for one in program.verify().comparisons if not one.ok}
    assert wrong == {"norm.running_mean", "norm.running_var"}


def test_verify_finds_a_value_that_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.LocalBackend, "_write", lambda *_: None)
    model, batch = _built(Counter)
    found = quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy).verify()
    assert {one.name for one in found.comparisons if not one.ok and one.what == "buffer"} == {"count", "a", "b"}


# -- refusals


class _Net(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.inner, self.body = nn.Linear(8, 4), body
        self.register_buffer("ema", torch.zeros(4))
        self.register_buffer("other", torch.ones(4))
        self.alone = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.tied = self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _shares_a_weight(net: _Net, x: Tensor) -> Tensor:
    net.ema = net.inner.bias.detach()
    return net.inner(x).square().mean()


def _shares_the_batch(net: _Net, x: Tensor) -> Tensor:
    net.ema = x[0, :4].detach()
    return net.inner(x).square().mean()


def _shares_a_buffer(net: _Net, x: Tensor) -> Tensor:
    net.ema = net.other
    return (net.inner(x) * net.ema).square().mean()


def _keeps_the_graph(net: _Net, x: Tensor) -> Tensor:
    y = net.inner(x)
    net.ema = 0.9 * net.ema + y.mean(0)
    return y.square().mean()


def _changes_what_is_saved(net: _Net, x: Tensor) -> Tensor:
    loss = net.inner(x.requires_grad_()).square().mean()
    net.inner.weight.data.clamp_(-0.1, 0.1)  # autograd would not notice
    return loss


def _two_names(net: _Net, x: Tensor) -> Tensor:
    old = net.inner.weight.data
    net.inner.weight.data = old * 2
    return net.inner(x).square().mean() + old.sum()


def _other_shape(net: _Net, x: Tensor) -> Tensor:
    net.inner.bias.data = x[:1, :1].detach()
    return net.inner(x).square().mean()


def _a_part_of_the_batch(net: _Net, x: Tensor) -> Tensor:
    net.inner.bias.data = x[0, :4].detach()
    return net.inner(x).square().mean()


def _a_weight_keeps_the_graph(net: _Net, x: Tensor) -> Tensor:
    net.alone.add_(net.inner.bias)
    return (net.inner(x) + net.alone).square().mean()


def _two_places(net: _Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.tied.clamp_(-0.1, 0.1)
    return (net.inner(x) + net.frozen).square().mean()


def _instance(net: _Net, x: Tensor) -> Tensor:
    h = torch.instance_norm(
        net.inner(x)[:, :, None] * x[:, None], None, None, net.ema, net.other, True, 0.1, 1e-5, False
    )
    return h.square().mean()


def _native(net: _Net, x: Tensor) -> Tensor:
    h, _, _ = torch.native_batch_norm(net.inner(x), net.inner.bias, None, net.ema, net.other, True, 0.1, 1e-5)
    return h.exp().mean()


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (_shares_a_weight, "assigns a view of the parameter 'inner.bias' to the buffer 'ema'"),
        (_shares_the_batch, "assigns a view of the batch to the buffer 'ema'"),
        (_shares_a_buffer, "assigns a view of the buffer 'other' to the buffer 'ema'"),
        (_keeps_the_graph, "'ema'[\\s\\S]*requires a gradient[\\s\\S]*detach"),
        (_changes_what_is_saved, "changes inner.weight after addmm has saved"),
        (_two_names, "another tensor has the same memory"),
        (_other_shape, "another shape"),
        (_a_part_of_the_batch, "another tensor has the same memory"),
        (_a_weight_keeps_the_graph, "new value of 'alone' requires a gradient"),
        (_two_places, "'frozen', which has several places"),
        (_instance, "torch.instance_norm that trains"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_refused(body: Any, cause: str) -> None:
    torch.manual_seed(0)
    net, x = _Net(body), torch.randn(8, 8)
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(quintnet.CompileError, match=cause) as caught:
        quintnet.compile(net, quintnet.Mesh(dp=2), (x,))
    assert caught.value.code == "QN110"
    assert caught.value.where.source or caught.value.where.module or body is _shares_a_buffer
    assert all(torch.equal(value, kept[name]) for name, value in net.state_dict().items())


@pytest.mark.slow
def test_statistics_that_an_operator_changes_without_its_schema_saying_so() -> None:
    trains_equally(lambda: _Net(_native), (torch.randn(8, 8, generator=torch.Generator().manual_seed(0)),))


def test_one_value_per_channel_is_what_torch_says() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    batch = torch.randn(1, 4), torch.randn(1, 4)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(batch[0])
    with pytest.raises((quintnet.QuintNetError, ValueError), match="more than 1 value per channel"):
        quintnet.compile(model, quintnet.Mesh(tp=2), batch, loss_fn=F.mse_loss)


def _built(kind: type[nn.Module]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    case: Case = changing(kind)
    x, y = case.batch(0)
    return kind().double(), (x.double(), y)


def _same_buffers(model: nn.Module, expected: nn.Module) -> None:
    there = dict(model.named_buffers())
    for name, x in expected.named_buffers():
        assert torch.allclose(there[name], x, rtol=1e-12, atol=1e-12), name
