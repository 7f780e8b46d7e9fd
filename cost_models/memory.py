"""Memory of the fullest rank: parameters, gradients, optimizer state, activations at the schedule's peak, the rest."""

from __future__ import annotations

from dataclasses import dataclass

from . import closed_forms
from .hardware import BYTES_PER_ELEMENT
from .transformer import Decoder, LayerKind, ParallelLayout, stage_layers

# Measured by BigScience in the chronicles of BLOOM: CUDA's context and NCCL's buffers, as nvidia-smi shows them.
CONTEXT_BYTES = 1.5e9
# What PyTorch gives cuBLAS to work in on Hopper (CUBLAS_WORKSPACE_CONFIG).
WORKSPACE_BYTES = 32 * 2**20
# The share of the caching allocator's blocks that holds nothing (an allowance: BLOOM's rows show 0.1 to 0.2).
FRAGMENTATION = 0.15


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def allocated(self) -> float:
        """What the framework's allocator holds at the peak."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def used(self) -> float:
        """What the device's own tools show: with fragmentation and the context."""
        return self.allocated * (1 + FRAGMENTATION) + CONTEXT_BYTES


def layer_activation_bytes(model: Decoder, layout: ParallelLayout, kind: LayerKind | None = None) -> float:
    """Saved by one layer of one microbatch on one rank (Korthikanti et al. 2022, section 4, for any decoder).

    Per token and 16-bit element: norms' inputs, inputs of products, what the activation and the attention need. Of
    products in 8 bits or fewer, the inputs are saved so.
    """
    e = 2.0
    given = BYTES_PER_ELEMENT[layout.dtype] if layout.dtype in ("fp8", "fp4") else e  # of a product's input
    tokens = layout.microbatch * model.seq / layout.cp
    rows = tokens / (layout.tp if layout.sequence_parallel else 1)
    if layout.recompute == "full" and layout.recompute_share == 1.0:
        return e * rows * model.hidden
    kind = kind or model.kinds[-1]
    heads, keys = model.heads / layout.tp, max(1.0, model.kv / layout.tp)
    mask = 1 if model.dropout else 0
    # two norms' inputs, two products' inputs (whole, gathered again in backward under sequence parallelism)
    found = rows * model.hidden * (2 * e + 2 * given + 2 * mask)
    found += tokens * (heads + keys) * (model.width + model.value) * e  # query, keys, values; the mix
    if model.kv_rank:  # of the first products, what norms read and what they make
        found += 2 * e * rows * (model.query_rank + model.kv_rank)
    if not layout.kernels.flash and layout.recompute != "selective":
        scores = layout.microbatch * model.heads / layout.tp * (model.seq / layout.cp) * model.seq
        found += scores * (e + ((e + 1) if model.dropout else 0))
    ways = 2 if model.gated else 1
    if not kind.dense:
        arriving = tokens * model.top_k * layout.expert_tp / layout.tp
        found += arriving * ((e + given) * model.hidden + (ways * e + given) * model.moe_ffn / layout.expert_tp)
    found += tokens * (ways * e + given) * (model.ffn if kind.dense else model.shared_ffn) / layout.tp
    if layout.recompute == "full":
        return layout.recompute_share * e * rows * model.hidden + (1 - layout.recompute_share) * found
    return found


def backward_bytes(model: Decoder, layout: ParallelLayout) -> float:
    """Gradients of activations at the largest: while one layer's backward runs, those of its input and its result, and
    those of what its MLP's activation, or its softmax, makes and is given."""
    tokens = layout.microbatch * model.seq / layout.cp
    rows = tokens / (layout.tp if layout.sequence_parallel else 1)
    ways = 2 if model.gated else 1
    wide = tokens * model.ffn / layout.tp
    if model.experts:
        wide = tokens * model.top_k / layout.tp * (layout.expert_tp * model.hidden + model.moe_ffn)
    scores = 0.0
    if not layout.kernels.flash:
        scores = layout.microbatch * model.heads / layout.tp * (model.seq / layout.cp) * model.seq
    return 2.0 * (2 * rows * model.hidden + max((1 + ways) * wide, 2 * scores))


