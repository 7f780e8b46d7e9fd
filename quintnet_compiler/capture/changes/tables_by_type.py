"""Tables of a user's code that have the class of a tensor as a key: ``TABLE[type(x)]``.

While a module is traced, its tensors are of classes of the trace. So for that time what a table has of ``torch.Tensor``
it has of these, too: forward takes the way that it takes with real tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from torch import Tensor

from ...compat.torch import FakeTensor, FunctionalTensor
from ...guards.stand_ins import StandIn

_OF_A_TRACE: tuple[type, ...] = (FakeTensor, FunctionalTensor)
DEPTH = 3  # of tables in objects that hold them


@contextlib.contextmanager
def tables_by_type(values: Iterable[Any]) -> Iterator[None]:
    """While inside, the tables among ``values`` have entries of a trace's tensors: those of ``torch.Tensor``."""
    added: list[tuple[MutableMapping[Any, Any], type, Any]] = []
    try:
        for table in {id(table): table for value in values for table in _tables(value, DEPTH)}.values():
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
