"""Communication as operators, so that every move of data is a node of the graph.

They name a mesh *axis*, never a process group or a rank: graphs of all ranks read the same, and the runtime binds
axes to groups. Here they only know shapes (for tracing); a transport gives them meaning when a program runs.

``convert`` is the typed move that sharding asks for; ``differentiate`` lowers it and its transpose to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from ..compat.torch import OpOverload, schema
from ..core import slices
from ..core.sharding import AxisType, P, Shard, plain

_library = torch.library.Library("quintnet", "DEF")  # type: ignore[no-untyped-call]


def define_operator(schema: str, shape: Callable[..., Any], compute: Callable[..., Tensor] | None = None) -> OpOverload:
    """An operator of this package. ``shape`` makes an empty result; ``compute``: the result, where no transport or
    rank is needed for it."""
    _library.define(schema)  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    torch.library.register_fake(f"quintnet::{name}", shape, lib=_library)
    if compute is not None:
        _library.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    overload: OpOverload = getattr(torch.ops.quintnet, name).default
    return overload


def define_composite(schema: str, function: Callable[..., Tensor]) -> OpOverload:
    """An operator that is one node in a graph and ``function`` wherever it runs, gradients included."""
    _library.define(schema)  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    _library.impl(name, function, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    overload: OpOverload = getattr(torch.ops.quintnet, name).default
    return overload


def _resized(x: Tensor, dim: int, times: int = 1, over: int = 1) -> Tensor:
    return x.new_empty([n * times // over if d == dim else n for d, n in enumerate(x.shape)])


def _convert_shape(x: Tensor, axis: str, size: int, source: str, target: str) -> Tensor:
    from ..core.sharding import parse_type

    a, b = parse_type(source), parse_type(target)
    if isinstance(a, Shard):
        x = _resized(x, a.dim, times=size)
    if isinstance(b, Shard):
        x = _resized(x, b.dim, over=size)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _same(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which to add up values of ``dtype``."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _row_nll(logits: Tensor, labels: Tensor, ignore: int) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=ignore)


# the negative log-likelihood of each row's label, 0 for ``ignore``: cross entropy without a reduction
row_nll = define_composite("row_nll(Tensor logits, Tensor labels, int ignore) -> Tensor", _row_nll)

convert = define_operator("convert(Tensor x, str axis, int size, str source, str target) -> Tensor", _convert_shape)
all_reduce = define_operator("all_reduce(Tensor x, str axis, int size) -> Tensor", _same)
all_gather = define_operator(
    "all_gather(Tensor x, str axis, int size, int dim, int parts) -> Tensor",
    lambda x, axis, size, dim, parts: _resized(x, dim, times=size),
)
# as all_gather, of what this rank stores of a parameter: that may lie in memory that has room for the result
gather_state = define_operator(
    "gather_state(Tensor x, str axis, int size, int dim, int parts) -> Tensor",
    lambda x, axis, size, dim, parts: _resized(x, dim, times=size),
)
reduce_scatter = define_operator(
    "reduce_scatter(Tensor x, str axis, int size, int dim, int parts) -> Tensor",
    lambda x, axis, size, dim, parts: _resized(x, dim, over=size),
)
# several values as one message; each as all_gather and reduce_scatter
gather_together = define_operator(
    "gather_together(Tensor[] xs, str axis, int size, int[] dims, int[] parts) -> Tensor[]",
    lambda xs, axis, size, dims, parts: [_resized(x, dim, times=size) for x, dim in zip(xs, dims, strict=True)],
)
scatter_together = define_operator(
    "scatter_together(Tensor[] xs, str axis, int size, int[] dims, int[] parts) -> Tensor[]",
    lambda xs, axis, size, dims, parts: [_resized(x, dim, over=size) for x, dim in zip(xs, dims, strict=True)],
)
all_to_all = define_operator(
    "all_to_all(Tensor x, str axis, int size, int dim, int parts, int to_dim, int to_parts) -> Tensor",
    lambda x, axis, size, dim, parts, to_dim, to_parts: _resized(_resized(x, dim, times=size), to_dim, over=size),
)
shard_slice = define_operator(
    "shard_slice(Tensor x, str axis, int size, int dim, int parts) -> Tensor",
    lambda x, axis, size, dim, parts: _resized(x, dim, over=size),
)
shard_pad = define_operator(
    "shard_pad(Tensor x, str axis, int size, int dim, int parts) -> Tensor",
    lambda x, axis, size, dim, parts: _resized(x, dim, times=size),
)
# an equal share of a value that all ranks hold: a term of a sum
share = define_operator("share(Tensor x, str axis, int size) -> Tensor", _same)
# a lookup in this rank's rows of a table, which ``axes`` split (outermost first): ids of other ranks' rows give zeros
embedding_rows = define_operator(
    "embedding_rows(Tensor weight, Tensor ids, int padding_idx, str[] axes, int[] sizes) -> Tensor",
    lambda weight, ids, padding_idx, axes, sizes: weight.new_empty((*ids.shape, weight.shape[1])),
)
embedding_rows_backward = define_operator(
    "embedding_rows_backward(Tensor grad, Tensor ids, int rows, int padding_idx, str[] axes, int[] sizes) -> Tensor",
    lambda grad, ids, rows, padding_idx, axes, sizes: grad.new_empty((rows, grad.shape[-1])),
)
# this rank's terms of a cross entropy whose classes ``axes`` split: of each row its largest logit (top, a constant of
# the derivative), the sum of exp(logits - top), and the label's logit
nll_terms = define_operator(
    "nll_terms(Tensor logits, Tensor labels, str[] axes, int[] sizes) -> Tensor",
    lambda logits, labels, axes, sizes: logits.new_empty([1, 3, logits.shape[0]], dtype=widened(logits.dtype)),
)
nll_terms_backward = define_operator(
    "nll_terms_backward(Tensor grad, Tensor logits, Tensor terms, Tensor labels, str[] axes, int[] sizes) -> Tensor",
    lambda grad, logits, terms, labels, axes, sizes: torch.empty_like(logits),
)
# ids counted from this rank's first expert, of ``experts`` that ``axes`` split: those of other ranks fall outside
local_experts = define_operator("local_experts(Tensor ids, int experts, str[] axes, int[] sizes) -> Tensor", _same)
# Rows on their way to the ranks that hold their experts, and back. A plan is the order in which a rank's rows leave
# it, then how many it sends to each rank of the axis, then how many it gets. ``outer``: the ways in which earlier axes
# split the experts. How many rows a rank gets is known when it runs; as shapes, as many as it sends.
dispatch_plan = define_operator(
    "dispatch_plan(Tensor ids, str axis, int size, int experts, int outer) -> Tensor",
    lambda ids, axis, size, experts, outer: ids.new_empty([ids.shape[0] + 2 * size], dtype=torch.int64),
)
dispatch = define_operator("dispatch(Tensor x, str axis, int size, Tensor plan) -> Tensor", _same)
combine = define_operator("combine(Tensor x, str axis, int size, Tensor plan) -> Tensor", _same)
# the global positions of this rank's part of ``dim``, whose size is ``whole`` and which ``axes`` split in ``parts``
rows_of = define_operator(
    "rows_of(Tensor x, int dim, int whole, str[] axes, int[] sizes, int[] parts) -> Tensor",
    lambda x, dim, whole, axes, sizes, parts: x.new_empty([x.shape[dim]], dtype=torch.int64),
)


def _cached_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: Tensor, seen: Tensor, *how: Any
) -> Tensor:
    """With caches of its own: only a rank's program writes to those that it is given."""
    from .kv_cache_attention import attend_kept

    return attend_kept((q, k, v), (keys.clone(), values.clone()), int(start), seen, *how)