def in_flight(layout: ParallelLayout, stage: int) -> float:
    """Microbatches whose activations a stage holds at once, in units of all its layers.

    1F1B: p - stage; interleaved: 1 + (p - 1) / (p v) of that more (Korthikanti et al. 2022, section 4.2.3).
    """
    depth, count = layout.pp, layout.microbatches
    if layout.schedule == "gpipe":
        return float(count)
    if layout.vpp > 1:
        warm = (depth - stage - 1) * 2 + (layout.vpp - 1) * depth + 1
        return min(warm / layout.vpp, float(count))
    return float(min(depth - stage, count))


def stage_memory(model: Decoder, layout: ParallelLayout, stage: int) -> Memory:
    """Memory of a rank of ``stage``."""
    dense, spread = closed_forms.held_parameters(model, layout, stage)
    last = layout.pp - 1
    element = BYTES_PER_ELEMENT[layout.gradient_dtype]
    shards, expert_shards = layout.shards, max(1, layout.shards * layout.tp // (layout.ep * layout.expert_tp))

    def split(number: float, over: int, since: int) -> float:
        return number / over if layout.zero >= since else number

    def both(since: int, size: float) -> float:
        return size * (split(dense, shards, since) + split(spread, expert_shards, since))

    # gradients that are not added up inside their products exist in 16 bits, too
    parameters, gradients = (
        both(3, 2.0),
        both(2, element if layout.kernels.fused_gradients or element == 2 else element + 2),
    )
    # a 32-bit copy, Adam's two moments, and 32-bit gradients where they are not 32-bit anyway
    optimizer = both(1, 12.0 if element == 4 else 16.0)
    tokens = layout.microbatch * model.seq / layout.cp
    before, count = sum(stage_layers(model, layout)[:stage]), stage_layers(model, layout)[stage]
    kinds = model.kinds[before : before + count] + (model.kinds[-1],) * (model.predicted if stage == last else 0)
    saved = in_flight(layout, stage) * sum(layer_activation_bytes(model, layout, kind) for kind in kinds)
    if layout.recompute == "full":  # one layer is redone at a time
        bare = ParallelLayout(**{**vars(layout), "recompute": "none"})
        saved += layer_activation_bytes(model, bare)
    saved += backward_bytes(model, layout)
    if layout.holds_outputs and layout.pp > 1:  # what a stage has sent, until its gradient arrives
        saved += in_flight(layout, stage) * 2.0 * tokens * model.hidden
    buffers = layout.bucket_bytes + WORKSPACE_BYTES
    if stage == last:  # logits: 16-bit, 32-bit, and their gradient
        saved += tokens * model.vocab / layout.tp * (2 + 4 + 4)
    if layout.zero == 3 and shards > 1:
        experts = closed_forms.expert_parameters(model) if model.experts else 0.0
        each = (closed_forms.layer_parameters(model) - experts) / layout.tp
        each += experts / (layout.ep * layout.expert_tp)
        tables = dense - len(kinds) * (closed_forms.layer_parameters(model) - experts) / layout.tp
        # parameters of this layer and the next one, and of the tables, which are gathered first and freed last; then
        # one unit's gradients before they are scattered, with the copy that is summed in another dtype
        buffers += 2 * 2.0 * each + 2.0 * max(0.0, tables) + max(each, tables) * (2 + (element if element > 2 else 0))
    return Memory(parameters, gradients, optimizer, saved, buffers)


def peak_memory(model: Decoder, layout: ParallelLayout) -> Memory:
    """Of the fullest stage."""
    return max(
        (stage_memory(model, layout, stage) for stage in {0, layout.pp // 2, layout.pp - 1}), key=lambda m: m.allocated
    )
