"""Attention of spans of unequal lengths, written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quintnet_compiler.ops.attention.kernels import Gradients, Lengths


class LoopedSpans:
    """Each span of a call by itself, by matmuls and a mask."""

    def __init__(self) -> None:
        self.spans = list[int]()

    def forward(self, given: Lengths, scale: float) -> tuple[Tensor, Tensor]:
        self.spans.append(len(given.q_ends) - 1)
        found = [self._one(given, i, scale) for i in range(len(given.q_ends) - 1)]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found]).T

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor, given: Lengths, scale: float) -> Gradients:
        """Of attention to all keys, whose logs are given."""
        wide = [torch.zeros_like(x) for x in (given.q, given.k, given.v)]
        for i in range(len(given.q_ends) - 1):
            (rows, q), (cols, k, v), seen = self._span(given, i)
            weights = torch.einsum("shd,thd->hst", q, k).mul(scale).sub(lse[:, rows, None]).exp() * seen
            slopes = torch.einsum("she,the->hst", grad[rows], v) - (grad[rows] * out[rows]).sum(-1).T[..., None]
            slopes = slopes * weights * scale
            wide[0][rows] += torch.einsum("hst,thd->shd", slopes, k)
            groups = given.k.shape[1]
            for into, term in (
                (wide[1], torch.einsum("hst,shd->thd", slopes, q)),
                (wide[2], torch.einsum("hst,she->the", weights, grad[rows])),
            ):
                into[cols] += term.unflatten(1, (groups, -1)).sum(2)
        of_q, of_k, of_v = wide
        return of_q, of_k, of_v

    def _one(self, given: Lengths, i: int, scale: float) -> tuple[Tensor, Tensor]:
        (_, q), (_, k, v), seen = self._span(given, i)
        assert seen.any(-1).all()
        scores = torch.einsum("shd,thd->hst", q, k).mul(scale).masked_fill(~seen, float("-inf"))
        return torch.einsum("hst,the->she", scores.softmax(-1), v), scores.logsumexp(-1).T

    def _span(self, given: Lengths, i: int) -> Any:
        rows, cols = (slice(int(x[i]), int(x[i + 1])) for x in (given.q_ends, given.k_ends))
        q, k, v = given.q[rows], given.k[cols], given.v[cols]
        assert 0 < len(q) <= given.most_q and 0 < len(k) <= given.most_k
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if given.left >= 0:
            seen &= ahead >= -given.left
        if given.right >= 0:
            seen &= ahead <= given.right
        return (rows, q), (cols, k, v), seen
