"""Kernels that one rank launches for one microbatch: a layer's forward and backward, the embedding's and the head's.

Bytes are of 16-bit activations: r2 and w2 are 2 bytes read or written per element, masks 1. Backward of a product is
two products; gradients of weights are added to an accumulator in ``gradient_dtype``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quintnet_compiler.cost_models.hardware import BYTES_PER_ELEMENT
from quintnet_compiler.cost_models.kernels import ALIGNMENT, Kernel, matmul, memory, merged_bytes

from .kernel_set import KernelSet, Passes
from .transformer import Decoder, LayerKind, ParallelLayout

Kernels = tuple[Kernel, ...]
# Queries and keys of a tile of fused attention (FlashAttention 2 and 3 with heads of 64 and 128 elements).
ATTENTION_TILE = 128


@dataclass(frozen=True)
class Communication:
    """A collective over the ranks of ``axis``; ``num_bytes`` is the size of the full value.

    ``beside``: kernels whose time it can be hidden behind (by name, or :data:`ALL`); empty where it must be waited
    for.
    """

    name: str
    axis: str
    num_bytes: float
    beside: tuple[str, ...] = ()


ALL = ("*",)


@dataclass(frozen=True)
class LayerWork:
    """Kernels and communication of one part of a step (a layer, the embedding, the head) on one rank."""

    forward: Kernels = ()
    backward: Kernels = ()
    again: Kernels = ()  # redone in backward, for recompute
    forward_communication: tuple[Communication, ...] = ()
    backward_communication: tuple[Communication, ...] = ()
    again_communication: tuple[Communication, ...] = ()


@dataclass(frozen=True)
class Shapes:
    """Local sizes of one microbatch: ``tokens`` through products, ``rows`` through norms and residuals."""

    model: Decoder
    layout: ParallelLayout

    @property
    def tokens(self) -> float:
        return self.layout.microbatch * self.model.seq / self.layout.cp

    @property
    def rows(self) -> float:
        return self.tokens / (self.layout.tp if self.layout.sequence_parallel else 1)

    @property
    def heads(self) -> float:
        return self.model.heads / self.layout.tp

    @property
    def kv(self) -> float:
        return max(1.0, self.model.kv / self.layout.tp)

    @property
    def latent(self) -> float:
        """Return the elements per token after latent attention's first products; 0 where there are none for queries."""
        m = self.model
        return m.query_rank + m.kv_rank + m.rotary_width if m.query_rank else 0.0

    @property
    def kernels(self) -> KernelSet:
        return self.layout.kernels

    @property
    def dtype(self) -> str:
        """Return the dtype of activations: 8-bit and 4-bit training keeps them in bf16."""
        return "bf16" if self.layout.dtype in ("fp8", "fp4") else self.layout.dtype

    @property
    def element(self) -> float:
        return BYTES_PER_ELEMENT[self.dtype]


def _passes(name: str, passes: Passes, num_bytes: float) -> tuple[Kernel, Kernel]:
    """Return the forward and backward kernels that read and write ``num_bytes`` so often."""
    return (
        memory(name, passes.forward * num_bytes, passes.forward_launches),
        memory(f"{name}.backward", passes.backward * num_bytes, passes.backward_launches),
    )


def _matmul(
    s: Shapes, name: str, rows: float, columns: float, depth: float, experts: float = 1
) -> tuple[Kernels, Kernels]:
    """Return a layer's product, forward and backward; 8-bit ones are scaled and cast (and transposed) first."""
    low = s.layout.dtype in ("fp8", "fp4")
    element = 1.0 if low else s.element
    dtype = s.layout.dtype
    accumulate = _accumulated(s, columns * depth)
    forward = [matmul(name, rows, columns, depth, batch=experts, dtype=dtype, element=element)]
    backward = [
        matmul(f"{name}.input", rows, depth, columns, batch=experts, dtype=dtype, element=element),
        matmul(f"{name}.weight", depth, columns, rows, batch=experts, dtype=dtype, element=element),
        memory(f"{name}.accumulate", experts * accumulate, 0),
    ]
    if s.model.biases:  # the bias' gradient: a sum over rows, which is added to the accumulator
        backward.append(memory(f"{name}.bias", experts * s.element * rows * columns, 2))
    if low:
        forward.append(memory(f"{name}.cast", experts * rows * depth * (2 + 2), 1))  # r2, w1 and its transpose
        backward.append(memory(f"{name}.cast", experts * rows * columns * (2 + 2), 1))
    return tuple(forward), tuple(backward)


