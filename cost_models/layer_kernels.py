"""What one rank launches for one microbatch: a layer's kernels forward and backward, the embedding's and the head's.

Bytes are of 16-bit activations: r2 and w2 are 2 bytes read or written per element, masks 1. Backward of a product is
two products; gradients of weights are added to an accumulator in ``gradient_dtype``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import BYTES_PER_ELEMENT
from .kernels import Kernel, matmul, memory
from .transformer import Decoder, ParallelLayout

Kernels = tuple[Kernel, ...]


@dataclass(frozen=True)
class Communication:
    """A collective over the ranks of ``axis``; ``num_bytes`` is the size of the full value.

    ``beside``: kernels whose time it can be hidden behind (by name); empty where it must be waited for.
    """

    name: str
    axis: str
    num_bytes: float
    beside: tuple[str, ...] = ()


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
    def dtype(self) -> str:
        """Of activations: 8-bit and 4-bit training keeps them in bf16."""
        return "bf16" if self.layout.dtype in ("fp8", "fp4") else self.layout.dtype

    @property
    def element(self) -> float:
        return BYTES_PER_ELEMENT[self.dtype]


def _matmul(
    s: Shapes, name: str, rows: float, columns: float, depth: float, experts: float = 1
) -> tuple[Kernels, Kernels]:
    """A layer's product, forward and backward; 8-bit ones are scaled and cast (and transposed) first."""
    low = s.layout.dtype in ("fp8", "fp4")
    element = 1.0 if low else s.element
    dtype = s.layout.dtype
    accumulate = 0.0 if s.layout.fused_gradients else 2 * BYTES_PER_ELEMENT[s.layout.gradient_dtype] * columns * depth
    forward = [matmul(name, rows, columns, depth, batch=experts, dtype=dtype, element=element)]
    backward = [
        matmul(f"{name}.input", rows, depth, columns, batch=experts, dtype=dtype, element=element),
        matmul(f"{name}.weight", depth, columns, rows, batch=experts, dtype=dtype, element=element),
        memory(f"{name}.accumulate", experts * accumulate, 0),
    ]
    if low:
        forward.append(memory(f"{name}.cast", experts * rows * depth * (2 + 2), 1))  # r2, w1 and its transpose
        backward.append(memory(f"{name}.cast", experts * rows * columns * (2 + 2), 1))
    return tuple(forward), tuple(backward)


def _attention(s: Shapes) -> tuple[Kernels, Kernels]:
    """The core: scores, softmax, dropout, mix. Fused, it never writes the scores and skips the causal half."""
    model, layout, e = s.model, s.layout, s.element
    batch, length, width = layout.microbatch * s.heads, model.seq / layout.cp, model.width
    scores = batch * length * model.seq
    if layout.flash:
        flops = 4.0 * scores * width * (0.5 if model.causal else 1.0)
        moved = e * layout.microbatch * length * width * (2 * s.heads + 2 * s.kv)
        # Dao 2023 (FlashAttention-2): backward does 5 products for forward's 2
        made = layout.flash_generation
        return (Kernel("core", "attention", flops, moved, s.dtype, generation=made),), (
            Kernel("core.backward", "attention", 2.5 * flops, 2.5 * moved, s.dtype, launches=3, generation=made),
        )
    dropped = scores * (2 * e + 1) if model.dropout else 0.0
    # The causal softmax reads the lower half of the scores and writes all of them.
    forward = (
        matmul("scores", length, model.seq, width, batch=batch, dtype=s.dtype, element=e),
        memory("softmax", (1.5 if model.causal else 2) * e * scores),
        memory("attention.dropout", dropped, 1 if dropped else 0),
        matmul("mix", length, width, model.seq, batch=batch, dtype=s.dtype, element=e),
        memory("attention.transposes", 2 * e * layout.microbatch * length * width * (2 * s.heads + 2 * s.kv), 4),
    )
    backward = (
        matmul("mix.scores", length, model.seq, width, batch=batch, dtype=s.dtype, element=e),
        matmul("mix.value", model.seq, width, length, batch=batch, dtype=s.dtype, element=e),
        memory("attention.dropout", dropped, 1 if dropped else 0),
        memory("softmax.backward", (2 if model.causal else 3) * e * scores),
        matmul("scores.query", length, width, model.seq, batch=batch, dtype=s.dtype, element=e),
        matmul("scores.key", model.seq, width, length, batch=batch, dtype=s.dtype, element=e),
        memory("attention.transposes", 2 * e * layout.microbatch * length * width * (2 * s.heads + 2 * s.kv), 4),
    )
    return forward, backward