# Causal attention [B, H, S, E] of S positions from ``start`` on to all up to themselves, whose keys and values a rank
# keeps in ``keys`` [B, G, L, D] and ``values`` [B, G, L, E]: first it writes ``k`` and ``v`` there. ``seen`` [B, L]:
# whether a position holds a token (one that does not sees itself alone). ``window``: how far back a query sees, or 0.
cached_attention = define_operator(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor keys, Tensor values, Tensor start, Tensor seen, "
    "float scale, int window) -> Tensor",
    lambda q, k, v, *_: q.new_empty([*q.shape[:3], v.shape[3]]),
    _cached_attention,
)
# ``x`` times the factor of a scaled loss, which the runtime chooses (see :mod:`..runtime.execute.loss_scale`)
loss_scale = define_operator("loss_scale(Tensor x) -> Tensor", lambda x: torch.empty_like(x))
# dropout as the model has it: ``op`` numbers the model's random operators in order
dropout = define_operator("dropout(Tensor x, float p, *, int op) -> Tensor", lambda x, p, op: torch.empty_like(x))
# this rank's part of the mask of a dropout over a value of global shape ``whole``: each of ``axes`` (outermost first)
# splits one of ``dims`` in ``parts``
keep_mask = define_operator(
    "keep_mask(Tensor x, float p, int op, int[] whole, str[] axes, int[] sizes, int[] dims, int[] parts) -> Tensor",
    lambda x, p, op, whole, axes, sizes, dims, parts: x.new_empty(x.shape, dtype=torch.bool),
)
# one microbatch's slice of a value of the whole batch: the runtime cuts it, in time instead of space
microbatch = define_operator(
    "microbatch(Tensor x, int size, int dim, int parts) -> Tensor",
    lambda x, size, dim, parts: _resized(x, dim, over=size),
)