def _accumulated(s: Shapes, elements: float) -> float:
    """Return the bytes of adding a product that is a gradient to those of earlier microbatches."""
    return 0.0 if s.kernels.fused_gradients else 2 * BYTES_PER_ELEMENT[s.layout.gradient_dtype] * elements


def _side_by_side(s: Shapes, name: str, columns: tuple[float, ...], depth: float) -> tuple[Kernels, Kernels]:
    """Return products of the same input: one, or one for each weight, whose inputs' gradients are then added up."""
    if s.kernels.joined:
        return _matmul(s, name, s.tokens, sum(columns), depth)
    products = [_matmul(s, name, s.tokens, width, depth) for width in columns]
    sums = memory(f"{name}.sums", 3 * s.element * s.tokens * depth * (len(columns) - 1), len(columns) - 1)
    return tuple(k for ahead, _ in products for k in ahead), (*(k for _, back in products for k in back), sums)


def _queries_keys_values(s: Shapes) -> tuple[Kernels, Kernels]:
    """Return the products of queries, keys and values, and what follows these, forward and backward."""
    m, e = s.model, s.element
    queries, keys = s.heads * m.width, s.kv * m.width
    if m.kv_rank:
        return _latent(s)
    qkv, back = _side_by_side(s, "qkv", (queries, keys, keys), m.hidden)
    turned = _passes("rotary", s.kernels.rotary, e * s.tokens * (queries + keys)) if m.rotary else ()
    scaled = _passes("head_norms", s.kernels.norm, e * s.tokens * (queries + keys)) if m.head_norms else ()
    apart = _passes("split", s.kernels.split, e * s.tokens * (queries + 2 * keys)) if s.kernels.joined else ()
    return (*qkv, *apart[:1], *scaled[:1], *turned[:1]), (*turned[1:], *scaled[1:], *apart[1:], *back)


def _latent(s: Shapes) -> tuple[Kernels, Kernels]:
    """Return latent attention as it is trained: products into few elements, a norm of those, products into heads'."""
    m, e = s.model, s.element
    both = m.width + m.value
    up = s.heads * (both - m.rotary_width)
    keys, keys_back = _matmul(s, "keys.down", s.rows, m.kv_rank + m.rotary_width, m.hidden)
    more, more_back = _matmul(s, "keys.up", s.tokens, up, m.kv_rank)
    if m.query_rank:
        down, down_back = _matmul(s, "query.down", s.rows, m.query_rank, m.hidden)
        query, query_back = _matmul(s, "query.up", s.tokens, s.heads * m.width, m.query_rank)
    else:
        (down, down_back), (query, query_back) = ((), ()), _matmul(s, "qkv", s.tokens, s.heads * m.width, m.hidden)
    sums = memory("qkv.sums", 3 * e * s.rows * m.hidden)  # the input's gradient comes from both
    scaled, scaled_back = _passes("latent_norms", s.kernels.norm, e * s.rows * (m.query_rank + m.kv_rank))
    turned, turned_back = _passes("rotary", s.kernels.rotary, e * s.tokens * (s.heads + 1) * m.rotary_width)
    placed = memory("assembled", 2 * e * s.tokens * s.heads * both)
    return (*keys, *down, scaled, *more, *query, turned, placed), (
        placed, turned_back, *query_back, *more_back, scaled_back, *down_back, *keys_back, sums,
    )  # fmt: skip


