"""Operators that take functions (``torch.cond``, ``scan``, ``map``, ``while_loop``, ``flex_attention``) in Python.

The module itself runs with them, and with ``varlen_attn`` in Python. torch's own need torch.compile, which does not run
inside the modes that watch a module; on CPUs ``flex_attention`` has no backward, and ``varlen_attn`` no kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat.torch import pytree
from ..compat.torch_control_flow import control_flow_by
from ..compat.torch_flex import flex_attention_by
from ..compat.torch_varlen import VarlenCall, varlen_attention_by
from ..core.replaced import for_this_thread


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """Choose branches and run loops in Python inside, and compute all scores of attention."""
    flex = flex_attention_by(_attend, for_this_thread)
    with control_flow_by(_run, for_this_thread), flex, varlen_attention_by(_attend_packed, for_this_thread):
        yield


def _attend(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask_mod: Any, scale: float, more: bool, theirs: Callable[[], Any]
) -> Tensor | tuple[Any, ...]:
    """Compute all scores, then hide those that a mask excludes; a query that sees nothing gives 0."""
    if score_mod is not None or more:
        return theirs()  # type: ignore[no-any-return]
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * scale
    if mask_mod is not None:
        from torch.nn.attention.flex_attention import create_mask  # which only models that use it have loaded

        batch, heads, queries, keys = scores.shape
        seen = create_mask(mask_mod, batch, heads, queries, keys, scores.device)
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ v


def _attend_packed(call: VarlenCall, theirs: Callable[[], Any]) -> Tensor | tuple[Any, ...]:
    """Compute attention document by document."""
    if call.more is not None or call.q_ends is not call.k_ends:
        return theirs()  # type: ignore[no-any-return]
    sizes = call.q_ends.diff().tolist()
    outs = []
    parts = (torch.split(x, [*sizes, len(x) - sum(sizes)]) for x in (call.q, call.k, call.v))
    for q, k, v in zip(*parts, strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if call.scale is None else call.scale)
        ahead = torch.arange(len(k), device=q.device) - torch.arange(len(q), device=q.device)[:, None]
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if call.right >= 0:
            hidden |= ahead > call.right
        if call.left >= 0:
            hidden |= -ahead > call.left
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
    return torch.cat(outs)


def _run(name: str, arguments: Sequence[Any], theirs: Callable[[], Any]) -> Any:
    if name == "cond":
        predicate, yes, no, operands = arguments
        return yes(*operands) if predicate else no(*operands)
    if name == "while_loop":
        goes_on, body, held, others = arguments
        while goes_on(*held, *others):
            held = body(*held, *others)
        return tuple(x.clone() if isinstance(x, Tensor) else x for x in held)
    if name == "map":
        function, inputs, others = arguments
        results = [function(*row, *others) for row in zip(*inputs, strict=True)]
        return pytree.tree_map(lambda *parts: torch.stack(parts), *results)
    if name != "scan":
        return theirs()
    step, carry, inputs = arguments
    rows: list[tuple[Tensor, ...]] = list(zip(*(x.unbind(0) for x in inputs), strict=True))
    outs: list[list[Any]] = []
    for row in rows:
        held, out = step(*carry, *row)
        carry, form = pytree.tree_leaves(held), pytree.tree_flatten(out)[1]
        outs.append(pytree.tree_leaves(out))
    return held, pytree.tree_unflatten([torch.stack(column) for column in zip(*outs, strict=True)], form)
