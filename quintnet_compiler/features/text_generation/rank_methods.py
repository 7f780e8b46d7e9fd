"""What a rank runs for attention to pages."""

from __future__ import annotations

from torch import Tensor

from ...runtime.execute.comm import Comm
from .ops import PageAccess, attend_pages


def attend_to_pages(
    comm: Comm, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, table: Tensor, places: Tensor,
    scale: float, window: int, at: int,
) -> Tensor:  # fmt: skip
    """Compute attention to cached keys and values, see :mod:`.ops`. All layers of a call read the same pages."""
    key = "pages", id(table), id(places), window, q.dtype
    if key not in comm.shared:
        comm.shared[key] = PageAccess.of(keys, table, places, window, q.dtype), table, places
    return attend_pages((q, k, v), (keys, values), comm.shared[key][0], scale)
