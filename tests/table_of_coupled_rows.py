"""Models and losses that bring rows of a batch together, and microbatches: see ``test_table_of_errors.py``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .table_of_errors import NORM, WHOLE, Program, Row, net, plain


def _rolled(m: Any, x: Tensor) -> Tensor:
    return m.o(m.q(x).roll(1, 0))  # type: ignore[no-any-return]


def _sorted(m: Any, x: Tensor) -> Tensor:
    return m.o(m.q(x).sort(0).values)  # type: ignore[no-any-return]


def _normed(m: Any, x: Tensor) -> Tensor:
    return m.o(m.norm(m.q(x)))  # type: ignore[no-any-return]


def _experts_by_sort(m: Any, x: Tensor) -> Tensor:
    order = m.q(x).argmax(-1).argsort()
    return m.o(m.q(x)[order][order.argsort()])  # type: ignore[no-any-return]


def _balanced(m: Any, x: Tensor) -> Tensor:
    share = m.q(x).softmax(-1).mean(0)
    return plain(m, x) + share.square().sum()


def _ntxent(z: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    similar = z @ z.T / 0.1
    return F.cross_entropy(similar, (torch.arange(z.shape[0]) + 1) % z.shape[0])


def _ntxent_by_len(z: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.T / 0.1, (torch.arange(len(z)) + 1) % len(z))


def _supcon(z: Tensor, y: Tensor) -> Tensor:
    same = (y[:, None] == y[None]).to(z.dtype)
    return -(torch.mm(z, z.T).log_softmax(1) * same).mean()


def _triplets(z: Tensor, y: Tensor) -> Tensor:
    apart = torch.cdist(z, z)
    return (apart * (y[:, None] == y)).amax(1).mean()


def _barlow(z: Tensor, y: Tensor) -> Tensor:
    z = (z - z.mean(0)) / z.std(0)
    return (z.T @ z / z.shape[0]).square().mean()


def _in_a_lambda(z: Tensor, y: Tensor) -> Tensor:
    call = lambda a: F.cross_entropy(a @ a.T, y)  # noqa: E731
    return call(z)


ONE = {"microbatches": 1}
EACH = {"microbatches": 2, "batch_statistics": "microbatch"}
COUPLED = "needs the sum over all rows|brings rows together|does not split"


def _coupled(program: Program, line: str, cause: str = COUPLED) -> Row:
    """Return the row of a program that is split into microbatches, and whose rows are not apart."""
    split, fixed = program.but(options=WHOLE), (program.but(options=ONE), program.but(options=EACH))
    fix = 'use microbatches=1, or batch_statistics="microbatch"'
    return Row(split, "QN104", cause, line, fix, fixed)


COUPLED_ROWS = {
    "NT-Xent": _coupled(net(plain, loss_fn=_ntxent), "similar = z @ z.T"),
    "NT-Xent, with len": Row(
        net(plain, loss_fn=_ntxent_by_len, options=WHOLE),
        "QN104",
        COUPLED,
        "z @ z.T / 0.1",
        'batch_statistics="microbatch", and x.shape[0] in place of len(x)',
        (net(plain, loss_fn=_ntxent_by_len, options=ONE), net(plain, loss_fn=_ntxent, options=EACH)),
    ),
    "a supervised contrastive loss": _coupled(net(plain, loss_fn=_supcon), "same = (y[:, None] == y[None])"),
    "triplets": _coupled(net(plain, loss_fn=_triplets), "apart = torch.cdist(z, z)"),
    "Barlow twins": _coupled(net(plain, loss_fn=_barlow), "z = (z - z.mean(0)) / z.std(0)"),
    "a loss in a lambda": _coupled(net(plain, loss_fn=_in_a_lambda), "F.cross_entropy(a @ a.T, y)"),
    "batch norm": _coupled(net(_normed, parts=NORM), "m.o(m.norm(m.q(x)))"),
    "roll": _coupled(net(_rolled), "m.q(x).roll(1, 0)", "the rule of aten.roll"),
    "sort": _coupled(net(_sorted), "m.q(x).sort(0)", "the rule of aten.sort"),
    "experts by a sort": _coupled(net(_experts_by_sort), "order = m.q(x).argmax", "the rule of aten.argsort"),
    "a loss of expert shares": _coupled(net(_balanced), "share"),
}
