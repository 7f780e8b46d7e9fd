"""What operators that take functions mean (``torch.cond``, ``scan``, ``map``, ``while_loop``, ``flex_attention``), in
Python: for the module itself beside a program. They need torch.compile, which does not run inside the modes that watch
a module, and ``flex_attention`` has no backward on CPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat.torch import pytree
from ..compat.torch_control_flow import control_flow_by
from ..compat.torch_flex import flex_attention_by
from ..core.replaced import for_this_thread


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """While inside, branches are chosen and loops run in Python, and attention has all its scores."""
    with control_flow_by(_run, for_this_thread), flex_attention_by(_attend, for_this_thread):
        yield


def _attend(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask_mod: Any, scale: float, more: bool, theirs: Callable[[], Any]
) -> Tensor | tuple[Any, ...]:
    """Every score, and then those that a mask hides are gone; a query that sees nothing gives 0."""
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
        function, given, others = arguments
        made = [function(*row, *others) for row in zip(*given, strict=True)]
        return pytree.tree_map(lambda *parts: torch.stack(parts), *made)
    if name != "scan":
        return theirs()
    step, carry, given = arguments
    rows: list[tuple[Tensor, ...]] = list(zip(*(x.unbind(0) for x in given), strict=True))
    outs: list[list[Any]] = []
    for row in rows:
        held, out = step(*carry, *row)
        carry, form = pytree.tree_leaves(held), pytree.tree_flatten(out)[1]
        outs.append(pytree.tree_leaves(out))
    return held, pytree.tree_unflatten([torch.stack(column) for column in zip(*outs, strict=True)], form)
