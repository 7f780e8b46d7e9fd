"""The kind of work that an operator is, for prices."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ..catalog import name_of, op_spec, spec_of
from .notation import Work
from .table import RULES

_TAGS = frozenset({torch.Tag.pointwise, torch.Tag.reduction})
_OF_RULES: Mapping[str, Work] = MappingProxyType(
    {name: rule.work for rule in RULES.values() if rule.work is not None and (name := name_of(rule.target)) is not None}
)


def work_of(target: Any) -> Work | None:
    """Return what an operator is priced as, by its rule (or that of another overload), its spec, or torch's tags.

    None: none of them says it.
    """
    name = name_of(target)
    if name is None:
        return None
    if name in _OF_RULES:
        return _OF_RULES[name]
    rule = RULES.get(target)  # of a feature's operator
    if rule is not None:
        return rule.work
    return spec_of(target).work or ("memory" if _TAGS.intersection(target.tags) else None)


def takes_long(node: fx.Node) -> bool:
    """Return whether a node takes longer than a pass over memory on this rank: a matmul, attention, sorting."""
    fused = work_of(node.target) == "attention" and not op_spec(node).communicates
    return fused or spec_of(node.target).keep