def _mlp(s: Shapes) -> tuple[Kernels, Kernels, tuple[Communication, ...]]:
    """The MLP or the experts; experts exchange rows over ``ep`` before and after."""
    model, layout, e = s.model, s.layout, s.element
    ways = 2 if model.gated else 1
    if not model.experts:
        rows, wide, experts = s.tokens, model.ffn / layout.tp, 1.0
    else:
        # rows that reach a rank when routing is balanced, over the experts that it holds
        experts = max(1.0, model.experts / layout.ep)
        arriving = s.tokens * model.top_k * layout.expert_tp / layout.tp
        rows, wide = arriving / experts, model.moe_ffn / layout.expert_tp
    up, up_backward = _matmul(s, "up", rows, ways * wide, model.hidden, experts)
    down, down_backward = _matmul(s, "down", rows, model.hidden, wide, experts)
    elements = experts * rows * wide
    act = memory("activation", e * elements * (ways + 1))
    act_backward = memory("activation.backward", e * elements * (2 * ways + 1))
    forward, backward = (*up, act, *down), (*down_backward, act_backward, *up_backward)
    if not model.experts:
        return forward, backward, ()
    router, router_backward = _matmul(s, "router", s.rows, model.experts, model.hidden)
    moved = 4 * e * experts * rows * model.hidden  # rows are permuted before the exchange and back after it
    shuffle = memory("permute", 2 * moved, 8)
    exchange = Communication("all_to_all", "ep", e * layout.ep * s.tokens / layout.tp * model.top_k * model.hidden)
    gathers: tuple[Communication, ...] = ()
    if layout.expert_tp > 1:
        size = e * experts * rows * model.hidden
        gathers = (Communication("all_gather", "tp", size), Communication("reduce_scatter", "tp", size))
    return (*router, shuffle, *forward), (*backward, shuffle, *router_backward), (exchange, exchange, *gathers)


def _copies(s: Shapes) -> Kernel:
    """What eager code writes between kernels: biases, casts around norms, heads moved before and after the core."""
    model, e = s.model, s.element
    wide = 0 if model.experts else model.ffn / s.layout.tp
    return memory(
        "copies", 2 * e * s.tokens * (4 * model.heads * model.width / s.layout.tp + wide + 2 * model.hidden), 6
    )


def layer(model: Decoder, layout: ParallelLayout) -> LayerWork:
    """One layer of one microbatch on one rank."""
    s = Shapes(model, layout)
    e, h, rows = s.element, model.hidden, s.rows
    own = model.heads * model.width / layout.tp
    qkv, qkv_backward = _matmul(s, "qkv", s.tokens, own + 2 * s.kv * model.width, h)
    out, out_backward = _matmul(s, "out", s.tokens, h, own)
    core, core_backward = _attention(s)
    mlp, mlp_backward, exchanges = _mlp(s)
    mask = 1 if model.dropout else 0
    norm, norm_backward = memory("norm", 2 * e * rows * h), memory("norm.backward", 4 * e * rows * h, 2)
    add = memory("residual", (3 * e + mask) * rows * h)
    add_backward = memory("residual.backward", (2 * e + mask) * rows * h)
    rotate = memory("rotary", 2 * e * s.tokens * (own + s.kv * model.width), 2 if model.rotary else 0)
    rotate = rotate if model.rotary else memory("rotary", 0.0, 0)
    forward = (norm, *qkv, rotate, *core, *out, add, norm, *mlp, add)
    backward = (
        add_backward, *mlp_backward, norm_backward, add_backward,
        *out_backward, *core_backward, rotate, *qkv_backward, norm_backward,
    )  # fmt: skip
    again: Kernels = ()
    if layout.recompute == "full":
        again = forward
    elif layout.recompute == "selective":
        again = core
    if not layout.fused:
        forward, backward, again = (*forward, _copies(s)), (*backward, _copies(s)), again and (*again, _copies(s))
    ahead, back = _tensor_communication(s)
    return LayerWork(
        forward, backward, again, (*ahead, *exchanges), (*back, *exchanges),
        (*ahead, *exchanges) if layout.recompute == "full" else (),
    )  # fmt: skip


