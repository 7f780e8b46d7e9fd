"""Kernels that only GPUs have, as their definitions: what traces with them compute is proven on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ....compat.torch import schema

aten = torch.ops.aten


def on_cpu(target: Any) -> Callable[..., Any]:
    """``target``, or what it is defined as if the CPU has no such kernel."""
    definition = _DEFINITIONS.get(target)
    return target if definition is None else partial(_named, target, definition)


def _named(target: Any, definition: Callable[[dict[str, Any]], Any], *args: Any, **kwargs: Any) -> Any:
    names = [known.name for known in schema(target).arguments]
    return definition(dict(zip(names, args, strict=False)) | kwargs)


def _attention(query: Tensor, key: Tensor, value: Tensor, given: Mapping[str, Any]) -> Tensor:
    """softmax(q k^T * scale + bias) v; each head of keys and of values serves a group of queries'."""
    query, key, value = (_wide(x.repeat_interleave(query.shape[1] // x.shape[1], 1)) for x in (query, key, value))
    scale = given.get("scale")
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if (bias := given.get("attn_bias")) is not None:
        scores = scores + bias
    if given.get("is_causal"):
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ value


def _wide(x: Tensor) -> Tensor:
    """Kernels of 16 bits compute in 32."""
    return x.float() if x.dtype.itemsize < 4 else x


def _attention_forward(given: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """The result; what is beside it, only the kernel's own backward reads."""
    query = given["query"]
    return _attention(query, given["key"], given["value"], given).to(query.dtype), *(None,) * 8


def _attention_backward(given: dict[str, Any]) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        leaves = [given[name].detach().requires_grad_() for name in ("query", "key", "value")]
        query, key, value = leaves
        made = _attention(query, key, value, given)
    arrives = given["grad_out" if "grad_out" in given else "grad_out_"]
    return *torch.autograd.grad(made, leaves, arrives.to(made.dtype)), None


def _rms_norm_backward(given: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """Of y = x * rstd * w, where rstd = (mean(x ** 2) + eps) ** -0.5."""
    dtype, sizes, weight = given["input"].dtype, given["normalized_shape"], given["weight"]
    x, grad, rstd = (_wide(given[name]) for name in ("input", "grad_out", "rstd"))
    scaled, normed = grad if weight is None else grad * _wide(weight), x * rstd
    dims = list(range(-len(sizes), 0))
    of_input = rstd * (scaled - normed * (scaled * normed).mean(dims, keepdim=True))
    of_weight = None if weight is None else (grad * normed).reshape(-1, *sizes).sum(0).to(dtype)
    return of_input.to(dtype), of_weight


_DEFINITIONS: Mapping[Any, Callable[[dict[str, Any]], Any]] = MappingProxyType(
    {
        **dict.fromkeys(
            [
                aten._scaled_dot_product_flash_attention.default,
                aten._scaled_dot_product_efficient_attention.default,
                aten._scaled_dot_product_cudnn_attention.default,
            ],
            _attention_forward,
        ),
        **dict.fromkeys(
            [
                aten._scaled_dot_product_flash_attention_backward.default,
                aten._scaled_dot_product_efficient_attention_backward.default,
                aten._scaled_dot_product_cudnn_attention_backward.default,
            ],
            _attention_backward,
        ),
        aten._fused_rms_norm_backward.default: _rms_norm_backward,
    }
)
