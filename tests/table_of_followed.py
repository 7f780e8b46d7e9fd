"""What once was refused, and is followed: see ``test_table_of_errors.py``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from .table_of_errors import NORM, ROWS, TOKENS, WHOLE, Item, Net, Program, X, Y, loss_of_item, net, plain

IDS = torch.arange(ROWS) % 4


def _checkpointed(m: Any, x: Tensor) -> Tensor:
    return m.o(checkpoint(lambda h: m.norm(h).tanh(), m.q(x), use_reentrant=False))  # type: ignore[no-any-return]


def _two_sizes(m: Any, x: Tensor) -> Tensor:
    return m.o(m.q(x) @ torch.eye(8, 4, dtype=x.dtype).repeat(1, 2))  # type: ignore[no-any-return]


class Tanh(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2 * ctx.saved_tensors[0]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 3


class Again(torch.autograd.Function):
    """Runs a part of the model, ``run(*inputs)``, again in the backward; ``count``: of the inputs."""

    @staticmethod
    def forward(ctx: Any, run: Any, count: int, *args: Tensor) -> Tensor:
        ctx.run, ctx.inputs, ctx.parameters = run, args[:count], args[count:]
        with torch.no_grad():
            return run(*ctx.inputs)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in ctx.inputs]
        with torch.enable_grad():
            result = ctx.run(*inputs)
        wanted = [*(x for x in inputs if x.requires_grad), *ctx.parameters]
        gradients = iter(torch.autograd.grad(result, wanted, gradient))
        return None, None, *(next(gradients) if x.requires_grad else None for x in inputs), *gradients


def _embedded_again(m: Any, x: Tensor) -> Tensor:
    look_up = lambda h, i: h + m.table(i)  # noqa: E731
    return m.o(Again.apply(look_up, 2, m.q(x), x.argmax(1) % 4, m.table.weight))  # type: ignore[no-any-return]


def _distances_again(m: Any, x: Tensor) -> Tensor:
    distances = lambda h: torch.cdist(h.unflatten(1, (4, 2)), m.o.weight[:2, :2]).flatten(1)  # noqa: E731
    return m.o(Again.apply(distances, 1, m.q(x), m.o.weight))  # type: ignore[no-any-return]


def _filtered(m: Any, x: Tensor) -> Tensor:
    waves = torch.fft.fft(m.q(x)).clone()
    waves[:, 2:4] = 0
    waves[:, 5] = torch.complex(x[:, 0], x[:, 1])
    return m.o(torch.fft.ifft(waves).real)  # type: ignore[no-any-return]


def _momentum(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        for query, key in zip(m.q.parameters(), m.key.parameters(), strict=True):
            key.mul_(0.9).add_(query, alpha=0.1)
    return m.o(m.q(x) + m.key(x))  # type: ignore[no-any-return]


def _own_filters(m: Any, x: Tensor) -> Tensor:
    filters = m.q.weight[:, :1, None].repeat(x.shape[0], 1, 1)
    found = F.conv1d(x.reshape(1, -1, 6), filters, groups=x.shape[0])
    return m.o(found.reshape(x.shape[0], 8, -1).mean(-1))  # type: ignore[no-any-return]


def _penalty(m: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(plain(m, x), y)
    (gradient,) = torch.autograd.grad(loss, m.q.weight, create_graph=True)
    return loss + gradient.square().sum()


def _pruned(m: Any) -> nn.Module:
    prune.l1_unstructured(m.q, "weight", 0.3)
    return m  # type: ignore[no-any-return]


STYLES = {"norm": lambda: nn.InstanceNorm1d(4, track_running_stats=True)}
POINTS = net(lambda m, x: m.o(torch.cdist(x.reshape(-1, 6), m.q.weight).reshape(x.shape[0], -1, 8).mean(1)))
NUMBERS = torch.arange(ROWS)
FOLLOWED = {
    "buffers under a checkpoint": net(_checkpointed, parts=NORM),
    "a Function with generate_vmap_rule": net(lambda m, x: m.o(torch.vmap(Tanh.apply)(m.q(x)))),
    "a momentum encoder": net(_momentum, parts={"key": lambda: nn.Linear(6, 8).requires_grad_(False)}),
    "cdist of all tokens": POINTS.but(batch=(TOKENS, Y)),
    "a temperature first": net(lambda m, t, x: plain(m, x) / t, (torch.ones(1).double(), X, Y)),
    "a mask first": net(lambda m, w, x: plain(m, x @ w), (torch.eye(6).double(), X, Y)),
    "an index without dims": net(lambda m, x, i: plain(m, x) + m.o.weight[i, :4], (X, torch.tensor(3), Y)),
    "a dataclass in a batch": net(loss_of_item, (Item(X, Y),), loss_fn=None),
    "a pruned layer": Program(lambda: _pruned(Net(plain))),
    "a Function, and rows that do not divide": net(
        lambda m, x: m.o(Twice.apply(m.q(x))), (X[:7], Y[:7]), options=WHOLE
    ),
    "rows by their numbers": net(
        lambda m, x, i: m.o(m.q(x)[torch.arange(x.shape[0]), i]), (TOKENS, IDS, Y), options=WHOLE
    ),
    "rows by their numbers, with len": net(
        lambda m, x, i: m.o(m.q(x)[torch.arange(len(x)), i]), (TOKENS, IDS, Y), options=WHOLE
    ),
    "a convolution with filters of each row": net(_own_filters, options=WHOLE),
    "diagonals": net(lambda m, x: m.o(m.q(torch.einsum("bij,bkj->bjk", x, x).sum(2)[:, :6])), (TOKENS, Y)),
    "an instance norm": net(lambda m, x: m.o(m.q(m.norm(x))).mean(1), (TOKENS, Y), parts=STYLES, options=WHOLE),
    "fill_diagonal_": net(plain, loss_fn=lambda z, y: (z.T @ z).fill_diagonal_(0).square().mean()),
    "a derivative of a derivative of nll_loss": net(_penalty, (X, Y), loss_fn=None),
    "text in a result": net(
        lambda m, x, y: {"loss": F.cross_entropy(plain(m, x), y), "name": "abc"}, (X, Y), loss_fn=None
    ),
    "an embedding that a backward looks up again": net(
        _embedded_again, parts={"table": lambda: nn.Embedding(4, 8)}, options=WHOLE
    ),
    "a PReLU that a backward runs again": net(
        lambda m, x: m.o(Again.apply(m.act, 1, m.q(x), m.act.weight)), parts={"act": lambda: nn.PReLU(8)}
    ),
    "distances that a backward computes again": net(_distances_again),
    "a slice and a row of complex numbers": net(_filtered),
    "an identity matrix of two sizes": net(_two_sizes, options=WHOLE),
    "a window": net(plain, loss_fn=lambda z, y: F.cross_entropy(z * torch.hann_window(4, dtype=z.dtype), y)),
    "torch.compile": Program(lambda: torch.compile(Net(plain))),  # type: ignore[arg-type,return-value]
    "rows that are looked up": net(lambda m, x: m.o(m.q(x)[NUMBERS[: x.shape[0]]]), options={"microbatches": 1}),
}