def _tensor_communication(s: Shapes) -> tuple[tuple[Communication, ...], tuple[Communication, ...]]:
    """Megatron's f and g (Shoeybi et al. 2019), or their sequence-parallel halves (Korthikanti et al. 2022).

    In backward, the communication of an input's gradient runs beside the product of the weight's gradient.
    """
    layout = s.layout
    size = s.element * s.tokens * s.model.hidden
    if layout.tp == 1:
        ring = _ring(s)
        return ring, ring + ring
    columns = ("qkv",) if s.model.experts else ("qkv", "up")
    rows = ("out",) if s.model.experts else ("out", "down")
    ahead: list[Communication] = []
    back: list[Communication] = []
    if layout.sequence_parallel:
        for name in columns:
            ahead.append(Communication("all_gather", "tp", size, (name,) if layout.overlap_tp else ()))
            # the input is gathered once more, behind the product of its gradient; then its gradient is scattered
            back.append(Communication("all_gather", "tp", size, (f"{name}.input",)))
            back.append(Communication("reduce_scatter", "tp", size, (f"{name}.weight",)))
        for name in rows:
            ahead.append(Communication("reduce_scatter", "tp", size, (name,) if layout.overlap_tp else ()))
            back.append(Communication("all_gather", "tp", size, (f"{name}.input",) if layout.overlap_tp else ()))
    else:
        ahead += [Communication("all_reduce", "tp", size, (name,) if layout.overlap_tp else ()) for name in rows]
        back += [Communication("all_reduce", "tp", size, (f"{name}.weight",)) for name in columns]
    ring = _ring(s)
    return (*ahead, *ring), (*back, *ring, *ring)


def _ring(s: Shapes) -> tuple[Communication, ...]:
    """Keys and values travel around the context ranks, beside the attention to the part that is there."""
    if s.layout.cp == 1:
        return ()
    size = 2 * s.element * s.tokens * s.kv * s.model.width * s.layout.cp
    return (Communication("all_gather", "cp", size, ("core", "core.backward")),)


def embedding(model: Decoder, layout: ParallelLayout) -> LayerWork:
    """Lookup, positions, dropout; its gradient is a scatter-add."""
    s = Shapes(model, layout)
    size = s.element * s.tokens * model.hidden
    sums = (Communication("all_reduce", "tp", size),) if layout.tp > 1 else ()
    return LayerWork(
        (memory("embedding", 4 * size, 4),), (memory("embedding.backward", 4 * size, 4),), (), sums, (), ()
    )  # fmt: skip


def head(model: Decoder, layout: ParallelLayout) -> LayerWork:
    """Final norm, logits and cross entropy over a vocabulary split over tp (in fp32)."""
    s = Shapes(model, layout)
    e, rows, local = s.element, s.tokens, model.vocab / layout.tp
    accumulate = 0.0 if layout.fused_gradients else 2 * BYTES_PER_ELEMENT[layout.gradient_dtype] * local * model.hidden
    forward = (
        memory("norm", 2 * e * s.rows * model.hidden),
        matmul("logits", rows, local, model.hidden, dtype=s.dtype, element=e),
        memory("cross_entropy", rows * local * (e + 4 + 4 + 4 + 4 + 4), 5),  # to fp32, max, exp, sum
    )
    backward = (
        memory("cross_entropy.backward", rows * local * (4 + 4 + 4 + e), 2),
        matmul("logits.input", rows, model.hidden, local, dtype=s.dtype, element=e),
        matmul("logits.weight", model.hidden, local, rows, dtype=s.dtype, element=e),
        memory("logits.accumulate", accumulate, 0),
        memory("norm.backward", 4 * e * s.rows * model.hidden, 2),
    )
    if layout.tp == 1:
        return LayerWork(forward, backward)
    size = e * s.tokens * model.hidden
    ahead = (Communication("all_gather", "tp", size),) if layout.sequence_parallel else ()
    name = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
    return LayerWork(forward, backward, (), ahead, (Communication(name, "tp", size, ("logits.weight",)),))
