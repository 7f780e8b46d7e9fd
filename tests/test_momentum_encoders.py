"""Averages of parameters that forward keeps in parameters and buffers, as each of PyTorch's operators writes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

from .frontier import Case, compare, report, trains_equally

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}
Update = Callable[[Tensor, Tensor], Any]


class Momentum(nn.Module):
    """A query encoder, a key encoder that ``update`` makes follow it, and the average of a weight as a buffer."""

    def __init__(self, update: Update, *, many: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.query = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("average", torch.zeros(6, 4))
        self.update, self.many = update, many

    @torch.no_grad()
    def follow(self) -> None:
        pairs = [*zip(self.key.parameters(), self.query.parameters(), strict=True)]
        pairs.append((self.average, self.query[0].weight))  # type: ignore[arg-type]
        if self.many:
            self.update([k for k, _ in pairs], [q for _, q in pairs])  # type: ignore[arg-type]
            return
        for k, q in pairs:
            self.update(k, q)

    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        with torch.no_grad():
            target = self.key(x)
        return F.mse_loss(self.query(x), target + 1)


UPDATES: dict[str, Update] = {
    "mul_ add_": lambda k, q: k.mul_(0.9).add_(q, alpha=0.1),
    "lerp_": lambda k, q: k.lerp_(q, 0.1),
    "copy_": lambda k, q: k.copy_(q),
    "add_": lambda k, q: k.add_(q, alpha=0.1),
    "sub_ of a difference": lambda k, q: k.sub_(0.1 * (k - q)),
    "addcmul_": lambda k, q: k.mul_(0.5).addcmul_(q, q),
    "data": lambda k, q: k.data.mul_(0.9).add_(q.data, alpha=0.1),
    "detach": lambda k, q: k.mul_(0.9).add_(q.detach(), alpha=0.1),
    "part of it": lambda k, q: k[:2].copy_(q[:2]),
    "set": lambda k, q: k.__setitem__(slice(0, 2), q[:2]),
    "augmented": lambda k, q: k.__iadd__(q),
    "out": lambda k, q: torch.lerp(k, q, 0.1, out=k),
}
MANY: dict[str, Any] = {
    "_foreach_lerp_": lambda k, q: torch._foreach_lerp_(k, q, 0.1),
    "_foreach_mul_, _foreach_add_": lambda k, q: (torch._foreach_mul_(k, 0.9), torch._foreach_add_(k, q, alpha=0.1)),
    "_foreach_copy_": lambda k, q: torch._foreach_copy_(k, q),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", MESHES)
@pytest.mark.parametrize("name", [*UPDATES, *MANY])
def test_the_average_is_that_of_the_module(name: str, layout: str) -> None:
    many = name in MANY
    update = MANY[name] if many else UPDATES[name]
    trains_equally(lambda: Momentum(update, many=many), (X,), meshes={layout: MESHES[layout]})


def test_slices_and_four_ranks() -> None:
    case = Case(lambda: Momentum(UPDATES["mul_ add_"]), (X,), options={"zero": 3})
    report(case, {"dp2 x tp2": compare(case, {"dp": 2, "tp": 2})})


@pytest.mark.slow
def test_a_trained_parameter_that_follows_another() -> None:
    class Pulled(Momentum):
        def forward(self, x: Tensor) -> Tensor:
            self.key.requires_grad_(True)
            with torch.no_grad():
                self.key[0].weight.lerp_(self.query[0].weight, 0.1)
                self.key[2].weight.mul_(0.9).add_(self.query[2].weight, alpha=0.1)
            return F.mse_loss(self.query(x), self.key(x) + 1)

    class Set(Pulled):
        def __init__(self, update: Update) -> None:
            super().__init__(update)
            self.key.requires_grad_(True)

    trains_equally(lambda: Set(UPDATES["copy_"]), (X,), meshes={"dp2": {"dp": 2}, "tp2": {"tp": 2}})


def test_evaluation_gathers_what_it_cannot_read_in_slices() -> None:
    """A step that only averages a layer may store its weight and its bias in slices of different features."""

    class Averaged(Momentum):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return F.mse_loss(self.key[0](x), self.query[0](x) + 1)
            self.follow()
            return F.mse_loss(self.query(x), x + 1)

    slices = {"key.0.weight": {"tp": "S(1)"}, "key.0.bias": {"tp": "S(0)"}}
    case = Case(lambda: Averaged(UPDATES["lerp_"]), (X,), options={"plan": {"parameters": slices}}, evaluates=True)
    report(case, {"tp2": compare(case, {"tp": 2})})


def test_a_queue_that_limits_the_rows() -> None:
    """Trace a queue whose free places bound the number of rows, which torch.export states as an inequality."""

    class Queue(Momentum):
        def __init__(self, update: Update) -> None:
            super().__init__(update)
            self.register_buffer("queue", torch.randn(4, 16))

        def forward(self, x: Tensor) -> Tensor:
            loss = (self.query(x) @ self.queue.clone()).square().mean()
            with torch.no_grad():
                self.queue[:] = torch.cat([self.queue[:, x.shape[0] :], self.key(x).T], 1)
            return loss

    trains_equally(lambda: Queue(UPDATES["copy_"]), (X,), meshes={"dp2": MESHES["dp2"]})


class Codebook(nn.Module):
    """Compares rows with their average, and moves a parameter towards it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.code = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        with torch.no_grad():
            self.code.mul_(0.9).add_(0.1 * z.mean(0))
        return (z - z.mean(0)).square().mean() + (z - self.code).square().mean()


def test_statistics_of_a_microbatch_are_not_offered_where_a_parameter_changes() -> None:
    with pytest.raises(quintnet.CompileError, match="QN104") as raised:
        quintnet.compile(Codebook().double(), quintnet.Mesh(), (X,), plan={"microbatches": 2})
    assert raised.value.fix == "use microbatches=1"
