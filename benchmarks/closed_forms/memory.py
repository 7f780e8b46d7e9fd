"""Memory of the fullest rank: parameters, gradients, optimizer state, activations at the schedule's peak, the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quintnet_compiler.cost_models.hardware import BYTES_PER_ELEMENT

from . import expressions
from .transformer import Decoder, LayerKind, ParallelLayout, stage_layers

# Measured by BigScience in the chronicles of BLOOM: CUDA's context and NCCL's buffers, as nvidia-smi shows them.
CONTEXT_BYTES = 1.5e9
# What PyTorch gives cuBLAS to work in on Hopper (CUBLAS_WORKSPACE_CONFIG).
WORKSPACE_BYTES = 32 * 2**20
# The share of the caching allocator's blocks that holds nothing (an allowance: BLOOM's rows show 0.1 to 0.2).
FRAGMENTATION = 0.15
ELEMENT_BYTES = 2.0  # of activations


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
        """Return the bytes that the framework's allocator holds at the peak."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def used(self) -> float:
        """Return the bytes that the device's own tools show: with fragmentation and the context."""
        return self.allocated * (1 + FRAGMENTATION) + CONTEXT_BYTES


def layer_activation_bytes(model: Decoder, layout: ParallelLayout, kind: LayerKind | None = None) -> float:
    """Return the bytes that one layer saves of one microbatch on one rank.

    After Korthikanti et al. 2022, section 4, for any decoder. Per token and 16-bit element: norms' inputs, inputs of
    products, what the activation and the attention need. The inputs of products in 8 bits or fewer are saved so.
    """
    tokens = layout.microbatch * model.seq / layout.cp
    rows = tokens / (layout.tp if layout.sequence_parallel else 1)
    inputs = ELEMENT_BYTES * rows * model.hidden
    if layout.recompute == "full" and layout.recompute_share == 1.0:
        return inputs
    kind = kind or model.kinds[-1]
    saved = 0.0
    for term in (*_attention_activations(model, layout, tokens, rows), *_mlp_activations(model, layout, kind, tokens)):
        saved += term
    if layout.recompute == "full":
        return layout.recompute_share * inputs + (1 - layout.recompute_share) * saved
    return saved


def _product_input_bytes(layout: ParallelLayout) -> float:
    """Return the bytes per element of a product's input, as it is saved."""
    return BYTES_PER_ELEMENT[layout.dtype] if layout.dtype in ("fp8", "fp4") else ELEMENT_BYTES


def _attention_activations(model: Decoder, layout: ParallelLayout, tokens: float, rows: float) -> Iterator[float]:
    """Yield the bytes that norms, residuals and attention save."""
    e, product = ELEMENT_BYTES, _product_input_bytes(layout)
    heads, keys = model.heads / layout.tp, max(1.0, model.kv / layout.tp)
    mask = 1 if model.dropout else 0
    # two norms' inputs, two products' inputs (whole, gathered again in backward under sequence parallelism)
    yield rows * model.hidden * (2 * e + 2 * product + 2 * mask)
    yield tokens * (heads + keys) * (model.width + model.value) * e  # query, keys, values; the mix
    if model.kv_rank:  # inputs and results of the norms after the first products
        yield 2 * e * rows * (model.query_rank + model.kv_rank)
    if not layout.kernels.flash and layout.recompute != "selective":
        scores = layout.microbatch * model.heads / layout.tp * (model.seq / layout.cp) * model.seq
        yield scores * (e + ((e + 1) if model.dropout else 0))


def _mlp_activations(model: Decoder, layout: ParallelLayout, kind: LayerKind, tokens: float) -> Iterator[float]:
    """Yield the bytes that routed experts, and the MLP or the experts of all tokens, save."""
    e, product = ELEMENT_BYTES, _product_input_bytes(layout)
    ways = 2 if model.gated else 1
    if not kind.dense:
        arriving = tokens * model.top_k * layout.expert_tp / layout.tp
        yield arriving * ((e + product) * model.hidden + (ways * e + product) * model.moe_ffn / layout.expert_tp)
    yield tokens * (ways * e + product) * (model.ffn if kind.dense else model.shared_ffn) / layout.tp


def backward_bytes(model: Decoder, layout: ParallelLayout) -> float:
    """Return the bytes of gradients of activations at their peak.

    While one layer's backward runs, these are of its input and its result, and of the input and the result of its
    MLP's activation, or its softmax.
    """
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
    """Return the microbatches whose activations a stage holds at once, in units of all its layers.

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
    """Return the memory of a rank of ``stage``."""
    last = layout.pp - 1
    tokens = layout.microbatch * model.seq / layout.cp
    counts = stage_layers(model, layout)
    first, count = sum(counts[:stage]), counts[stage]
    kinds = model.kinds[first : first + count] + (model.kinds[-1],) * (model.predicted if stage == last else 0)
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
    if layout.zero == 3 and layout.shards > 1:
        buffers += _gathered_bytes(model, layout, stage, len(kinds))
    return Memory(*_state_bytes(model, layout, stage), saved, buffers)


def _state_bytes(model: Decoder, layout: ParallelLayout, stage: int) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and the optimizer's state."""
    dense, spread = expressions.held_parameters(model, layout, stage)
    element = BYTES_PER_ELEMENT[layout.gradient_dtype]
    expert_shards = max(1, layout.shards * layout.tp // (layout.ep * layout.expert_tp))

    def held_bytes(zero: int, size: float) -> float:
        """Return the bytes of ``size`` for each parameter, which ranks share from this level of ZeRO on."""
        if layout.zero < zero:
            return size * (dense + spread)
        return size * (dense / layout.shards + spread / expert_shards)

    # gradients that are not added up inside their products exist in 16 bits, too
    gradient = element if layout.kernels.fused_gradients or element == 2 else element + 2
    # a 32-bit copy, Adam's two moments, and 32-bit gradients where they are not 32-bit anyway
    return held_bytes(3, 2.0), held_bytes(2, gradient), held_bytes(1, 12.0 if element == 4 else 16.0)


def _gathered_bytes(model: Decoder, layout: ParallelLayout, stage: int, layers: int) -> float:
    """Return the bytes of buffers in which parameters are gathered, and gradients before they are scattered.

    These are parameters of this layer and the next one, and of the tables, which are gathered first and freed last;
    then one unit's gradients, with the copy that is summed in another dtype.
    """
    dense, _ = expressions.held_parameters(model, layout, stage)
    element = BYTES_PER_ELEMENT[layout.gradient_dtype]
    experts: float = expressions.expert_parameters(model) if model.experts else 0.0
    each: float = (expressions.layer_parameters(model) - experts) / layout.tp
    each += experts / (layout.ep * layout.expert_tp)
    tables: float = dense - layers * (expressions.layer_parameters(model) - experts) / layout.tp
    return 2 * 2.0 * each + 2.0 * max(0.0, tables) + max(each, tables) * (2 + (element if element > 2 else 0))


def peak_memory(model: Decoder, layout: ParallelLayout) -> Memory:
    """Return the memory of the fullest stage."""
    return max(
        (stage_memory(model, layout, stage) for stage in {0, layout.pp // 2, layout.pp - 1}), key=lambda m: m.allocated
    )