def _attention(s: Shapes, short: bool) -> tuple[Kernels, Kernels]:
    """Return the core: scores, softmax, dropout, mix. Fused, it never writes the scores and skips masked tiles."""
    model, layout, e = s.model, s.layout, s.element
    batch, length, width = layout.microbatch * s.heads, model.seq / layout.cp, model.width
    scores, both = batch * length * model.seq, model.width + model.value
    if s.kernels.flash:
        seen = model.seq * (0.5 if model.causal else 1.0)
        if model.causal and not layout.balanced and layout.context != "ulysses":
            seen = model.seq - length / 2  # the last rank's
        if short:  # whole tiles: of queries, and of the keys that any of them sees
            seen = min(seen, model.window + ATTENTION_TILE)
        flops = 2.0 * batch * length * seen * both
        moved = e * layout.microbatch * length * both * (s.heads + s.kv)
        # Dao 2023 (FlashAttention-2): backward does 5 products for forward's 2
        generation, calls, merged = s.kernels.flash_generation, 1, [0.0, 0.0]
        if layout.cp > 1 and layout.context == "ring":
            calls = layout.cp * (2 if layout.balanced else 1)
            keys = layout.microbatch * s.kv * length * both
            merged = [merged_bytes(e, layout.cp, batch * length * n, keys, back)
                      for n, back in ((model.value, False), (width, True))]  # fmt: skip
        core = Kernel("core", "attention", flops, moved + merged[0], s.dtype, launches=calls, generation=generation)
        size = 2.5 * moved + merged[1]
        return (core,), (replace(core, name="core.backward", flops=2.5 * flops, bytes=size, launches=3 * calls),)
    dropped = scores * (2 * e + 1) if model.dropout else 0.0
    # Queries, keys and values are read where they are; the mix is copied to where the next product reads it.
    softmax, softmax_backward = _softmax(s, batch, scores)
    forward = (
        matmul("scores", length, model.seq, width, batch=batch, dtype=s.dtype, element=e),
        softmax,
        memory("attention.dropout", dropped, 1 if dropped else 0),
        matmul("mix", length, model.value, model.seq, batch=batch, dtype=s.dtype, element=e),
        memory("attention.transposed", 2 * e * batch * length * model.value),
    )
    backward = (
        matmul("mix.scores", length, model.seq, model.value, batch=batch, dtype=s.dtype, element=e),
        matmul("mix.value", model.seq, model.value, length, batch=batch, dtype=s.dtype, element=e),
        memory("attention.dropout", dropped, 1 if dropped else 0),
        softmax_backward,
        matmul("scores.query", length, width, model.seq, batch=batch, dtype=s.dtype, element=e),
        matmul("scores.key", model.seq, width, length, batch=batch, dtype=s.dtype, element=e),
        memory("attention.transposed", 2 * e * batch * length * model.value),
    )
    return forward, backward


def _softmax(s: Shapes, batch: float, scores: float) -> tuple[Kernel, Kernel]:
    """Return the softmax of scores, forward and backward; a fused causal one reads half of them and writes all."""
    e, causal = s.element, s.model.causal
    if batch % s.kernels.softmax_groups == 0:
        return (
            memory("softmax", (1.5 if causal else 2) * e * scores),
            memory("softmax.backward", (2 if causal else 3) * e * scores),
        )
    # in 32 bits: cast (r2 w4), scale (r4 w4), mask (r4 r1 w4), softmax (r4 w4; backward r4 r4 w4), cast back (r4 w2)
    return memory("softmax", 37 * scores, 5), memory("softmax.backward", 41 * scores, 5)


def _mlp(s: Shapes, name: str, wide: float) -> tuple[Kernels, Kernels]:
    """Return the MLP of all tokens, with ``wide`` elements on this rank."""
    up = _side_by_side(s, f"{name}up", (wide,) * (2 if s.model.gated else 1), s.model.hidden)
    return _between(s, name, up, _matmul(s, f"{name}down", s.tokens, s.model.hidden, wide), s.tokens * wide)


def _grouped(s: Shapes, rows: float, wide: float, experts: float) -> tuple[Kernels, Kernels]:
    """Return the products of ``experts``, of ``rows`` tokens each."""
    up = _matmul(s, "up", rows, (2 if s.model.gated else 1) * wide, s.model.hidden, experts)
    return _between(s, "", up, _matmul(s, "down", rows, s.model.hidden, wide, experts), experts * rows * wide)


def _between(
    s: Shapes, name: str, up: tuple[Kernels, Kernels], down: tuple[Kernels, Kernels], elements: float
) -> tuple[Kernels, Kernels]:
    """Return the activation of ``elements`` between two products."""
    passes = s.kernels.gated_activation if s.model.gated else s.kernels.activation
    act, act_backward = _passes(f"{name}activation", passes, s.element * elements)
    return (*up[0], act, *down[0]), (*down[1], act_backward, *up[1])


def _experts(s: Shapes) -> tuple[Kernels, Kernels, tuple[Communication, ...]]:
    """Return routed experts, which exchange rows over ``ep`` before and after, and those of all tokens."""
    model, layout, e = s.model, s.layout, s.element
    # rows that reach a rank when routing is balanced, over the experts that it holds
    experts = max(1.0, model.experts / layout.ep)
    arriving = s.tokens * model.top_k * layout.expert_tp / layout.tp
    rows = ALIGNMENT * math.ceil(arriving / experts / ALIGNMENT)  # each expert's are padded for tensor cores
    forward, backward = _grouped(s, rows, model.moe_ffn / layout.expert_tp, experts)
    router, router_backward = _matmul(s, "router", s.rows, model.experts, model.hidden)
    moved = 4 * e * experts * rows * model.hidden  # rows are permuted before the exchange and back after it
    shuffle = memory("permute", 2 * moved, 8)
    size = e * layout.ep * s.tokens / layout.tp * model.top_k * model.hidden
    exchange = Communication("all_to_all", "ep", size, ALL if layout.overlap_ep else ())
    gathers: tuple[Communication, ...] = ()
    if layout.expert_tp > 1:
        size = e * experts * rows * model.hidden
        gathers = (Communication("all_gather", "tp", size), Communication("reduce_scatter", "tp", size))
    shared, shared_backward = _mlp(s, "shared.", model.shared_ffn / layout.tp) if model.shared_ffn else ((), ())
    return (*router, shuffle, *forward, *shared), (*shared_backward, *backward, shuffle, *router_backward), (
        exchange, exchange, *gathers,
    )  # fmt: skip


