"""Attributes that a hook of torch makes before each call of a module, as pruned weights: followed, and kept."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune, weight_norm

import quintnet
from quintnet_compiler.driver import variants

from .frontier import Case, on_processes, trains_equally

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(8) % 4
LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
}


class Net(nn.Module):
    """A convolution, a norm and two linear layers, of which ``change`` changes some."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2)
        self.a, self.b = nn.Linear(12, 8), nn.Linear(8, 4)
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x[:, None])).tanh()
        return self.b(self.a(h.flatten(1)).tanh())


def _twice(net: Any) -> None:
    prune.l1_unstructured(net.a, "weight", 0.25)
    prune.random_unstructured(net.a, "weight", 0.25)
    prune.l1_unstructured(net.a, "bias", 2)


def _everywhere(net: Any) -> None:
    parts = [(net.conv, "weight"), (net.a, "weight"), (net.b, "weight"), (net.norm, "weight")]
    prune.global_unstructured(parts, pruning_method=prune.L1Unstructured, amount=0.4)


def _removed(net: Any) -> None:
    prune.l1_unstructured(net.a, "weight", 0.5)
    prune.remove(net.a, "weight")


def _normalized(net: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight_norm(net.a)
        weight_norm(net.conv, dim=None)


FOLLOWED: Mapping[str, Callable[[Any], Any]] = {
    "l1 unstructured": lambda net: prune.l1_unstructured(net.a, "weight", 0.3),
    "random structured": lambda net: prune.random_structured(net.a, "weight", 0.5, dim=0),
    "ln structured": lambda net: prune.ln_structured(net.conv, "weight", 0.5, n=2, dim=0),
    "a mask": lambda net: prune.custom_from_mask(net.b, "weight", torch.arange(32).reshape(4, 8) % 3 > 0),
    "a norm": lambda net: prune.l1_unstructured(net.norm, "weight", 1),
    "identity": lambda net: prune.identity(net.a, "weight"),
    "twice, and a bias": _twice,
    "everywhere": _everywhere,
    "removed": _removed,
    "the old weight_norm": _normalized,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLLOWED)
def test_they_are_followed(name: str) -> None:
    trains_equally(lambda: Net(FOLLOWED[name]), (X, Y), F.cross_entropy, meshes=LAYOUTS)


def _prune_again(net: Any, step: int) -> None:
    if step:
        prune.l1_unstructured(net.a, "weight", 0.2)  # by the attribute that the last forward made


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pruning_goes_on_between_steps(layout: str) -> None:
    meshes = {layout: LAYOUTS[layout]}
    trains_equally(
        lambda: Net(FOLLOWED["l1 unstructured"]), (X, Y), F.cross_entropy, meshes=meshes, before=_prune_again
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"pp": 2}])
def test_the_attribute_is_that_of_the_last_forward(mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(_everywhere).double()
    plain = Net(_everywhere).double()
    program = quintnet.compile(model, quintnet.Mesh(**mesh), (X, Y), loss_fn=F.cross_entropy)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (model, plain)]
    traces: list[int] = []
    capture = variants.capture
    monkeypatch.setattr(variants, "capture", lambda *a, **k: (traces.append(1), capture(*a, **k))[1])
    for _ in range(2):
        F.cross_entropy(plain(X), Y).backward()  # type: ignore[no-untyped-call]
        program.step((X, Y))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert torch.allclose(model.a.weight, plain.a.weight, rtol=1e-12)
        assert not torch.equal(model.a.weight, model.a.weight_orig * model.a.weight_mask)
    assert not traces
    assert torch.allclose(program(X), plain.eval()(X), rtol=1e-9)
    assert torch.allclose(model.a.weight, model.a.weight_orig * model.a.weight_mask)
    assert program.verify().ok


@pytest.mark.slow
def test_equal_blocks_of_which_each_has_a_mask() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(9)]
        for block in blocks:
            prune.random_unstructured(block[0], "weight", 0.3)
        return nn.Sequential(*blocks)

    trains_equally(build, (X, Y), F.cross_entropy, meshes={"pp2": {"pp": 2}, "tp2": {"tp": 2}})


