"""Casts to fewer bits with scales, of parameters: which parameter a value is."""

from __future__ import annotations

import torch
from torch import fx

from ..core.annotations import copied_from, leaf
from .catalog import op_spec

aten = torch.ops.aten
_VIEWS = frozenset({aten.detach.default, aten.unsqueeze.default})


def parameter_of(node: fx.Node) -> fx.Node | None:
    """Return the parameter that ``node`` is, or of which it is a cast or a scale; None if it is something else.

    A parameter may be in the bits in which ranks store it, or in those that operators read.
    """
    source = node
    while source.target in _VIEWS or op_spec(source).cast_step:
        source = source.all_input_nodes[0]
    source = copied_from(source) or source
    info = leaf(source)
    return source if info is not None and info.kind == "parameter" else None
