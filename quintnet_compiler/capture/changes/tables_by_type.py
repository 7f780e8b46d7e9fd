"""Tables in the user's code with tensor classes as keys: ``TABLE[type(x)]``.

While a module is traced, its tensors have classes of the trace. For that time, tables get entries for these classes
like those for ``torch.Tensor``, so that forward takes the same branch as with real tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from torch import Tensor

from ...compat.torch import FakeTensor, FunctionalTensor
from ...guards.stand_ins import StandIn

_OF_A_TRACE: tuple[type, ...] = (FakeTensor, FunctionalTensor)
MAX_DEPTH = 3  # of dicts in dicts that are searched


@contextlib.contextmanager
def tables_by_type(values: Iterable[Any]) -> Iterator[None]:
    """Give tables among ``values`` entries for a trace's tensors inside, like those for ``torch.Tensor``."""
    added: list[tuple[MutableMapping[Any, Any], type, Any]] = []
    try:
        for table in {id(table): table for value in values for table in _tables(value, MAX_DEPTH)}.values():
            for kind in _OF_A_TRACE:
                if kind not in table:
                    table[kind] = table[Tensor]
                    added.append((table, kind, table[Tensor]))
        yield
    finally:
        for table, kind, entry in added:
            if table.get(kind) is entry:
                del table[kind]


def _tables(value: Any, depth: int) -> Iterator[MutableMapping[Any, Any]]:
    if not isinstance(value, dict) or isinstance(value, StandIn):
        return
    if Tensor in value:
        yield value
    if depth:
        for part in value.values():
            yield from _tables(part, depth - 1)