def _ring_shape(q: Tensor, axis: str, size: int, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    rows = q.shape[:3]
    return q.new_empty([*rows, v.shape[3]]), q.new_empty(rows, dtype=widened(q.dtype))


def _ring_gradients(
    grad: Tensor, axis: str, size: int, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# attention of this rank's run of positions to all positions: keys and values (and what says which of them may be seen)
# travel around ``axis``. Returns each query's log of its sum of exponentials too, for the backward. ``balance``: while
# it runs, ranks hold a run from the beginning and one from the end, so that causality leaves all of them equal work.
ring_attention = define_operator(
    "ring_attention(Tensor q, str axis, int size, Tensor k, Tensor v, Tensor? padding, Tensor? segments, float scale, "
    "bool causal, int window, bool balance) -> (Tensor, Tensor)",
    _ring_shape,
)
ring_attention_backward = define_operator(
    "ring_attention_backward(Tensor grad, str axis, int size, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? padding, Tensor? segments, float scale, bool causal, int window, bool balance) -> "
    "(Tensor, Tensor, Tensor)",
    _ring_gradients,
)


def _all_gather_matmul_shapes(
    x: Tensor, axis: str, size: int, dim: int, parts: int, weights: list[Tensor], biases: object,
    transposed: list[bool], keep: bool,
) -> list[Tensor]:  # fmt: skip
    whole = _resized(x, dim, times=size)
    columns = [w.shape[0] if turn else w.shape[1] for w, turn in zip(weights, transposed, strict=True)]
    return [*(whole.new_empty([*whole.shape[:-1], n]) for n in columns), *([whole] if keep else [])]


def _matmul_reduce_scatter_shape(
    xs: list[Tensor], axis: str, size: int, dim: int, parts: int, weights: list[Tensor], biases: object,
    transposed: list[bool],
) -> Tensor:  # fmt: skip
    columns = weights[0].shape[0] if transposed[0] else weights[0].shape[1]
    return _resized(xs[0].new_empty([*xs[0].shape[:-1], columns]), dim, over=size)


# Collectives fused with matmuls that need them, or that they need (Wang et al. 2023): while a slice travels, another
# is multiplied. A weight is [in, out], or ``transposed``: [out, in]; ``dim`` is never the last one.
# Each weight's product with all_gather(x), and (``keep``) what was gathered
all_gather_matmul = define_operator(
    "all_gather_matmul(Tensor x, str axis, int size, int dim, int parts, Tensor[] weights, Tensor?[] biases, "
    "bool[] transposed, bool keep) -> Tensor[]",
    _all_gather_matmul_shapes,
)
# reduce_scatter of the sum of each of ``xs`` times its weight
matmul_reduce_scatter = define_operator(
    "matmul_reduce_scatter(Tensor[] xs, str axis, int size, int dim, int parts, Tensor[] weights, Tensor?[] biases, "
    "bool[] transposed) -> Tensor",
    _matmul_reduce_scatter_shape,
)


def _start_of(collective: OpOverload) -> OpOverload:
    return define_operator(f"start_{str(schema(collective)).removeprefix('quintnet::')}", collective)


def _moved_slices(xs: Sequence[Tensor], place: int, dim: int, parts: int, to_dim: int, to_parts: int) -> Tensor:
    return slices.take(slices.join(xs, dim, parts), to_dim, to_parts, len(xs), place)


Price = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring", "matmul"]


@dataclass(frozen=True)
class CollectiveSpec:
    """What is known of one operator that moves data: everything but how a transport carries it out.

    ``op``: its schema, and the shape of its result. ``price``: which collective's time it takes; ``"ring"`` and
    ``"matmul"``: as the computation that its messages travel beside. ``start``: what begins it, where it can run beside
    other work until ``wait`` hands out its result (nothing else may read a start: until then it is no value).
    ``opaque``: its result depends on data that only a run has. ``transpose``: the collective of the gradient, where it
    takes the same arguments; that of a conversion follows from its types instead. ``meaning``: what all ranks give, a
    rank's place among them, and the arguments behind ``size`` -> what that rank gets. A transport without a method for
    the collective carries it out by that.
    """

    op: OpOverload
    price: Price
    start: OpOverload | None = None
    opaque: bool = False
    transpose: OpOverload | None = None
    meaning: Callable[..., Tensor] | None = None

    @property
    def name(self) -> str:
        return str(schema(self.op).name).removeprefix("quintnet::")


# one entry for each; the fused ones are priced by their matmuls and what these do not hide
_TABLE = (
    CollectiveSpec(all_reduce, "all_reduce", _start_of(all_reduce)),
    CollectiveSpec(all_gather, "all_gather", _start_of(all_gather)),
    CollectiveSpec(gather_state, "all_gather"),
    CollectiveSpec(reduce_scatter, "reduce_scatter", _start_of(reduce_scatter)),
    CollectiveSpec(all_to_all, "all_to_all", _start_of(all_to_all), meaning=_moved_slices),
    CollectiveSpec(gather_together, "all_gather", _start_of(gather_together)),
    CollectiveSpec(scatter_together, "reduce_scatter", _start_of(scatter_together)),
    CollectiveSpec(dispatch_plan, "all_to_all", opaque=True),
    CollectiveSpec(dispatch, "all_to_all", _start_of(dispatch), opaque=True, transpose=combine),
    CollectiveSpec(combine, "all_to_all", _start_of(combine), opaque=True, transpose=dispatch),
    CollectiveSpec(ring_attention, "ring", opaque=True),
    CollectiveSpec(ring_attention_backward, "ring", opaque=True),
    CollectiveSpec(all_gather_matmul, "matmul", opaque=True),
    CollectiveSpec(matmul_reduce_scatter, "matmul", opaque=True),
)
COLLECTIVES: Mapping[str, CollectiveSpec] = MappingProxyType({one.name: one for one in _TABLE})


def collective_of(called: str) -> CollectiveSpec | None:
    """The collective that generated code calls (or starts) by a name."""
    return COLLECTIVES.get(called.removeprefix("start_"))


STARTS: Mapping[OpOverload, OpOverload] = MappingProxyType(
    {one.op: one.start for one in _TABLE if one.start is not None}
)
wait = define_operator("wait(Tensor x) -> Tensor", _same)

COMMUNICATION = frozenset({*STARTS.values(), *(one.op for one in _TABLE)})
# depend on the rank's coordinate or on the step, move nothing
LOCAL = frozenset(
    {
        shard_slice, shard_pad, embedding_rows, embedding_rows_backward, nll_terms, nll_terms_backward, keep_mask,
        rows_of, local_experts, cached_attention, loss_scale,
    }
)  # fmt: skip
RANKED = COMMUNICATION | LOCAL | {wait}
SIZED = COMMUNICATION | {shard_slice, shard_pad}  # take (x, axis, size, ...)

MICROBATCHES = "mb"  # the axis in time


def lower_conversion(
    source: AxisType, target: AxisType, *, stored: bool = False
) -> tuple[OpOverload | None, tuple[int, ...]]:
    """The operator that carries a plain value from ``source`` to ``target``, and its dim arguments. ``stored``: the
    value is what ranks store of a parameter, at the start of a step.

    None: the bits do not move. The seven moves of plain values; a typed conversion is one of them forward and one
    backward.
    """
    a, b = plain(source), plain(target)
    if a == b:
        return None, ()
    if isinstance(a, Shard) and isinstance(b, Shard):
        return all_to_all, (a.dim, a.parts, b.dim, b.parts)
    if isinstance(a, Shard):
        return (shard_pad if b is P else gather_state if stored else all_gather), (a.dim, a.parts)
    if isinstance(b, Shard):
        return (reduce_scatter if a is P else shard_slice), (b.dim, b.parts)
    return (all_reduce if a is P else share), ()
