"""What ``torch.cond``, ``scan``, ``map`` and ``while_loop`` mean, in Python: for the module itself beside a program.
All need torch.compile, which does not run inside the modes that watch a module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat.torch import pytree
from ..compat.torch_control_flow import control_flow_by
from ..core.replaced import for_this_thread


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """While inside, branches are chosen and loops run in Python."""
    with control_flow_by(_run, for_this_thread):
        yield


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
