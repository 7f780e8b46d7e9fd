"""Communication as operators, so that every move of data is a node of the graph.

They name a mesh *axis*, never a process group or a rank: graphs of all ranks read the same, and the runtime binds
axes to groups. Here they only know shapes (for tracing); a transport gives them meaning when a program runs.

``convert`` is the typed move that sharding asks for; ``differentiate`` lowers it and its transpose to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from ..compat.torch import OpOverload, schema
from ..compat.torch_codegen import SHIPPED
from ..core import slices
from ..core.precision import widened
from ..core.sharding import AxisType, P, Shard, forward_type, parse_type
from .copies import COPIES
from .define import define_operator, resized


def _convert_shape(x: Tensor, axis: str, size: int, source: str, target: str) -> Tensor:
    a, b = parse_type(source), parse_type(target)
    if isinstance(a, Shard):
        x = resized(x, a.dim, times=size)
    if isinstance(b, Shard):
        x = resized(x, b.dim, over=size)
    return SHIPPED.empty_like(x, memory_format=torch.contiguous_format)


def _same(x: Tensor, *_: object) -> Tensor:
    return SHIPPED.empty_like(x, memory_format=torch.contiguous_format)


convert = define_operator("convert(Tensor x, str axis, int size, str source, str target) -> Tensor", _convert_shape)
all_reduce = define_operator("all_reduce(Tensor x, str axis, int size) -> Tensor", _same)
# as all_reduce; the result may lie in the memory of ``x``, which nothing else reads
all_reduce_ = define_operator("all_reduce_(Tensor x, str axis, int size) -> Tensor", _same)
all_gather = define_operator(
    "all_gather(Tensor x, str axis, int size, int dim, int parts) -> Tensor",
    lambda x, axis, size, dim, parts: resized(x, dim, times=size),
)
# as all_gather, of what this rank stores of a parameter: that may lie in memory that has room for the result
gather_state = define_operator(
    "gather_state(Tensor x, str axis, int size, int dim, int parts) -> Tensor",
    lambda x, axis, size, dim, parts: resized(x, dim, times=size),
)
# several of what this rank stores as one message; each as gather_state
gather_states = define_operator(
    "gather_states(Tensor[] xs, str axis, int size, int[] dims, int[] parts) -> Tensor[]",
    lambda xs, axis, size, dims, parts: [resized(x, dim, times=size) for x, dim in zip(xs, dims, strict=True)],
)
# as gather_states, whose results may still be on their way: only ``arrived`` reads them
gather_early = define_operator(
    "gather_early(Tensor[] xs, str axis, int size, int[] dims, int[] parts) -> Tensor[]",
    lambda xs, axis, size, dims, parts: [resized(x, dim, times=size) for x, dim in zip(xs, dims, strict=True)],
)
reduce_scatter = define_operator(
    "reduce_scatter(Tensor x, str axis, int size, int dim, int parts) -> Tensor",
    lambda x, axis, size, dim, parts: resized(x, dim, over=size),
)
# several values as one message; each as all_gather and reduce_scatter
gather_together = define_operator(
    "gather_together(Tensor[] xs, str axis, int size, int[] dims, int[] parts) -> Tensor[]",
    lambda xs, axis, size, dims, parts: [resized(x, dim, times=size) for x, dim in zip(xs, dims, strict=True)],
)
scatter_together = define_operator(
    "scatter_together(Tensor[] xs, str axis, int size, int[] dims, int[] parts) -> Tensor[]",
    lambda xs, axis, size, dims, parts: [resized(x, dim, over=size) for x, dim in zip(xs, dims, strict=True)],
)
all_to_all = define_operator(
    "all_to_all(Tensor x, str axis, int size, int dim, int parts, int to_dim, int to_parts) -> Tensor",
    lambda x, axis, size, dim, parts, to_dim, to_parts: resized(resized(x, dim, times=size), to_dim, over=size),
)
shard_slice = define_operator(
    "shard_slice(Tensor x, str axis, int size, int dim, int parts) -> Tensor",
    lambda x, axis, size, dim, parts: resized(x, dim, over=size),
)
shard_pad = define_operator(
    "shard_pad(Tensor x, str axis, int size, int dim, int parts) -> Tensor",
    lambda x, axis, size, dim, parts: resized(x, dim, times=size),
)
# an equal share of a value that all ranks hold: a term of a sum
share = define_operator("share(Tensor x, str axis, int size) -> Tensor", _same)


def _dispatch_plan_shapes(
    ids: Tensor, axis: str, size: int, experts: int, outer: int, hot: Sequence[int]
) -> tuple[Tensor, Tensor]:
    counts = torch.empty([2, size, -(-experts // (outer * size)) + len(hot) + 1], dtype=torch.int64, device="cpu")
    return ids.new_empty(ids.shape, dtype=torch.int64), counts


# Rows on their way to the ranks that hold their experts, and back. A plan is the order in which a rank's rows leave it
# [N], and counts [2, size, experts of a rank + hot + 1]: how many rows it sends to each rank of the axis, and how many
# it gets from each, by the experts of the rank that gets them (behind these ``hot`` ones, which every rank has, and at
# last no expert). Rows of hot experts stay on their rank. Counts lie on the host, as the collective takes sizes from
# there. ``outer``: the ways in which earlier axes split the experts. How many rows a rank gets is known when it runs;
# as shapes, as many as it sends.
dispatch_plan = define_operator(
    "dispatch_plan(Tensor ids, str axis, int size, int experts, int outer, int[] hot) -> (Tensor order, Tensor counts)",
    _dispatch_plan_shapes,
)
dispatch = define_operator("dispatch(Tensor x, str axis, int size, Tensor order, Tensor counts) -> Tensor", _same)
combine = define_operator("combine(Tensor x, str axis, int size, Tensor order, Tensor counts) -> Tensor", _same)


# A rank's runs of a dim on their way to the ranks that a plan (:data:`.attention.ring_plan.ring_plan`) assigns them
# to, and back. A rank has equally many of them before and after, in the order of positions.
send_runs = define_operator("send_runs(Tensor x, str axis, int size, int dim, Tensor plan) -> Tensor", _same)
return_runs = define_operator("return_runs(Tensor x, str axis, int size, int dim, Tensor plan) -> Tensor", _same)


def _ring_shape(q: Tensor, axis: str, size: int, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    rows = q.shape[:3]
    return q.new_empty([*rows, v.shape[3]]), q.new_empty(rows, dtype=widened(q.dtype))


def _ring_gradients(
    grad: Tensor, axis: str, size: int, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# attention of this rank's run of positions to all positions: keys and values travel around ``axis``, ids of all are on
# every rank. Returns each query's log of its sum of exponentials too, for the backward. ``plan``: ranks hold the runs
# that it assigns to them (``send_runs`` of q, k and v), so that what is seen leaves all of them equal work.
# ``tile_bytes``: about the most that a mask, or scores, may take.
ring_attention = define_operator(
    "ring_attention(Tensor q, str axis, int size, Tensor k, Tensor v, Tensor? padding, Tensor? segments, Tensor? "
    "groups, Tensor? plan, float scale, str mask, int tile_bytes) -> (Tensor, Tensor)",
    _ring_shape,
)
ring_attention_backward = define_operator(
    "ring_attention_backward(Tensor grad, str axis, int size, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? padding, Tensor? segments, Tensor? groups, Tensor? plan, float scale, str mask, int tile_bytes) -> "
    "(Tensor, Tensor, Tensor)",
    _ring_gradients,
)


def _start_of(collective: OpOverload) -> OpOverload:
    return define_operator(f"start_{str(schema(collective)).removeprefix('quintnet::')}", collective)


def _moved_slices(xs: Sequence[Tensor], place: int, dim: int, parts: int, to_dim: int, to_parts: int) -> Tensor:
    return slices.slice_of_rank(slices.join(xs, dim, parts), to_dim, to_parts, len(xs), place)


Price = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "ring", "matmul"]


@dataclass(frozen=True)
class CollectiveSpec:
    """The properties of an operator that moves data: everything but how a transport carries it out.

    Attributes:
        op: the operator, which has the schema and the shape of the result.
        price: the collective whose time it takes; ``"ring"`` and ``"matmul"``: as long as the computation with which
            its messages overlap.
        start: the operator that begins it, if it can overlap with other work until ``wait`` returns its result. Nothing
            else may read a start: until then it has no value.
        together: the operator that does the same for several values in one message.
        of_state: whether it moves what ranks store, at the start of a step.
        slice_at: the side of a matmul with which it is fused that is one rank's slice.
        opaque: whether its result depends on data that only a run has.
        transpose: the collective of the gradient, if it takes the same arguments; that of a conversion follows from its
            types instead.
        meaning: returns what a rank receives, from the values of all ranks, the rank's place among them, and the
            arguments after ``size``. A transport without a method for the collective calls it.
    """

    op: OpOverload
    price: Price
    start: OpOverload | None = None
    together: OpOverload | None = None
    of_state: bool = False
    slice_at: Literal["input", "result"] | None = None
    opaque: bool = False
    transpose: OpOverload | None = None
    meaning: Callable[..., Tensor] | None = None

    @property
    def name(self) -> str:
        return str(schema(self.op).name).removeprefix("quintnet::")


# one entry for each; features have others, whose specs name them
_TABLE = (
    CollectiveSpec(all_reduce, "all_reduce", _start_of(all_reduce)),
    CollectiveSpec(all_reduce_, "all_reduce", _start_of(all_reduce_)),
    CollectiveSpec(all_gather, "all_gather", _start_of(all_gather), gather_together),
    CollectiveSpec(gather_state, "all_gather", together=gather_states, of_state=True),
    CollectiveSpec(gather_states, "all_gather", of_state=True),
    CollectiveSpec(gather_early, "all_gather", of_state=True),
    CollectiveSpec(reduce_scatter, "reduce_scatter", _start_of(reduce_scatter), scatter_together),
    CollectiveSpec(all_to_all, "all_to_all", _start_of(all_to_all), meaning=_moved_slices),
    CollectiveSpec(gather_together, "all_gather", _start_of(gather_together)),
    CollectiveSpec(scatter_together, "reduce_scatter", _start_of(scatter_together)),
    CollectiveSpec(dispatch_plan, "all_to_all", opaque=True),
    CollectiveSpec(dispatch, "all_to_all", _start_of(dispatch), opaque=True, transpose=combine),
    CollectiveSpec(combine, "all_to_all", _start_of(combine), opaque=True, transpose=dispatch),
    CollectiveSpec(send_runs, "send", _start_of(send_runs), opaque=True, transpose=return_runs),
    CollectiveSpec(return_runs, "send", _start_of(return_runs), opaque=True, transpose=send_runs),
    CollectiveSpec(ring_attention, "ring", opaque=True),
    CollectiveSpec(ring_attention_backward, "ring", opaque=True),
)
COLLECTIVES: Mapping[str, CollectiveSpec] = MappingProxyType({spec.name: spec for spec in _TABLE})


_BEGUN = {spec.op: spec.start for spec in _TABLE if spec.start is not None}
COMMUNICATION = frozenset({*_BEGUN.values(), *(spec.op for spec in _TABLE)})
# what begins an operator that can run beside other work until ``wait``: collectives, and copies
STARTS: Mapping[OpOverload, OpOverload] = MappingProxyType({**_BEGUN, **COPIES})
wait = define_operator("wait(Tensor x) -> Tensor", _same)

SIZED = COMMUNICATION | {shard_slice, shard_pad}  # take (x, axis, size, ...)


def lower_conversion(
    source: AxisType, target: AxisType, *, stored: bool = False
) -> tuple[OpOverload | None, tuple[int, ...]]:
    """Return the operator that carries a plain value from ``source`` to ``target``, and its dim arguments.

    ``stored``: the value is what ranks store of a parameter, at the start of a step. None: the bits do not move.
    The seven moves of plain values; a typed conversion is one of them forward and one backward.
    """
    a, b = forward_type(source), forward_type(target)
    if a == b:
        return None, ()
    if isinstance(a, Shard) and isinstance(b, Shard):
        return all_to_all, (a.dim, a.parts, b.dim, b.parts)
    if isinstance(a, Shard):
        return (shard_pad if b is P else gather_state if stored else all_gather), (a.dim, a.parts)
    if isinstance(b, Shard):
        return (reduce_scatter if a is P else shard_slice), (b.dim, b.parts)
    return (all_reduce if a is P else share), ()
