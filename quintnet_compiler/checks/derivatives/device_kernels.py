"""Definitions of kernels that only GPUs have, so that traces with them are proven on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...compat.torch import schema

aten = torch.ops.aten


def on_cpu(target: Any) -> Callable[..., Any]:
    """Return ``target``, or its definition if the CPU has no such kernel."""
    definition = _DEFINITIONS.get(target)
    return target if definition is None else partial(_named, target, definition)


def _named(target: Any, definition: Callable[[dict[str, Any]], Any], *args: Any, **kwargs: Any) -> Any:
    names = [argument.name for argument in schema(target).arguments]
    return definition(dict(zip(names, args, strict=False)) | kwargs)


def _attention(query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return softmax(q k^T * scale + bias) v, where each head of keys and values serves a group of query heads."""
    query, key, value = (_wide(x.repeat_interleave(query.shape[1] // x.shape[1], 1)) for x in (query, key, value))
    scale = options.get("scale")
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if (bias := options.get("attn_bias")) is not None:
        scores = scores + bias
    if options.get("is_causal"):
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ value


def _wide(x: Tensor) -> Tensor:
    """Return ``x`` in 32 bits at least, in which kernels of 16 bits compute."""
    return x.float() if x.dtype.itemsize < 4 else x


def _attention_forward(arguments: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """Return the result; the other outputs are only read by the backward of the kernel."""
    query = arguments["query"]
    return _attention(query, arguments["key"], arguments["value"], arguments).to(query.dtype), *(None,) * 8


def _attention_backward(arguments: dict[str, Any]) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        leaves = [arguments[name].detach().requires_grad_() for name in ("query", "key", "value")]
        query, key, value = leaves
        result = _attention(query, key, value, arguments)
    tangent = arguments["grad_out" if "grad_out" in arguments else "grad_out_"]
    return *torch.autograd.grad(result, leaves, tangent.to(result.dtype)), None


def _rms_norm_backward(arguments: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and w in y = x * rstd * w, where rstd = (mean(x ** 2) + eps) ** -0.5."""
    dtype, sizes, weight = arguments["input"].dtype, arguments["normalized_shape"], arguments["weight"]
    x, grad, rstd = (_wide(arguments[name]) for name in ("input", "grad_out", "rstd"))
    scaled, normed = grad if weight is None else grad * _wide(weight), x * rstd
    dims = list(range(-len(sizes), 0))
    input_gradient = rstd * (scaled - normed * (scaled * normed).mean(dims, keepdim=True))
    weight_gradient = None if weight is None else (grad * normed).reshape(-1, *sizes).sum(0).to(dtype)
    return input_gradient.to(dtype), weight_gradient


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
