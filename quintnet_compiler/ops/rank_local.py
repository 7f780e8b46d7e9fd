"""Operators that move no data, and whose result depends on the rank's coordinate, the step or the microbatch.

A program calls them by the names of mesh axes, as it calls collectives; the runtime knows where its rank is.
"""

from __future__ import annotations

import torch

from ..compat.torch_codegen import SHIPPED
from .attention.tiled import tiled_attention, tiled_attention_backward
from .collectives import COMMUNICATION, shard_pad, shard_slice, wait
from .copies import COPIES
from .cross_entropy import nll_terms, nll_terms_backward
from .define import define_operator, resized

MICROBATCHES = "mb"  # the axis in time

# a lookup in this rank's rows of a table, which ``axes`` split (outermost first): ids of other ranks' rows give zeros
embedding_rows = define_operator(
    "embedding_rows(Tensor weight, Tensor ids, int padding_idx, str[] axes, int[] sizes) -> Tensor",
    lambda weight, ids, padding_idx, axes, sizes: weight.new_empty((*ids.shape, weight.shape[1])),
)
LOOKUPS = frozenset({torch.ops.aten.embedding.default, embedding_rows})
embedding_rows_backward = define_operator(
    "embedding_rows_backward(Tensor grad, Tensor ids, int rows, int padding_idx, str[] axes, int[] sizes) -> Tensor",
    lambda grad, ids, rows, padding_idx, axes, sizes: grad.new_empty((rows, grad.shape[-1])),
)
# ids counted from this rank's first expert, of ``experts`` that ``axes`` split: those of other ranks fall outside. Hot
# experts, which every rank has, come behind its own.
local_experts = define_operator(
    "local_experts(Tensor ids, int experts, str[] axes, int[] sizes, int[] hot) -> Tensor",
    lambda ids, *_: SHIPPED.empty_like(ids),
)
# the global positions of this rank's part of ``dim``, whose size is ``whole`` and which ``axes`` split in ``parts`` and
# ``units``; 0 where it is padding
rows_of = define_operator(
    "rows_of(Tensor x, int dim, int whole, str[] axes, int[] sizes, int[] parts, int[] units) -> Tensor",
    lambda x, dim, whole, axes, sizes, parts, units: x.new_empty([x.shape[dim]], dtype=torch.int64),
)
# which of the ``size`` places that a rank has for its part of a dim are padding: as ``rows_of``
padding_of = define_operator(
    "padding_of(int size, int whole, str[] axes, int[] sizes, int[] parts, int[] units, Device device) -> Tensor",
    lambda size, whole, axes, sizes, parts, units, device: torch.empty([size], dtype=torch.bool, device=device),
)
# ``x`` times the factor of a scaled loss, which the runtime chooses (see :mod:`..runtime.execute.loss_scale`)
loss_scale = define_operator("loss_scale(Tensor x) -> Tensor", lambda x: SHIPPED.empty_like(x))
# dropout as the model has it: ``op`` numbers the model's random operators in order
dropout = define_operator("dropout(Tensor x, float p, *, int op) -> Tensor", lambda x, p, op: SHIPPED.empty_like(x))
# this rank's part of the mask of a dropout over a value of global shape ``whole``: each of ``axes`` (outermost first)
# splits one of ``dims`` in ``parts`` and ``units``
keep_mask = define_operator(
    "keep_mask(Tensor x, float p, int op, int[] whole, str[] axes, int[] sizes, int[] dims, int[] parts, int[] units) "
    "-> Tensor",
    lambda x, *_: x.new_empty(x.shape, dtype=torch.bool),
)
# numbers of a standard distribution (``uniform`` in [0, 1), ``normal``, ``exponential``; ``bits``: any int32), as the
# model has them, and this rank's part of them: as ``dropout`` and ``keep_mask``
noise = define_operator(
    "noise(int[] size, str kind, int op, *, ScalarType dtype, Device device) -> Tensor",
    lambda size, kind, op, *, dtype, device: torch.empty(size, dtype=dtype, device=device),
)
local_noise = define_operator(
    "local_noise(int[] size, str kind, int op, ScalarType dtype, Device device, int[] whole, str[] axes, int[] sizes, "
    "int[] dims, int[] parts, int[] units) -> Tensor",
    lambda size, kind, op, dtype, device, *_: torch.empty(size, dtype=dtype, device=device),
)
# a result of ``gather_early``, once it is there
arrived = define_operator("arrived(Tensor x) -> Tensor", lambda x: SHIPPED.empty_like(x))
# one microbatch's slice of a value of the whole batch: the runtime cuts it, in time instead of space
microbatch = define_operator(
    "microbatch(Tensor x, int size, int dim, int parts, int unit=1) -> Tensor",
    lambda x, size, dim, parts, unit=1: resized(x, dim, over=size),
)

# depend on the rank's coordinate or on the step, move nothing
LOCAL = frozenset(
    {
        shard_slice, shard_pad, embedding_rows, embedding_rows_backward, nll_terms, nll_terms_backward, keep_mask,
        local_noise, rows_of, padding_of, local_experts, tiled_attention, tiled_attention_backward,
        loss_scale, arrived,
    }
)  # fmt: skip
RANKED = COMMUNICATION | LOCAL | {wait, *COPIES, *COPIES.values()}