def test_a_teacher_of_a_loss() -> None:
    def build() -> Any:
        torch.manual_seed(0)
        teacher = prune.l1_unstructured(nn.Linear(6, 4), "weight", 0.5).double().requires_grad_(False)
        beside = {"teacher": teacher}
        return nn.Linear(6, 4), lambda z, y: F.cross_entropy(z + teacher(torch.ones(6).to(z)), y), beside

    found = trains_equally(build, (X, Y), meshes={"dp2": {"dp": 2}})
    assert "parameter weight" in found["dp2"].seen


class Early(nn.Module):
    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.read = prune.l1_unstructured(nn.Linear(6, 4), "weight", 0.5), read

    def forward(self, x: Tensor) -> Tensor:
        scale = self.read(self.a)
        return self.a(x) * scale


@pytest.mark.parametrize("read", [lambda a: a.weight.mean(), lambda a: 2.0 if hasattr(a, "weight") else 1.0])
def test_one_that_is_read_before_it_is_made_is_refused(read: Callable[[Any], Any]) -> None:
    cause = "reads 'weight' before a hook makes it"
    model = Early(read).double()
    for check in ("first", "off"):
        with pytest.raises(quintnet.CompileError, match=f"QN110[\\s\\S]*{cause}[\\s\\S]*at: a"):
            quintnet.compile(model, quintnet.Mesh(dp=2), (X, Y), loss_fn=F.cross_entropy, check=check)
    assert "weight" in vars(model.a)


def test_what_the_refusal_offers_works() -> None:
    class Late(Early):
        def forward(self, x: Tensor) -> Tensor:
            z = self.a(x)
            return z * self.read(self.a)

    trains_equally(lambda: Late(lambda a: a.weight.mean()), (X, Y), F.cross_entropy, meshes={"dp2": {"dp": 2}})


def _spectral(net: Any) -> None:
    nn.utils.spectral_norm(net.a)
    nn.utils.spectral_norm(net.conv, n_power_iterations=2, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_old_spectral_norm_is_followed(layout: str) -> None:
    trains_equally(lambda: Net(_spectral), (X, Y), F.cross_entropy, meshes={layout: LAYOUTS[layout]})


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"pp": 2}])
def test_the_old_spectral_norm_iterates_once_in_a_step(mesh: dict[str, int]) -> None:
    def build() -> nn.Module:
        net = Net(_spectral).double()
        net.norm = nn.Identity()  # one that takes statistics of a batch has no microbatches
        return net

    model, plain = build(), build()
    program = quintnet.compile(model, quintnet.Mesh(**mesh), (X, Y), loss_fn=F.cross_entropy, microbatches=2)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (model, plain)]
    for training in (True, True, False, True):
        for net in (model, plain):
            net.train(training)
        loss = F.cross_entropy(plain(X), Y)
        loss.backward()  # type: ignore[no-untyped-call]
        assert torch.allclose(program.step((X, Y)), loss, rtol=1e-9)
        for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-9)
        assert torch.allclose(model.a.weight, plain.a.weight, rtol=1e-9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(program(X), plain.eval()(X), rtol=1e-9)


@pytest.mark.slow
def test_a_copy_after_a_step_is_a_plain_module() -> None:
    model = Net(_everywhere).double()
    program = quintnet.compile(model, quintnet.Mesh(dp=2), (X, Y), loss_fn=F.cross_entropy)
    program.step((X, Y))
    assert torch.allclose(copy.deepcopy(model)(X), model(X))


def _cases() -> dict[str, Case]:
    changes = {"everywhere": _everywhere, "the old spectral_norm": _spectral}
    return {name: Case(lambda name=name: Net(changes[name]), (X, Y), F.cross_entropy) for name in changes}  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [{"everywhere": "tp2", "the old spectral_norm": "dp2"}, pytest.param({}, marks=pytest.mark.slow)],
    ids=["one layout each", "all layouts"],
)
def test_on_processes(where: dict[str, str]) -> None:
    for name, found in on_processes(_cases, where=where).items():
        assert {verdict.kind for verdict in found.values()} == {"equal"}, (name, found)