def layer(model: Decoder, layout: ParallelLayout, kind: LayerKind | None = None) -> LayerWork:
    """Return one layer of one microbatch on one rank: of ``kind``, by default the model's last."""
    s = Shapes(model, layout)
    kind = kind or model.kinds[-1]
    e, h, rows = s.element, model.hidden, s.rows
    qkv, qkv_backward = _queries_keys_values(s)
    out, out_backward = _matmul(s, "out", s.tokens, h, s.heads * model.value)
    core, core_backward = _attention(s, kind.short)
    exchanges: tuple[Communication, ...] = ()
    if kind.dense:
        mlp, mlp_backward = _mlp(s, "", model.ffn / layout.tp)
    else:
        mlp, mlp_backward, exchanges = _experts(s)
    mask = 1 if model.dropout else 0
    norm, norm_backward = _passes("norm", s.kernels.norm, e * rows * h)
    add, add_backward = _passes("residual", s.kernels.residual, e * rows * h)
    dropped = memory("dropout", mask * rows * h, 0), memory("dropout.backward", (2 * e + mask) * mask * rows * h, mask)
    forward = (norm, *qkv, *core, *out, add, dropped[0], norm, *mlp, add, dropped[0])
    backward = (
        add_backward, dropped[1], *mlp_backward, norm_backward, add_backward, dropped[1],
        *out_backward, *core_backward, *qkv_backward, norm_backward,
    )  # fmt: skip
    again: Kernels = ()
    if layout.recompute == "full":
        again = tuple(k for k in forward if k.name != "down") if s.kernels.early_stop else forward
    elif layout.recompute == "selective":
        again = core
    ahead, back = _tensor_communication(s, kind)
    return LayerWork(
        forward, backward, again, (*ahead, *exchanges), (*back, *exchanges),
        {"none": (), "selective": _context(s)[0], "full": (*ahead, *exchanges)}[layout.recompute],
    )  # fmt: skip


def _tensor_communication(s: Shapes, kind: LayerKind) -> tuple[tuple[Communication, ...], tuple[Communication, ...]]:
    """Return Megatron's f and g (Shoeybi et al. 2019), or their sequence-parallel halves (Korthikanti et al. 2022).

    In backward, the communication of an input's gradient is concurrent with the product of the weight's gradient.
    """
    layout = s.layout
    size = s.element * s.tokens * s.model.hidden
    context, context_back = _context(s)
    if layout.tp == 1:
        return context, context_back
    dense = kind.dense or s.model.shared_ffn  # experts of all tokens are split as an MLP is
    up, down = ("up", "down") if kind.dense else ("shared.up", "shared.down")
    latent = ("query.up", s.element * s.tokens * s.latent) if s.latent else ("qkv", size)
    columns = (latent, (up, size)) if dense else (latent,)
    rows = ("out", down) if dense else ("out",)

    def communicate(name: str, num_bytes: float, product: str, overlap: bool = layout.overlap_tp) -> Communication:
        return Communication(name, "tp", num_bytes, (product,) if overlap else ())

    ahead: list[Communication] = []
    back: list[Communication] = []
    if layout.sequence_parallel:
        for name, num_bytes in columns:
            ahead.append(communicate("all_gather", num_bytes, name))
            # the input is gathered once more, during the product of its gradient; then its gradient is scattered
            back.append(communicate("all_gather", num_bytes, f"{name}.input", overlap=True))
            back.append(communicate("reduce_scatter", num_bytes, f"{name}.weight", overlap=True))
        for name in rows:
            ahead.append(communicate("reduce_scatter", size, name))
            back.append(communicate("all_gather", size, f"{name}.input"))
    else:
        ahead += [communicate("all_reduce", size, name) for name in rows]
        back += [communicate("all_reduce", num_bytes, f"{name}.weight", overlap=True) for name, num_bytes in columns]
    return (*ahead, *context), (*back, *context_back)


