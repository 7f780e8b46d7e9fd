"""What a compiled program must do where it used to differ or to name a false cause, and that errors' fixes work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.core.annotations import facts
from quintnet_compiler.cost_models.kernels import Kernel
from quintnet_compiler.cost_models.operators import kernel_of

from .frontier import LAYOUTS, TWO_RANKS, refused, trains_equally
from .unruled import cubed

torch.set_num_threads(1)
IN_TIME = {"dp1": {"dp": 1}, "pp2": {"pp": 2}, "dp2 x tp2": {"dp": 2, "tp": 2}}  # together with microbatches
REPLICATE = {"plan": {"unknown_ops": "replicate"}}


class Net(nn.Module):
    """A linear, its parameters by name, and what is in question."""

    def __init__(self, f: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.layer, self.last, self.f = nn.Linear(4, 4), nn.Linear(4, 4), f
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *batch: Tensor) -> Tensor:
        return self.f(self, *batch)

    def hidden(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(x)))


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


X, SIGNS = _x(8, 4), torch.tensor([1.0, -1, 1, 1, -1, -1, 1, -1])
LABELS = torch.tensor([0, 1, 2, 3, 2, 1, 3, 1])


# -- random masks: the position of an element is that in the batch, whatever made the tensor


def _drop_path(net: Net, x: Tensor) -> Tensor:
    kept = F.dropout(x.new_ones(x.shape[0], 1), 0.5, net.training)
    return (net.layer(x) + kept * net.hidden(x)).square().mean()


def _locked(net: Net, x: Tensor) -> Tensor:
    h = net.hidden(x)
    return (h * F.dropout(torch.ones(1, 4), 0.5, net.training) * F.dropout(torch.ones_like(h), 0.3)).square().mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize("f", [_drop_path, _locked])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_masks_of_tensors_that_forward_makes(f: Any, microbatches: int) -> None:
    meshes = LAYOUTS if microbatches == 1 else IN_TIME
    trains_equally(lambda: Net(f), (X,), meshes=meshes, microbatches=microbatches)


# -- what treats each sample alone runs in microbatches


def _filled(net: Net, x: Tensor) -> Tensor:
    h = net.hidden(x)
    out = torch.zeros_like(h)
    for t in range(4):
        out[:, t] = h[:, t].tanh()
    return out.square().mean()


def _tokens(net: Net, x: Tensor) -> Tensor:
    parts = [net.token.repeat(x.shape[0], 1, 1), net.hidden(x)[:, None].repeat(1, 2, 3)[..., :4]]
    return torch.cat(parts, 1).square().mean()


def _rotated(net: Net, x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(net.hidden(x).reshape(x.shape[0], 2, 2))
    angles = torch.polar(x.new_ones(2), torch.arange(2, dtype=x.dtype))
    transposed = torch.view_as_real(pairs * angles).flatten(1)
    return (transposed + x).square().mean()


def _dice(net: Net, x: Tensor) -> Tensor:
    found, wanted = net.hidden(x).sigmoid(), x.sigmoid()
    overlap = (2 * (found * wanted).sum(1) + 1) / (found.sum(1) + wanted.sum(1) + 1)
    return 1 - overlap.mean()


def _log_probabilities(net: Net, x: Tensor, dims: int) -> Tensor:
    return F.log_softmax(net.hidden(x).reshape(x.shape[0], 4, *[1] * dims), 1)


APART: dict[str, tuple[Any, ...]] = {
    "assignment to slices": (_filled, X),
    "repeat_interleave with output_size": (
        lambda net, x: net.hidden(x).repeat_interleave(2, dim=1, output_size=8).square().mean(),
        X,
    ),
    "repeat over the batch": (_tokens, X),
    "complex views": (_rotated, X),
    "sum of a list": (lambda net, x: sum([net.hidden(x).square().mean(), net.layer(x).abs().mean()]), X),
    "loss + number": (lambda net, x: 2 - (net.hidden(x).square().mean() + 1e-3 - 0.5), X),
    "1 - dice": (_dice, X),
    "a loss that starts as zeros": (lambda net, x: x.new_zeros(()) + net.hidden(x).square().mean(), X),
    "a penalty of a constant": (
        lambda net, x: net.hidden(x).square().mean() + net.scale.square().sum(),
        X,
    ),
    "nll_loss": (lambda net, x, y: F.nll_loss(_log_probabilities(net, x, 0), y), X, LABELS),
    "nll_loss of images": (lambda net, x, y: F.nll_loss(_log_probabilities(net, x, 2), y[:, None, None]), X, LABELS),
    "nll_loss with weights": (
        lambda net, x, y: F.nll_loss(_log_probabilities(net, x, 0), y, net.weights, ignore_index=2),
        X,
        LABELS,
    ),
    "margin_ranking_loss": (
        lambda net, x, y: F.margin_ranking_loss(net.hidden(x)[:, 0], net.hidden(x)[:, 1], y, 0.3),
        X,
        SIGNS,
    ),
    "hinge_embedding_loss": (lambda net, x, y: F.hinge_embedding_loss(5 * net.hidden(x)[:, 0], y), X, SIGNS),
    "cosine_embedding_loss": (lambda net, x, y: F.cosine_embedding_loss(net.hidden(x), net.layer(x), y, 0.1), X, SIGNS),
    "view_as, reshape_as, expand_as": (
        lambda net, x: F.mse_loss(net.hidden(x).view_as(x)[:, :1].expand_as(x), x.reshape_as(x)),
        X,
    ),
}


def net_of(f: Any) -> Net:
    net = Net(f, token=nn.Parameter(_x(1, 2, 4)))
    net.register_buffer("weights", torch.arange(4.0) + 1)
    net.register_buffer("scale", torch.arange(3.0))
    if f is not _tokens:
        net.token.requires_grad_(False)
    return net


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_samples_that_are_treated_alone_run_in_microbatches(name: str) -> None:
    f, *batch = APART[name]
    trains_equally(lambda: net_of(f), tuple(batch), meshes={"pp2": {"pp": 2}}, microbatches=2)
    trains_equally(lambda: net_of(f), tuple(batch), meshes={"dp2 x tp2": {"dp": 2, "tp": 2}})


@pytest.mark.slow
def test_a_table_made_of_the_batch_runs_in_microbatches() -> None:
    """The lookup adds up what each microbatch has of the table."""

    def lookup(net: Net, x: Tensor) -> Tensor:
        return F.embedding(torch.tensor([1, 5, 6, 1]), net.hidden(x)).sum()

    trains_equally(lambda: Net(lookup), (X,), meshes=IN_TIME, microbatches=2)


class Left(nn.Module):
    """A weight on the left of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w, self.b = nn.Linear(16, 8), nn.Parameter(_x(32, 8)), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.w @ self.a(x).transpose(1, 2)).transpose(1, 2))


