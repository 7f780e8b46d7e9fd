"""Kernels of attention that also give each query's log of the sum of exponentials, so that attention to some keys can
be added to attention to others; and their backward, whose results are terms if output and log are those of all keys.

Shapes: q [B, H, S, D], k [B, G, T, D], v [B, G, T, D]; a bias that is added to scores broadcasts to [B, H, S, T]; the
log of the sum [B, H, S]. ``causal``: of a block that is square.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core.absent_gpu import AbsentGpu
from ...core.precision import widened
from .cuda import CudaAttention

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]
_CPU = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LOGS = 32  # memory-efficient attention keeps a multiple of so many logs


@dataclass(frozen=True)
class Operands:
    """Queries, keys and values of one call, and what is added to their scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    causal: bool = False

    def by_key_head(self) -> Operands:
        """Make each group of heads that share keys a row of the batch, for kernels that do not know groups."""
        groups, heads = self.k.shape[1], self.q.shape[1] // self.k.shape[1]
        if heads == 1:
            return self
        k, v = (x.flatten(0, 1).unsqueeze(1).expand(-1, heads, -1, -1) for x in (self.k, self.v))
        bias = self.bias
        if bias is not None and bias.shape[0] > 1:
            bias = bias.repeat_interleave(groups, 0)
        return Operands(self.grouped(self.q), k, v, bias, self.causal)

    def grouped(self, x: Tensor) -> Tensor:
        """Make each group of heads of [B, H, ...] a row of the batch."""
        groups = self.k.shape[1]
        return x if groups == x.shape[1] else SHIPPED.unflatten(x, 1, (groups, -1)).flatten(0, 1)

    def ungrouped(self, of_q: Tensor, of_k: Tensor, of_v: Tensor) -> Gradients:
        """Return the gradients of these from those of :meth:`by_key_head`, in which all heads of a group have terms."""
        if self.q.shape[1] == self.k.shape[1]:
            return of_q, of_k, of_v
        wide = widened(self.q.dtype)
        of_k, of_v = (x.sum(1, dtype=wide).view(self.k.shape) for x in (of_k, of_v))
        return of_q.reshape(self.q.shape), of_k, of_v


@dataclass(frozen=True)
class Lengths:
    """Runs of queries and of keys of unequal lengths, one after the other.

    Attributes:
        q, k, v: queries [S, H, D], keys [T, G, D] and values [T, G, D] of all runs.
        q_ends, k_ends: where each run ends among all, after a 0 (int32, on the device).
        most_q, most_k: the lengths of the longest runs.
        left, right: which keys a query sees, see :class:`.blocks.AttentionSpan`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_ends: Tensor
    k_ends: Tensor
    most_q: int
    most_k: int
    left: int
    right: int


class LengthsKernel(Protocol):
    """A kernel of attention for :class:`Lengths`, in which each query sees a key."""

    def forward(self, runs: Lengths, scale: float) -> tuple[Tensor, Tensor]:
        """Return the attention [S, H, D], and the logs [H, S]."""

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor, runs: Lengths, scale: float) -> Gradients:
        """Return the gradients of q, k and v."""


class AttentionKernel(Protocol):
    """A kernel of attention on a device.

    ``fused``: it keeps no scores in memory. ``lengths``: the kernel for all that needs no bias.
    """

    @property
    def fused(self) -> bool: ...

    @property
    def lengths(self) -> LengthsKernel | None: ...

    def forward(self, operands: Operands, scale: float) -> tuple[Tensor, Tensor]:
        """Return the attention, and the logs."""

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor, operands: Operands, scale: float) -> Gradients:
        """Return the gradients of q, k and v."""


def kernel_for(q: Tensor, k: Tensor, v: Tensor) -> AttentionKernel:
    """Return the kernel that these tensors run on, whatever part of them is seen."""
    if q.device.type == "cpu" and q.dtype in _CPU:
        return CpuKernel()
    if q.device.type == "cuda":
        gpu = AbsentGpu(torch.cuda.get_device_capability(q.device), cudnn=False)
        operands = Operands(q, k, v).by_key_head()
        some_mask = q[:1, :1, :1, :1]
        if CudaAttention(gpu, operands.q, operands.k, operands.v, some_mask, 0.0, False, False).kernel() == "efficient":
            flash = CudaAttention(gpu, q, k, v, None, 0.0, False, True).kernel() == "flash"
            return CudaKernel(FlashLengths() if flash else None)
    return Matmuls()


class CpuKernel:
    """Flash attention on CPUs."""

    fused = True
    lengths = None

    def forward(self, operands: Operands, scale: float) -> tuple[Tensor, Tensor]:
        x = operands.by_key_head()
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            x.q, x.k, x.v, 0.0, x.causal, attn_mask=x.bias, scale=scale
        )
        return out.reshape(operands.q.shape), lse.reshape(operands.q.shape[:3])

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor, operands: Operands, scale: float) -> Gradients:
        x = operands.by_key_head()
        grad, out, lse = (operands.grouped(tensor) for tensor in (grad, out, lse))
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, x.q, x.k, x.v, out, lse, 0.0, x.causal, attn_mask=x.bias, scale=scale
        )
        return operands.ungrouped(*gradients)


class FlashLengths:
    """Flash attention on CUDA (Dao 2023), of 16 bits."""

    def forward(self, runs: Lengths, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._flash_attention_forward(
            runs.q, runs.k, runs.v, *_ends_and_longest(runs), 0.0, _causal(runs), False, scale=scale, **_window(runs)
        )
        return out, lse

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor, runs: Lengths, scale: float) -> Gradients:
        seed = SHIPPED.zeros(2, dtype=torch.uint64, device=grad.device)  # of dropout, of which there is none
        gradients: Gradients = aten._flash_attention_backward(
            grad, runs.q, runs.k, runs.v, out, lse.contiguous(), *_ends_and_longest(runs), 0.0, _causal(runs), seed,
            torch.empty(0, device=grad.device), scale=scale, **_window(runs),
        )  # fmt: skip
        return gradients


def _ends_and_longest(runs: Lengths) -> tuple[Tensor, Tensor, int, int]:
    """Return the ends of queries and of keys, and a bound of their lengths for each.

    The bound is 2 or more: one query alone is laid out in another way, and a window of at least so many keys is taken
    for none, also where queries are ahead of the last key.
    """
    longest = max(2, runs.most_q, runs.most_k)
    return runs.q_ends, runs.k_ends, longest, longest


def _causal(runs: Lengths) -> bool:
    return (runs.left, runs.right) == (-1, 0)


def _window(runs: Lengths) -> dict[str, int]:
    """Return a kernel's options for a window; none for causality alone, for which kernels have another option."""
    if _causal(runs) or (runs.left, runs.right) == (-1, -1):
        return {}
    return {"window_size_left": runs.left, "window_size_right": runs.right}