def _context(s: Shapes) -> tuple[tuple[Communication, ...], tuple[Communication, ...]]:
    """Return the collectives of context ranks for attention, forward and backward."""
    m, cp, e = s.model, s.layout.cp, s.element
    if cp == 1:
        return (), ()
    each = s.tokens * (m.width + m.value)  # for each head: of a query and a result, or of a key and a value
    keys, queries = e * s.kv * each, e * s.heads * each
    if s.layout.context == "ulysses":
        exchange = Communication("all_to_all", "cp", cp * (keys + queries))
        return (exchange,), (exchange,)
    if s.layout.context == "all_gather":
        gather = Communication("all_gather", "cp", cp * keys)
        return (gather,), (gather, Communication("reduce_scatter", "cp", cp * keys))
    # keys and values travel beside the attention to those that are there; backward their gradients do, too, and home
    wide = BYTES_PER_ELEMENT["fp32"] / e if s.kernels.own_ring else 1.0
    hop, gradients = (Communication("send", "cp", size, (beside,))
                      for size, beside in ((keys, "core"), (wide * keys, "core.backward")))  # fmt: skip
    ahead: tuple[Communication, ...] = (hop,) * (cp - 1)
    back = (replace(hop, beside=gradients.beside),) * (cp - 1) + (gradients,) * cp
    if s.layout.balanced and s.kernels.own_ring:  # half of what attention is given and makes, before and after
        result = e * s.tokens * s.heads * m.value
        halves = tuple(Communication("send", "cp", size / 2) for size in (keys + queries - result, result))
        ahead, back = ahead + halves, back + halves
    return ahead, back


def embedding(model: Decoder, layout: ParallelLayout) -> LayerWork:
    """Return lookup, positions, dropout; the gradient is a scatter-add into zeros, added to the accumulator."""
    s = Shapes(model, layout)
    size, table = s.element * s.tokens * model.hidden, model.hidden * model.vocab / layout.tp
    ahead, back = _passes("embedding", s.kernels.embedding, size)
    added = memory("embedding.accumulate", _added(s, table), 2)
    sums = (Communication("all_reduce", "tp", size),) if layout.tp > 1 else ()
    positions = (memory("positions", 3 * size),) if model.learned_positions else ()
    return LayerWork((ahead, *positions), (back, added), (), sums, (), ())


def _added(s: Shapes, elements: float) -> float:
    """Return the bytes of a gradient in 16 bits that is written, read, and added to an accumulator."""
    return (2 * s.element + 2 * BYTES_PER_ELEMENT[s.layout.gradient_dtype]) * elements


def predicting(model: Decoder, layout: ParallelLayout) -> LayerWork:
    """Return two norms and a product of joined inputs, before the layer of a further token (DeepSeek-V3, eq. 21)."""
    s = Shapes(model, layout)
    size = s.element * s.rows * model.hidden
    norm, norm_backward = _passes("norm", s.kernels.norm, size)
    joined = memory("joined", 4 * size)
    product, backward = _matmul(s, "joining", s.tokens, model.hidden / layout.tp, 2 * model.hidden)
    return LayerWork((norm, norm, joined, *product), (*backward, joined, norm_backward, norm_backward))


def head(model: Decoder, layout: ParallelLayout) -> LayerWork:
    """Return final norm, logits and cross entropy (in fp32) over a vocabulary that may be split over tp."""
    s = Shapes(model, layout)
    e, rows, local = s.element, s.tokens, model.vocab / layout.tp
    norm, norm_backward = _passes("norm", s.kernels.norm, e * s.rows * model.hidden)
    loss, loss_backward = _passes("cross_entropy", s.kernels.loss if layout.tp == 1 else s.kernels.split_loss,
                                  BYTES_PER_ELEMENT["fp32"] * rows * local)  # fmt: skip
    cast = memory("cross_entropy.cast", rows * local * (e + 4) if e < BYTES_PER_ELEMENT["fp32"] else 0.0, 0)
    forward = (norm, matmul("logits", rows, local, model.hidden, dtype=s.dtype, element=e), cast, loss)
    backward = (
        loss_backward,
        cast,
        matmul("logits.input", rows, model.hidden, local, dtype=s.dtype, element=e),
        matmul("logits.weight", model.hidden, local, rows, dtype=s.dtype, element=e),
        memory("logits.accumulate", _accumulated(s, local * model.hidden), 0),
        norm_backward,
    )
    if layout.tp == 1:
        return LayerWork(forward, backward)
    size = e * s.tokens * model.hidden
    ahead = (Communication("all_gather", "tp", size),) if layout.sequence_parallel else ()
    name = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
    return LayerWork(forward, backward, (), ahead, (Communication(name, "tp", size, ("logits.weight",)),))
