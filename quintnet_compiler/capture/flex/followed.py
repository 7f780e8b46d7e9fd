"""Trace ``flex_attention`` as the attention operator if its mask is a function of positions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ...compat.torch import is_recording
from ...compat.torch_flex import flex_attention_by
from ...core.errors import CompileError, Where
from ...core.replaced import for_this_thread
from ...ops.attention.operator import attention
from ..changes.user_frames import user_line
from ..places import OWN
from .masks import FlexMask, mask_of
from .terms import NotFollowed

_FIX = (
    "join conditions that are followed by &: q >= k, q - k < 4, q // 8 == k // 8, ids[b, q] == ids[b, k], and what "
    "depends on b and k alone; beside a prefix: (q >= k) | (k < length[b]). For all else, call "
    "scaled_dot_product_attention with a mask"
)


@contextlib.contextmanager
def flex_attention_followed() -> Iterator[None]:
    """Let a traced forward's ``flex_attention`` be :mod:`quintnet_compiler.ops.attention.operator` inside.

    Raises:
        CompileError: QN105 for a ``score_mod``, for logs that are asked for, and for other masks.
    """
    with flex_attention_by(_run, for_this_thread):
        yield


def _run(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask_mod: Any, scale: float, more: bool, theirs: Callable[[], Any]
) -> Tensor | tuple[Any, ...]:
    if not is_recording():
        return theirs()  # type: ignore[no-any-return]
    if score_mod is not None:
        raise _refusal("a score_mod", "leave it out, and give what it hides as block_mask=create_block_mask(...)")
    if more:
        raise _refusal("what return_lse and return_aux ask for", "leave these out")
    mask = FlexMask()
    if mask_mod is not None:
        try:
            mask = mask_of(mask_mod, q.shape[0], q.shape[2], k.shape[2], q.device)
        except NotFollowed as error:
            raise _refusal(f"a mask_mod with {error}", _FIX) from None
    ids = mask.padding, mask.segments, mask.groups
    out: Tensor = attention(q, k, v, *ids, scale=scale, mask=str(mask.sight))
    return out


def _refusal(what: str, fix: str) -> CompileError:
    where = Where("", user_line(sys._getframe(2), OWN))
    return CompileError("QN105", f"flex_attention: {what} is not followed", where=where, fix=fix)
