"""Attention as PyTorch's CUDA builds run it, for programs that are compiled where there is no CUDA.

Which kernel runs is decided in C++ that other builds do not have
(``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, and ``scaled_dot_product_attention`` in
``aten/src/ATen/native/transformers/attention.cpp``; PyTorch 2.13). The same decisions are made here for dense tensors:

- first cuDNN, on the GPUs for which PyTorch prefers it: 16 bits, features per head a multiple of 8 up to 128;
- then flash attention: 16 bits, up to 256 features per head, no mask, compute capability 8.0 or newer;
- then memory-efficient attention: 32 or 16 bits, rows of a multiple of 16 bytes, as many heads of keys as of queries;
- else matmuls and a softmax.

A kernel that ``torch.backends.cuda`` has switched off is left out. On a machine with CUDA, PyTorch decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core.absent_gpu import AbsentGpu
from .operator import attend, attention

AttentionKernel = Literal["cudnn", "flash", "efficient", "math"]
aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
CUDNN_FEATURES = 128  # of a head, at most: more depend on cuDNN's version
_LOWEST = -65504.0  # what hides a position from cuDNN, which takes no -inf


@dataclass(frozen=True)
class CudaAttention:
    """A call: q [B, H, S, D], k [B, G, T, D], v [B, G, T, E], and a mask that broadcasts to [B, H, S, T]."""

    gpu: AbsentGpu
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    grouped: bool

    def kernel(self) -> AttentionKernel:
        """Return the first kernel that takes these tensors."""
        cuda = torch.backends.cuda
        if self._fits():
            if cuda.cudnn_sdp_enabled() and self.gpu.cudnn and self._cudnn():  # type: ignore[no-untyped-call]
                return "cudnn"
            if cuda.flash_sdp_enabled() and self._flash():  # type: ignore[no-untyped-call]
                return "flash"
            if cuda.mem_efficient_sdp_enabled() and self._efficient():  # type: ignore[no-untyped-call]
                return "efficient"
        return "math"

    def _fits(self) -> bool:
        """Return whether the tensors are as all fused kernels require."""
        tensors = (self.q, self.k, self.v)
        rows = all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in tensors)
        return (
            all(x.dim() == 4 and x.dtype == self.q.dtype and x.shape[0] == self.q.shape[0] for x in tensors)
            and 0 not in (self.q.shape[-2], self.k.shape[-2])
            and rows
            and (self.mask is None or self.mask.stride(-1) == 1)
        )

    def _heads(self, *, grouped: bool, alike: bool = True) -> bool:
        """Return whether the numbers of heads suit a kernel that takes groups of them, or does not (``grouped``)."""
        q, k, v = (x.shape[1] for x in (self.q, self.k, self.v))
        if not (grouped and self.grouped):
            return q == k == v
        return (k == v or not alike) and q % k == 0 and q % v == 0

    def _half(self) -> bool:
        return self.q.dtype in (_HALF if self.gpu.capability >= (8, 0) else _HALF[:1])

    def _cudnn(self) -> bool:
        features = (self.q.shape[-1], self.v.shape[-1])
        exact = (
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
        return (
            self._half()
            and not exact
            and self._heads(grouped=True, alike=False)
            and all(n % 8 == 0 and n <= CUDNN_FEATURES for n in features)
            and self.k.shape[-2] != 1
            and not (self.dropout and self.q.shape[-2] == 1)
            and (self.mask is None or (not self.mask.requires_grad and self._broadcasts(self.mask)))
        )

    def _broadcasts(self, mask: Tensor) -> bool:
        """Return whether a mask is [queries, keys] or [rows, heads, queries, keys]; sizes of 1 stand for any."""
        whole = (*self.q.shape[:3], self.k.shape[2])
        return mask.dim() in (2, 4) and all(
            n in (1, full) for n, full in zip(mask.shape, whole[-mask.dim() :], strict=True)
        )

    def _flash(self) -> bool:
        return (
            self.mask is None
            and self.gpu.capability >= (8, 0)
            and self._half()
            and self._heads(grouped=True)
            and self.q.shape[-1] == self.k.shape[-1] == self.v.shape[-1] <= 256
            and not (self.causal and self.q.shape[-2] != self.k.shape[-2])
        )

    def _efficient(self) -> bool:
        wide, newer = self.q.dtype is torch.float32, self.gpu.capability >= (8, 0)
        multiple = 16 // self.q.element_size() if newer or not wide else 1
        features = (self.q.shape[-1], self.v.shape[-1])
        return (
            (wide or self._half())
            and self._heads(grouped=False)
            and all(x.stride(-1) == 1 for x in (self.q, self.k, self.v))
            and self.q.shape[-1] == self.k.shape[-1]
            and all(n > 0 and n % multiple == 0 for n in features)
        )

    def __call__(self, scale: float | None) -> Tensor:
        results: Any
        kernel, (q, k, v) = self.kernel(), (self.q, self.k, self.v)
        needs_logs = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))  # a backward reads them
        common = (self.dropout, self.causal)
        if kernel == "cudnn":
            mask = self._added(_LOWEST)
            results = aten._scaled_dot_product_cudnn_attention(q, k, v, mask, needs_logs, *common, False, scale=scale)
            return _first(results)
        if kernel == "flash":
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            results = aten._scaled_dot_product_flash_attention(*map(_padded, (q, k, v)), *common, False, scale=scale)
            out = _first(results)
            return out if out.shape[-1] == q.shape[-1] else out[..., : q.shape[-1]]
        mask = self._added(float("-inf"))
        if kernel == "efficient":
            mask = None if mask is None else self._aligned(mask)
            return _first(aten._scaled_dot_product_efficient_attention(q, k, v, mask, needs_logs, *common, scale=scale))
        results = aten._scaled_dot_product_attention_math(
            q, k, v, mask, *common, None, scale=scale, enable_gqa=self.grouped
        )
        return _first(results)

    def _added(self, hidden: float) -> Tensor | None:
        """Return the mask as a bias that is added to scores."""
        mask = self.mask
        if mask is None or mask.dtype is not torch.bool:
            return mask
        return SHIPPED.where(mask, 0.0, torch.scalar_tensor(hidden, dtype=self.q.dtype, device=mask.device))

    def _aligned(self, mask: Tensor) -> Tensor:
        """Return ``mask`` as memory-efficient attention takes it: of every head, rows at multiples of 8 elements."""
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
            size = mask.shape[-1]
            mask = F.pad(mask, (0, 8 - size % 8))[..., :size]
        return mask.expand(*self.q.shape[:3], self.k.shape[2])


def _first(results: Any) -> Tensor:
    out: Tensor = results[0]
    return out


def _padded(x: Tensor) -> Tensor:
    """Pad with zeros to a multiple of 8 features."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


def _attention(
    gpu: AbsentGpu,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return CudaAttention(gpu, q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)(scale)


def on_gpu(target: Callable[..., Any], gpu: AbsentGpu) -> Callable[..., Any]:
    """Return an operator as ``gpu`` would run it: attention calls the operators of its kernels, others are as is."""
    if target is aten.scaled_dot_product_attention.default:
        return partial(_attention, gpu)
    return partial(attend, kernel=partial(_attention, gpu)) if target is attention else target