@pytest.mark.sample(1)
@pytest.mark.parametrize("split", [2, 4])  # 6 positions: two ranks have 3 each, four compute all of them
def test_a_weight_on_the_left_runs_over_sequences(split: int) -> None:
    meshes = {"cp": {"cp": split}, "dp2": {"dp": 2}}
    trains_equally(Left, (_x(8, 6, 16), _x(8, 6, 16)), F.mse_loss, meshes=meshes)


COUPLED: dict[str, tuple[Any, str]] = {
    "statistics": (
        lambda net, x: (net.layer(x) / net.layer(x).std(0).mean()).mean(),
        r"rule of aten\.std\.dim does not",
    ),
    "the mean of rows": (
        lambda net, x: (net.layer(x) - net.layer(x).mean(0)).square().mean(),
        r"sub\.Tensor needs the sum",
    ),
    "the root of a loss": (lambda net, x: net.layer(x).square().mean().sqrt(), r"sqrt\.default needs the sum"),
    "no rule for rows": (
        lambda net, x: net.layer(x).masked_scatter(net.layer(x) > 0, x).mean(),
        r"rule of aten\.masked_scatter",
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_samples_is_named_and_its_fix_works(name: str) -> None:
    f, cause = COUPLED[name]
    texts = refused(lambda: Net(f), (X,), "QN104", cause=cause, meshes={"dp1": {"dp": 1}}, microbatches=2)
    assert "fix: use microbatches=1" in texts["dp1"]
    trains_equally(lambda: Net(f), (X,), meshes={"dp1": {"dp": 1}}, microbatches=1)


HALF = {"dp1": {"dp": 1}, "dp4": {"dp": 4}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2 x tp2": {"dp": 2, "tp": 2}}


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", HALF)
def test_labels_are_counted_in_more_than_16_bits(layout: str) -> None:
    batch = (torch.randn(70_000, 2).half(), torch.randint(2, (70_000,)))
    model = nn.Linear(2, 2).half()
    wide = copy.deepcopy(model).float()
    program = quintnet.compile(model, Mesh(**HALF[layout]), batch, loss_fn=F.cross_entropy)
    expected = F.cross_entropy(wide(batch[0].float()), batch[1])
    expected.backward()
    torch.testing.assert_close(program.step(batch).float(), expected.detach(), rtol=2e-3, atol=0)
    for found, wanted in zip(program.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(_whole(found.grad).float(), wanted.grad, rtol=0.1, atol=1e-3)


# -- operators without a rule, and random ones


RANDOM: dict[str, Any] = {
    "Poisson": lambda net, x: net.hidden(x) * torch.poisson(x.abs()),
}


@pytest.mark.parametrize("name", RANDOM)
def test_other_random_operators_are_refused_whatever_the_plan_says(name: str) -> None:
    def build() -> nn.Module:
        return Net(lambda net, x: RANDOM[name](net, x).square().mean())

    refused(build, (X,), "QN105", cause="draws random numbers", meshes=TWO_RANKS, **REPLICATE)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.r = nn.LSTM(4, 4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.r(x)[0].square().mean()


@pytest.mark.slow
def test_an_lstm_in_float32_is_taken_apart() -> None:
    x, model = _x(8, 3, 4), Recurrent()
    expected = model(x)
    expected.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for mesh in (Mesh(dp=2), Mesh(tp=2)):
        program = quintnet.compile(model, mesh, (x,))
        torch.testing.assert_close(program.step((x,)), expected.detach())
        for p, grad in zip(program.parameters(), wanted, strict=True):
            torch.testing.assert_close(_whole(p.grad), grad)
        model.zero_grad()


# -- causes that are the cause


def test_an_operator_without_a_price_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a lack of memory, after a search; by plan and estimate alike."""

    def some(node: fx.Node, unknown: str = "error") -> Kernel:
        if node.target is torch.ops.aten.glu_backward.default:
            raise quintnet.CompileError("QN210", "no price", where=facts(node).where)
        return kernel_of(node, unknown)

    monkeypatch.setattr("quintnet_compiler.cost_models.cluster_costs.kernel_of", some)
    model = nn.Sequential(nn.Linear(4, 8), nn.GLU(), nn.Linear(4, 4))
    cluster, given = quintnet.Cluster("a100", 1, 2), (X, LABELS)
    for ask in (
        lambda: quintnet.plan(model, cluster, given, loss_fn=F.cross_entropy),
        lambda: quintnet.estimate(model, cluster, given, {"mesh": {"dp": 2}}, loss_fn=F.cross_entropy),
    ):
        with pytest.raises(quintnet.CompileError, match=r"QN210 [\s\S]* for aten\.glu_backward\.default") as error:
            ask()
        assert error.value.where is not None


@pytest.mark.slow
def test_networks_whose_derivatives_nobody_described_are_planned() -> None:
    """Resizing, padding, and messages along the edges of a graph; what was guessed is said."""

    def image(net: Net, x: Tensor) -> Tensor:
        h = F.leaky_relu(net.hidden(x)).unflatten(1, (1, 2, -1))
        h = F.interpolate(F.pad(h, (1, 1, 1, 1), mode="reflect"), scale_factor=2, mode="nearest")
        return F.elu(h).square().mean()

    def graph(net: Net, x: Tensor) -> Tensor:
        h = F.mish(net.hidden(x))
        to = torch.arange(h.shape[1], device=x.device) // 2
        return torch.zeros_like(h).index_add(1, to, F.selu(h)).square().mean()

    cluster, bound = quintnet.Cluster("a100", 1, 2), "aten.upsample_nearest2d_backward"
    for compute, guessed in ((image, True), (graph, False)):
        report = quintnet.plan(Net(compute), cluster, (X,))
        assert report.found.ended == "proof"
        assert (bound in report.found.ranked[0].guessed) == (bound in str(report)) == guessed
        notes = quintnet.compile(Net(compute), Mesh(dp=2), (X,)).simulate().notes
        assert any(bound in note for note in notes) == guessed


@pytest.mark.slow
def test_the_rows_that_an_error_names_work() -> None:
    def pairs(net: Net, x: Tensor) -> Tensor:
        return net.hidden(x).reshape(2, -1, 4).square().mean()

    program = quintnet.compile(Net(pairs), Mesh(dp=1), (X,))
    with pytest.raises(quintnet.QuintNetError, match=r"QN101 [\s\S]*the first batch had 8 rows"):
        program.step((_x(7, 4),))
    program.step((X,))
    program.step((_x(6, 4),))
    with pytest.raises(quintnet.QuintNetError, match=r"QN106 [\s\S]*use a batch of 6 rows"):
        quintnet.compile(
            Net(Net.hidden), Mesh(dp=3), (X, X), loss_fn=F.mse_loss, microbatches=2, batch_statistics="microbatch"
        )
    quintnet.compile(Net(Net.hidden), Mesh(dp=3), (X[:6], X[:6]), loss_fn=F.mse_loss)


def test_what_data_ranks_exchange_is_listed() -> None:
    def centred(net: Net, x: Tensor) -> Tensor:
        h = net.hidden(x)
        return (h.sort(0).values - h).square().mean()

    program = quintnet.compile(Net(centred), Mesh(dp=2), (X,))
    assert any("dp=2: " in line and "reads other ranks' rows" in line for line in program.unsplit), program.unsplit
    assert quintnet.compile(Net(Net.hidden), Mesh(dp=2), (X, X), loss_fn=F.mse_loss).unsplit == ()


def test_an_assertion_on_values_is_no_matter_of_the_batch() -> None:
    def checked(net: Net, x: Tensor) -> Tensor:
        torch._check_tensor_all(x == x)
        return net.hidden(x).square().mean()

    trains_equally(lambda: Net(checked), (X,), meshes={"dp2": {"dp": 2}})


@pytest.mark.slow
def test_distributions_that_check_their_arguments() -> None:
    """Their checks only raise, and are no part of a program."""

    def likelihood(net: Net, x: Tensor) -> Tensor:
        spread = F.softplus(net.hidden(x))
        normal, gamma = torch.distributions.Normal(net.hidden(x), spread), torch.distributions.Gamma(spread, 1.0)
        chosen = torch.distributions.Categorical(logits=net.hidden(x))
        return -(normal.log_prob(x) + gamma.log_prob(x.square() + 1)).mean() - chosen.entropy().mean()

    trains_equally(lambda: Net(likelihood), (X,), meshes={"dp2": {"dp": 2}})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_batch_of_another_dtype_than_the_model(dtype: torch.dtype) -> None:
    batch = torch.randn(8, 4).to(dtype), torch.randint(4, (8,))
    cause = rf"aten\.linear\.default is given {dtype} and torch\.float32(.|\n)*batch\[0\] is {dtype}(.|\n)*at: 0"
    with pytest.raises(quintnet.CompileError, match=cause) as found:
        quintnet.compile(nn.Sequential(nn.Linear(4, 4)), quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy)
    assert found.value.code == "QN101"


class _Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return cubed(self.inner(x)).sum()


def test_running_an_operator_unsplit_is_offered_where_it_works() -> None:
    x, model, mesh = torch.randn(8, 4), _Cubed(), quintnet.Mesh(dp=2)
    with pytest.raises(quintnet.CompileError, match=r"QN202(.|\n)*fix: run it unsplit") as found:
        quintnet.compile(model, mesh, (x,))
    plan = {"unknown_ops": "replicate"}
    assert str(plan).replace("'", '"') in found.value.fix
    quintnet.compile(model, mesh, (x,), plan=plan).step((x,))
    with pytest.raises(quintnet.CompileError, match=r"QN202(.|\n)*unsplit, with plan.*QN104") as found:
        quintnet.compile(model, mesh, (x,), microbatches=2)
    assert found.value.fix.startswith("if it computes each row on its own: rules=[quintnet.rule(")


class Filled(nn.Module):
    """A column gets a trained value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.value = nn.Parameter(torch.ones(4)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.index_fill(x * self.scale, 1, torch.tensor([0, 2]), self.value).square().mean()


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 can trace this derivative, and it is equal")
def test_a_derivative_that_cannot_be_traced_is_named() -> None:
    for plan, code in (({"unknown_ops": "replicate"}, "QN109"), ({}, "QN202")):
        with pytest.raises(quintnet.CompileError, match=rf"(?s){code}.*index_fill.* cannot be traced") as error:
            quintnet.compile(Filled(), Mesh(dp=2), (torch.randn(8, 4),), plan=plan)
        assert error.value.fix == ("" if code == "QN109" else "write that line with other operators")