@dataclass(frozen=True)
class CudaKernel:
    """Memory-efficient attention."""

    lengths: LengthsKernel | None
    fused = True

    def forward(self, operands: Operands, scale: float) -> tuple[Tensor, Tensor]:
        x = operands.by_key_head()
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            x.q, x.k, x.v, _expanded(x), True, 0.0, x.causal, scale=scale
        )
        return out.reshape(operands.q.shape), lse.narrow(-1, 0, x.q.shape[2]).reshape(operands.q.shape[:3])

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor, operands: Operands, scale: float) -> Gradients:
        x = operands.by_key_head()
        grad, out, lse = (operands.grouped(tensor) for tensor in (grad, out, lse))
        rows = out.transpose(1, 2)
        if not rows.is_contiguous():  # kernels of 16 bits read it as [B, S, H, D] in memory, whatever its strides are
            out = rows.clone(memory_format=torch.contiguous_format).transpose(1, 2)
        lse = F.pad(lse, (0, -lse.shape[-1] % _LOGS), value=float("inf")).contiguous()
        seed = SHIPPED.zeros((), dtype=torch.int64, device=grad.device)  # of dropout, of which there is none
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            grad, x.q, x.k, x.v, _expanded(x), out, lse, seed, seed, 0.0, [True, True, True, False], x.causal,
            scale=scale,
        )[:3]  # fmt: skip
        return operands.ungrouped(*gradients)


def _expanded(operands: Operands) -> Tensor | None:
    """Return the bias as memory-efficient attention takes it: of every head, rows at multiples of 16 bytes."""
    if operands.bias is None:
        return None
    keys = operands.k.shape[2]
    aligned = F.pad(operands.bias, (0, -keys % 8)).narrow(-1, 0, keys)
    return aligned.expand(*operands.q.shape[:3], keys)


class Matmuls:
    """Matrix products and a softmax, in a wide dtype, for what no kernel takes."""

    fused = False
    lengths = None

    def forward(self, operands: Operands, scale: float) -> tuple[Tensor, Tensor]:
        scores = self._scores(operands, scale)
        lse = scores.logsumexp(-1, keepdim=True)
        out = _rows((scores - lse).exp_()) @ operands.v.to(lse.dtype)
        return out.view(*operands.q.shape[:3], -1), lse.view(operands.q.shape[:3])

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor, operands: Operands, scale: float) -> Gradients:
        scores = self._scores(operands, scale)
        by_group: Callable[[Tensor], Tensor] = lambda x: x.to(scores.dtype).reshape(*scores.shape[:-1], -1)  # noqa: E731
        weights = (scores - by_group(lse)).exp_()
        grad, out, q = (by_group(x) for x in (grad, out, operands.q))
        rows = _rows(grad)
        slopes = (rows @ operands.v.to(scores.dtype).mT).view(scores.shape)
        slopes = _rows(slopes.sub_((grad * out).sum(-1, keepdim=True)).mul_(weights).mul_(scale))
        of_q = (slopes @ operands.k.to(scores.dtype)).view(operands.q.shape)
        return of_q, slopes.mT @ _rows(q), _rows(weights).mT @ rows

    def _scores(self, operands: Operands, scale: float) -> Tensor:
        """Return the scores [B, key heads, query heads of each, queries, keys]."""
        q, k, wide = operands.q, operands.k, widened(operands.q.dtype)
        batch, heads, count, _ = q.shape
        grouped = q.to(wide).reshape(batch, k.shape[1], heads // k.shape[1], count, -1)
        scores = (_rows(grouped) @ k.to(wide).mT).view(*grouped.shape[:-1], -1).mul_(scale)
        if operands.bias is not None:
            scores += operands.bias.unsqueeze(1)
        if operands.causal:
            seen = SHIPPED.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril_()
            scores.masked_fill_(~seen, float("-inf"))
        return scores


def _rows(x: Tensor) -> Tensor:
    """Make the query heads of a key head rows of one matrix."""
    return x.flatten(2, 3)
