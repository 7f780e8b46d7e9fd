"""Communication as operators, so that every move of data is a node of the graph.

They name a mesh *axis*, never a process group or a rank: graphs of all ranks read the same, and the runtime binds
axes to groups. Here they only know shapes (for tracing); a transport gives them meaning when a program runs.

``convert`` is the typed move that sharding asks for; ``differentiate`` lowers it and its transpose to the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .sharding import AxisType, P, Shard, plain

_library = torch.library.Library("quintnet", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, shape: Callable[..., Tensor]) -> torch._ops.OpOverload:
    _library.define(schema)  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    torch.library.register_fake(f"quintnet::{name}", shape, lib=_library)
    overload: torch._ops.OpOverload = getattr(torch.ops.quintnet, name).default
    return overload


def _resized(x: Tensor, dim: int, times: int = 1, over: int = 1) -> Tensor:
    return x.new_empty([n * times // over if d == dim else n for d, n in enumerate(x.shape)])


def _convert_shape(x: Tensor, axis: str, size: int, source: str, target: str) -> Tensor:
    from .sharding import parse_type

    a, b = parse_type(source), parse_type(target)
    if isinstance(a, Shard):
        x = _resized(x, a.dim, times=size)
    if isinstance(b, Shard):
        x = _resized(x, b.dim, over=size)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _same(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


convert = _define("convert(Tensor x, str axis, int size, str source, str target) -> Tensor", _convert_shape)
all_reduce = _define("all_reduce(Tensor x, str axis, int size) -> Tensor", _same)
all_reduce_max = _define("all_reduce_max(Tensor x, str axis, int size) -> Tensor", _same)
all_gather = _define(
    "all_gather(Tensor x, str axis, int size, int dim, int parts) -> Tensor",
    lambda x, axis, size, dim, parts: _resized(x, dim, times=size),
)
reduce_scatter = _define(
    "reduce_scatter(Tensor x, str axis, int size, int dim, int parts) -> Tensor",
    lambda x, axis, size, dim, parts: _resized(x, dim, over=size),
)
all_to_all = _define(
    "all_to_all(Tensor x, str axis, int size, int dim, int parts, int to_dim, int to_parts) -> Tensor",
    lambda x, axis, size, dim, parts, to_dim, to_parts: _resized(_resized(x, dim, times=size), to_dim, over=size),
)
shard_slice = _define(
    "shard_slice(Tensor x, str axis, int size, int dim, int parts) -> Tensor",
    lambda x, axis, size, dim, parts: _resized(x, dim, over=size),
)
shard_pad = _define(
    "shard_pad(Tensor x, str axis, int size, int dim, int parts) -> Tensor",
    lambda x, axis, size, dim, parts: _resized(x, dim, times=size),
)
# ids - (this rank's position on the axis) * rows: global indices to indices of this rank's rows
shard_index = _define("shard_index(Tensor ids, str axis, int size, int rows) -> Tensor", _same)
# one microbatch's slice of a value of the whole batch: the runtime cuts it, in time instead of space
microbatch = _define(
    "microbatch(Tensor x, int size, int dim, int parts) -> Tensor",
    lambda x, size, dim, parts: _resized(x, dim, over=size),
)

COMMUNICATION = frozenset({all_reduce, all_reduce_max, all_gather, reduce_scatter, all_to_all})
LOCAL = frozenset({shard_slice, shard_pad, shard_index})  # depend on the rank's coordinate, move nothing
RANKED = COMMUNICATION | LOCAL

MICROBATCHES = "mb"  # the axis in time


def lower_conversion(source: AxisType, target: AxisType) -> tuple[torch._ops.OpOverload | str | None, tuple[int, ...]]:
    """The operator that carries a plain value from ``source`` to ``target``, and its dim arguments.

    None: the bits do not move. ``"divide"``: every rank takes an equal share of a value that all hold.
    The seven moves of plain values; a typed conversion is one of them forward and one backward.
    """
    a, b = plain(source), plain(target)
    if a == b:
        return None, ()
    if isinstance(a, Shard) and isinstance(b, Shard):
        return all_to_all, (a.dim, a.parts, b.dim, b.parts)
    if isinstance(a, Shard):
        return (shard_pad if b is P else all_gather), (a.dim, a.parts)
    if isinstance(b, Shard):
        return (reduce_scatter if a is P else shard_slice), (b.dim, b.parts)
    return (all_reduce, ()) if a is P else ("divide", ())
