"""What published runs' sources say about their clusters and software. Facts, not calibration: none is fitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from benchmarks.closed_forms.kernel_set import MEGATRON, TRANSFORMER_ENGINE, TWO_PASSES, KernelSet, Passes

GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Facts:
    """About all rows of one source.

    ``network``: bytes per second of one node's adapters, one way (None: the device's usual build). ``overlap_dp``,
    ``overlap_pp``, ``owners``, ``whole_sends``, ``holds_outputs``, ``gradient_dtype``, ``kernels``: of the training
    software (see ``ParallelLayout``; whether attention is fused is a row's own).
    ``vocab``: where a source's rows leave it open. ``assume_none``: a recompute column left blank means none.
    ``convention``: what it counts as FLOPs (``published_flops.py``; empty: not known). ``interleaves``: its software
    can interleave pipeline stages, so a blank number of them is not one.
    """

    about: str
    network: float | None = None
    network_h100: float | None = None
    overlap_dp: bool = True
    owners: bool = False
    overlap_pp: bool = True
    whole_sends: bool = False
    holds_outputs: bool = False
    gradient_dtype: str = "fp32"
    vocab: int | None = None
    assume_none: bool = False
    convention: str = ""
    interleaves: bool = False
    kernels: KernelSet = MEGATRON
    blocking: bool = False
    bucket_bytes: float = 0.0


SEPARATE_GRADIENTS = replace(MEGATRON, fused_gradients=False, norm=TWO_PASSES)
_MEGATRON_2021 = {"overlap_dp": False, "overlap_pp": False, "gradient_dtype": "fp16", "convention": "narayanan"}
# PyTorch's operators one by one, beside fused attention (RECALLED: the MPT recipes of then set attn_impl: triton, a
# FlashAttention 1, and activation_checkpointing_reentrant: false). Composer's decoupled AdamW is a loop of operators.
LLM_FOUNDRY = KernelSet(
    norm=TWO_PASSES, loss=Passes(2, 4, 3, 3), embedding=Passes(2, 1, 1, 1), fused_gradients=False, flash_generation=1,
    early_stop=True, optimizer_bytes=100,
)  # fmt: skip
# internlm/model/modeling_internlm.py and linear.py: the input of each norm is cast to 32 bits for Apex' norm, gate and
# up are two products, their activation two operators of PyTorch; doc/en/install.md has FlashAttention 1.0.5.
INTERN_EVO = KernelSet(
    norm=Passes(6, 11, 2, 4), gated_activation=Passes(5, 9, 2, 3), joined=False, fused_gradients=False,
    flash_generation=1,
)  # fmt: skip
_DEEPSPEED = {
    "overlap_dp": False, "overlap_pp": False, "gradient_dtype": "fp16", "kernels": SEPARATE_GRADIENTS,
    "holds_outputs": True,  # its pipeline engine's buffers have inputs and outputs
    "bucket_bytes": 2 * 5e8 * 2,  # DeepSpeed's default buckets: two of 5e8 16-bit elements
}  # fmt: skip

# FLOPs by Megatron's num_floating_point_operations, which halves the scores since 2025: the rates of 90 rows of MBR,
# CARD and ZOO that state tokens per second, too, are those of "causal" within 3%; that of MLM of 2024 is "full".
_NEMO = {"kernels": TRANSFORMER_ENGINE, "interleaves": True}

FACTS: Mapping[str, Facts] = MappingProxyType(
    {
        "KORTH": Facts("Selene: 8 HDR adapters per node (Narayanan et al. 2021, section 5); MFU without what is redone",
                       **_MEGATRON_2021 | {"convention": "korthikanti"}),  # type: ignore[arg-type]
        "NARA": Facts("Selene: 8 HDR adapters per node (section 5)", kernels=SEPARATE_GRADIENTS, interleaves=True,
                      **_MEGATRON_2021),  # type: ignore[arg-type]
        "MLM2020": Facts("Selene, and DGX-2 (Megatron-LM README of 2020)", kernels=SEPARATE_GRADIENTS,
                         **_MEGATRON_2021),  # type: ignore[arg-type]
        "VTM": Facts("vTrain config: 800 Gb/s per node; simulator's default vocabulary", 800 * GIGABIT, vocab=50257,
                     **_DEEPSPEED),  # type: ignore[arg-type]
        "VTS": Facts("vTrain config: one node; simulator's default vocabulary", 800 * GIGABIT, vocab=50257,
                     **_DEEPSPEED),  # type: ignore[arg-type]
        "BLOOM": Facts("Jean Zay: 4 Omni-Path 100 Gb/s adapters per node; CUDA_LAUNCH_BLOCKING=1 against hangs, "
                       "no --partition-activations (BigScience chronicles and tr11-176B-ml.slurm)", 400 * GIGABIT,
                       convention="narayanan", blocking=True, whole_sends=True, **_DEEPSPEED),  # type: ignore[arg-type]
        "JZV100": Facts("Jean Zay's V100 nodes: 4 GPUs, 4 Omni-Path 100 Gb/s", 400 * GIGABIT, **_DEEPSPEED),  # type: ignore[arg-type]
        "LLMF": Facts("llm-foundry benchmarking README: A100 1600 Gb/s RoCE", 1600 * GIGABIT, 3200 * GIGABIT,
                      kernels=LLM_FOUNDRY, convention="full"),
        "FMS": Facts("IBM: 400 Gb/s per A100 node, 800 per H100 node", 400 * GIGABIT, 800 * GIGABIT,
                    gradient_dtype="bf16", kernels=replace(MEGATRON, flash_generation=2), convention="full"),
        "DGXC": Facts("NVIDIA DGX Cloud recipes: NeMo, 400 Gb/s per GPU; FLOPs by model", assume_none=True, **_NEMO),
        "MBR": Facts("Megatron-Bridge performance summary, 400 Gb/s per GPU", convention="causal", **_NEMO),
        "MLM": Facts("Megatron-LM golden values, one node", kernels=TRANSFORMER_ENGINE, convention="full"),
        "MCORE": Facts("Megatron-LM README of 2024: 400 Gb/s per GPU", convention="full", **_NEMO),
        "SKILL": Facts("Megatron-Bridge skills documents", convention="causal", **_NEMO),
        "ZOO": Facts("Megatron MoE model zoo: IB 8 x 50 GB/s", convention="causal", **_NEMO),
        "CARD": Facts("Megatron-Bridge verification cards", convention="causal", **_NEMO),
        "IEVO": Facts("InternEvo: 4 x 100 Gb/s RoCE per node (doc/en/train_performance.md); gradients are reduced in "
                      "the parameters' dtype (hybrid_zero_optim.py)", 400 * GIGABIT, gradient_dtype="bf16",
                      convention="narayanan", owners=True,
                      kernels=INTERN_EVO),
        "TITAN": Facts("torchtitan: 400 Gb/s per GPU; scaled_dot_product_attention runs FlashAttention 2",
                       kernels=replace(MEGATRON, flash_generation=2)),
        "MSCALE": Facts("MegaScale: 8 x 200 Gb/s per node", 1600 * GIGABIT, overlap_dp=False, overlap_pp=False),
        "LLAMA3": Facts("Llama 3: 400 Gb/s RoCE per GPU"),
        "MTNLG": Facts("Selene: 8 HDR adapters per node", **_DEEPSPEED),  # type: ignore[arg-type]
    }
)  # fmt: skip
UNKNOWN = Facts("unknown source: the device's usual build")


def facts_of(row_id: str) -> Facts:
    """The facts of the source that a row's id begins with."""
    return FACTS.get(row_id.partition("-")[0], UNKNOWN)
