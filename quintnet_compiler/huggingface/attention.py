"""Attention of Hugging Face models as one operator.

While a model is captured, the registries' entries for ``sdpa`` are replaced by functions of this file. They know masks
that are made of causality, a window, chunks, padding, packed documents and groups whose members see each other;
whatever else a model asks for (a bias, a soft cap,
a mask of its own, dropout) goes to the function that was there, whose operators have rules of their own. So do models
that are configured for another implementation.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..compat.transformers import attention_registries, mask_parts
from ..core.replaced import for_this_thread
from ..ops.attention.blocks import Sight
from ..ops.attention.operator import attention
from .masks import KnownMask, known_mask

_NAME = "sdpa"
_KNOWN = "quintnet_known"  # attribute of a mask that says what it is made of; a mask computed from it has none


@contextlib.contextmanager
def attention_as_one_operator() -> Iterator[None]:
    """While inside, ``sdpa`` in Hugging Face's registries is what this file makes of it."""
    registries = attention_registries()
    if registries is None or any(_NAME not in registry for registry in registries):
        yield
        return
    functions, masks = registries
    was, mask_was = functions[_NAME], masks[_NAME]
    functions.register(_NAME, for_this_thread(_attend(was), was))
    masks.register(_NAME, for_this_thread(_mask(mask_was), mask_was))
    try:
        yield
    finally:
        functions.register(_NAME, was)
        masks.register(_NAME, mask_was)


def _mask(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def mask(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if isinstance(result, Tensor):
            setattr(result, _KNOWN, _known(inspect.signature(original).bind(*args, **kwargs)))
        return result

    return mask


def _known(call: inspect.BoundArguments) -> KnownMask | None:
    """Return what the mask of a call consists of; None where it is something else."""
    call.apply_defaults()
    arguments = call.arguments
    lengths = [arguments[name] for name in ("q_length", "kv_length", "q_offset", "kv_offset")]
    if not all(isinstance(n, int) for n in lengths) or lengths[2:] != [0, 0]:
        return None
    part = mask_parts(arguments["mask_function"])
    if part is None:
        return None
    padding = arguments["attention_mask"]
    if padding is not None and (padding.dim() != 2 or padding.shape[1] != lengths[1]):
        return None
    mask = known_mask(part, lengths[1], arguments.get("device"))
    if mask is None or (not mask.everything and lengths[0] != lengths[1]):
        return None
    return replace(mask, padding=padding)


def _attend(original: Callable[..., Any]) -> Callable[..., Any]:
    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        mask = KnownMask(Sight(bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)))
        if attention_mask is not None:
            mask = getattr(attention_mask, _KNOWN, None)  # type: ignore[assignment]
        groups = getattr(module, "num_key_value_groups", 1)
        more = any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux", "cache"))
        if mask is None or dropout or more or not _fits(query, key, value, groups, mask):
            options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
            output: tuple[Tensor, None] = original(module, query, key, value, attention_mask, **options)
            return output
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        ids = (None if x is None else x.expand(query.shape[0], -1) for x in (mask.segments, mask.groups))
        out = attention(query, key, value, mask.padding, *ids, scale=scale, mask=str(mask.sight))
        return out.transpose(1, 2).contiguous(), None

    return attend


def _fits(query: Tensor, key: Tensor, value: Tensor, groups: int, mask: KnownMask) -> bool:
    """Return whether nothing broadcasts but heads of keys, and causality has one meaning."""
    if query.dim() != 4 or key.shape[1] != value.shape[1] or query.shape[1] != key.shape[1] * groups:
        return False
    if len({str(x.shape[0]) for x in (query, key, value)}) > 1:  # comparing would fix the number of rows
        return False
    return not mask.sight.causal or query.shape[2] == key.shape[2]
