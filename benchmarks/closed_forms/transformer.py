"""A decoder described by numbers, and how it is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.cost_models.hardware import BYTES_PER_ELEMENT

from .kernel_set import MEGATRON, KernelSet


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer. ``kv_heads`` and ``head_dim``: 0 for as many heads, and hidden / heads.

    ``gated``: three MLP products instead of two (SwiGLU) and RMSNorm; ``experts`` replace the MLP of every layer,
    ``top_k`` of them per token, each ``moe_ffn`` wide. ``dropout``: whether attention probabilities and residual
    branches are dropped out. ``causal``: half of the scores are never computed by fused attention.
    ``learned_positions``: rows of a learned table, 0 for none (rotary positions, ALiBi). ``head_norms``: whether
    queries and keys are normalized (Qwen3).

    The first ``dense_layers`` have an MLP in place of experts, and of the others all but each ``expert_step``-th;
    ``shared_ffn`` is how wide the experts are, together,
    that every token goes through, ``shared_gate`` whether their result is gated by a product of its own (Qwen2-MoE).
    ``window``: how many positions a query sees in ``windowed`` of the layers, spread evenly over all. ``sinks``: a
    learned score per head beside those of the keys (GPT-OSS).

    Latent attention (DeepSeek-V2), where ``kv_rank`` is not 0: keys and values are products of ``kv_rank`` elements per
    token, queries of ``query_rank`` (0: of the hidden ones). A head's query and key have ``head_dim`` elements, of
    which ``rotary_width`` are rotated (a key's are the same for all heads), its value ``value_width``.
    ``predicted``: layers, behind the last, that predict further tokens, each with a head (DeepSeek-V3 section 2.2).
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    experts: int = 0
    top_k: int = 0
    moe_ffn: int = 0
    tied: bool = True
    biases: bool = True
    learned_positions: int = 0
    dropout: bool = False
    causal: bool = True
    rotary: bool = False
    head_norms: bool = False
    dense_layers: int = 0
    expert_step: int = 1
    shared_ffn: int = 0
    shared_gate: bool = False
    window: int = 0
    windowed: int = 0
    sinks: bool = False
    query_rank: int = 0
    kv_rank: int = 0
    rotary_width: int = 0
    value_width: int = 0
    predicted: int = 0

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """Elements of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def value(self) -> int:
        """Elements of one head's value."""
        return self.value_width or self.width

    @property
    def short(self) -> int:
        """Layers whose window is narrower than the sequence."""
        return self.windowed if 0 < self.window < self.seq else 0

    @property
    def plain(self) -> int:
        """Layers with an MLP."""
        routed = (self.layers - self.dense_layers) // self.expert_step if self.experts else 0
        return self.layers - routed

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Return the kind of each layer, in order."""
        first = self.dense_layers
        return tuple(
            LayerKind(
                not self.experts or i < first or (i - first + 1) % self.expert_step != 0,
                (i + 1) * self.short // self.layers > i * self.short // self.layers,
            )
            for i in range(self.layers)
        )


class LayerKind(NamedTuple):
    """``dense``: an MLP rather than experts. ``short``: each query sees a window."""

    dense: bool
    short: bool = False


@dataclass(frozen=True)
class ParallelLayout:
    """The split of a step: mesh, microbatches, and the software's ways with memory and communication.

    ``recompute``: ``"selective"`` redoes the attention core in backward, ``"full"`` the whole layer, of a share
    ``recompute_share`` of the layers. ``zero``: 1 shards the optimizer's state over dp, 2 also gradients, 3 also
    parameters. ``shard``: over how many of the dp ranks (0: all; the rest replicate). ``expert_tp``: over how many
    ranks one expert's products are split. ``gradient_dtype``: of gradients' accumulation and reduction.
    ``kernels``: which ones its software runs.
    ``context``: what ranks of ``cp`` exchange: keys and values step by step around a ring, all of them before attention
    (``"all_gather"``), or positions for heads (``"ulysses"``). ``balanced``: each rank has positions near the beginning
    and near the end, so that causal attention is equally much work for all; else all wait for the last one.
    ``overlap_dp``, ``overlap_tp``, ``overlap_pp``: whether such communication runs beside computation.
    ``overlap_ep``: experts' exchanges run beside another microbatch's computation (DualPipe, Megatron's overlap of
    expert parallelism).
    ``owners``: ZeRO 1 and 2 slice state by whole parameters, of which each rank owns some and broadcasts them
    (InternEvo, PyTorch's ``ZeroRedundancyOptimizer``), instead of a part of each.
    ``whole_sends``: every tensor rank sends the whole activation to the next stage (DeepSpeed), instead of its part.
    ``holds_outputs``: a stage keeps what it has sent until its backward (DeepSpeed), instead of freeing it.
    ``stage_ends``: embedding and head count as a layer each where layers are divided over stages.
    ``graphs``: kernels are replayed as CUDA graphs, so the host costs nothing. ``blocking``: the host waits for every
    kernel (CUDA_LAUNCH_BLOCKING=1), so that nothing overlaps. ``bucket_bytes``: flat
    buffers beside the gradients, for their communication.
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    vpp: int = 1
    microbatch: int = 1
    global_batch: int = 1
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_share: float = 1.0
    zero: int = 0
    shard: int = 0
    expert_tp: int = 1
    dtype: str = "bf16"
    gradient_dtype: str = "fp32"
    kernels: KernelSet = MEGATRON
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    context: Literal["ring", "all_gather", "ulysses"] = "ring"
    balanced: bool = True
    overlap_dp: bool = True
    overlap_tp: bool = False
    overlap_pp: bool = True
    overlap_ep: bool = False
    owners: bool = False
    whole_sends: bool = False
    holds_outputs: bool = False
    stage_ends: bool = False
    graphs: bool = False
    blocking: bool = False
    bucket_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "cp", "ep", "pp", "vpp", "microbatch", "global_batch", "expert_tp"):
            if getattr(self, name) < 1:
                raise CompileError("QN201", f"{name} is {getattr(self, name)}", fix="give a whole number, 1 or more")
        if self.global_batch % (self.dp * self.microbatch):
            raise CompileError(
                "QN106",
                f"a batch of {self.global_batch} does not divide over dp={self.dp} x microbatches of {self.microbatch}",
                fix=f"use a multiple of {self.dp * self.microbatch}",
            )
        if self.dtype not in BYTES_PER_ELEMENT:
            raise CompileError(
                "QN210", f"unknown dtype {self.dtype!r}", fix=f"use one of {', '.join(BYTES_PER_ELEMENT)}"
            )

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def microbatches(self) -> int:
        """Per data rank and step."""
        return self.global_batch // (self.dp * self.microbatch)

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        """Axes innermost first; experts live within data (and context) ranks."""
        return (("tp", self.tp), ("cp", self.cp), ("dp", self.dp), ("pp", self.pp))

    @property
    def shards(self) -> int:
        """Over how many ranks optimizer state (and more, by ``zero``) is split."""
        return self.shard or self.dp * self.cp


def stage_layers(model: Decoder, layout: ParallelLayout) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage; the fullest first where they do not divide."""
    slots = layout.pp * layout.vpp
    remainder = model.layers % slots
    ends = 2 + model.predicted  # the embedding; the head, with the layers that predict further tokens
    if layout.pp > 1 and remainder and (layout.stage_ends or (model.layers + ends) % slots == 0):
        counts = list(stage_layers_even(model.layers + ends, layout))
        counts[0] -= 1
        counts[-1] -= ends - 1
        return tuple(counts)
    return stage_layers_even(model.layers, layout)


def stage_layers_even(layers: int, layout: ParallelLayout) -> tuple[int, ...]:
    """As equal as can be, in whole layers."""
    base, more = divmod(layers, layout.pp)
    return tuple(base + (stage < more) for stage in range(layout.pp))
