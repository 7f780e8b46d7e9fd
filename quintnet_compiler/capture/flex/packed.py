"""Trace ``varlen_attn``, attention of consecutive documents, as the attention operator."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...compat.torch import is_recording
from ...compat.torch_varlen import VarlenCall, varlen_attention_by
from ...core.errors import CompileError, Where
from ...core.replaced import for_this_thread
from ...ops.attention.blocks import Sight
from ...ops.attention.operator import attention
from ..changes.user_frames import user_line
from ..places import OWN


@contextlib.contextmanager
def varlen_attention_followed() -> Iterator[None]:
    """Let a traced forward's ``varlen_attn`` be :mod:`quintnet_compiler.ops.attention.operator` inside.

    Positions after the last end, which PyTorch leaves undefined, are another document.

    Raises:
        CompileError: QN105 for keys of other documents than those of queries, for windows ahead of a query, and for
            ``return_aux``, ``seqused_k`` and ``block_table``.
    """
    with varlen_attention_by(_run, for_this_thread):
        yield


def _run(call: VarlenCall, theirs: Callable[[], Any]) -> Tensor | tuple[Any, ...]:
    if not is_recording():
        return theirs()  # type: ignore[no-any-return]
    if call.more is not None:
        raise _refusal(f"what {call.more} asks for", "leave it out")
    if call.q_ends is not call.k_ends:
        fix = "give one tensor as both cu_seq_q and cu_seq_k, if they are equal"
        raise _refusal("documents of keys that may not be those of queries", fix)
    if call.right > 0 or (call.right < 0 <= call.left):
        raise _refusal(f"window_size={(call.left, call.right)}", "say (-1, -1), (-1, 0) or (n, 0)")
    sight = Sight(call.right == 0, call.left + 1 if call.left >= 0 else 0)
    positions = torch.arange(call.q.shape[0], device=call.q.device)
    documents = torch.bucketize(positions, call.q_ends[1:], right=True).unsqueeze(0)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (call.q, call.k, call.v))
    scale = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
    out: Tensor = attention(q, k, v, None, documents, None, scale=scale, mask=str(sight))
    return out.squeeze(0).transpose(0, 1)


def _refusal(what: str, fix: str) -> CompileError:
    where = Where("", user_line(sys._getframe(2), OWN))
    return CompileError("QN105", f"varlen_attn: {what} is not followed", where=where, fix=fix)
