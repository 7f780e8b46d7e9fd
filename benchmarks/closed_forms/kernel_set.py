"""Which kernels a system runs for the same decoder: a fact about its software, beside the model and the layout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Passes:
    """Times that each element is read or written, and kernels, forward and backward."""

    forward: float
    backward: float
    forward_launches: int = 1
    backward_launches: int = 1


@dataclass(frozen=True)
class KernelSet:
    """Operations that are one kernel, or several; all but products and attention are bound by memory traffic.

    ``norm``, ``residual`` (of a row of activations), ``rotary`` (of queries and keys), ``split`` (of queries, keys and
    values that are one product: their gradients are written side by side), ``activation`` and ``gated_activation`` (of
    the MLP's width), ``loss`` and, where ranks share the vocabulary, ``split_loss`` (of logits in 32 bits; logits in 16
    bits are cast there and back beside that), ``embedding`` (of rows of the table): their passes over memory.
    ``joined``: whether queries, keys and values are one product, and so are the gate and what it gates; else their
    inputs' gradients are added up. ``fused_gradients``: whether products of weights' gradients add to the accumulator.
    ``softmax_groups``: the softmax of attention that is not fused is one kernel where pairs of a sequence and a head
    are whole groups of so many, else PyTorch's operators. ``flash``: fused attention, of ``flash_generation`` (0 for
    the device's newest). ``early_stop``: whether recomputing ends with the last value that the backward reads
    (``torch.utils.checkpoint`` without reentrance), so that a layer's last product is not redone. ``own_ring``: a ring
    of context ranks is this compiler's, where gradients of keys and values travel in 32 bits, and ranks exchange halves
    of their positions around attention to balance its work; else batches are laid out so. ``optimizer_bytes``: read and
    written for each parameter by a step of the optimizer.
    """

    norm: Passes = Passes(2, 3, 1, 2)
    residual: Passes = Passes(3, 3)
    rotary: Passes = Passes(2, 2, 2, 2)
    split: Passes = Passes(0, 2, 0, 1)
    activation: Passes = Passes(2, 3)
    gated_activation: Passes = Passes(3, 5)
    loss: Passes = Passes(4, 2, 5, 2)
    split_loss: Passes = Passes(4, 2, 5, 2)
    embedding: Passes = Passes(4, 4, 4, 4)
    joined: bool = True
    fused_gradients: bool = True
    softmax_groups: int = 1
    flash: bool = True
    flash_generation: int = 0
    early_stop: bool = False
    own_ring: bool = False
    # Mixed-precision Adam: gradients to fp32 and their norm (r4 w4, r4), parameter, two moments and gradient (r16,
    # w12), and the 16-bit copy (r4 w2).
    optimizer_bytes: float = 46


# Megatron-LM: bias, dropout and residual are one kernel, so are the activation with its gate, and each of the
# rotations; norms are Apex' fast ones. Its fused softmax takes groups of four (FusedScaleMaskSoftmax).
MEGATRON = KernelSet(softmax_groups=4)
# Transformer Engine attends to queries, keys and values where they are.
TRANSFORMER_ENGINE = KernelSet(split=Passes(0, 0, 0, 0))
# PyTorch's norms, and Apex' without its fast layer norm, read the result's gradient and the input a second time, for
# the gradients of weight and bias.
TWO_PASSES = Passes(2, 5, 1, 2)
# A module of transformers as this compiler runs it for CUDA: RMS norms are one kernel (passes/lowering/fuse_norms.py),
# and products of weights' gradients add to the accumulator; rotary embeddings, activations and losses are PyTorch's
# operators. AdamW reads parameter, gradient and two moments and writes three of them, of 4 bytes each.
QUINTNET = KernelSet(
    norm=Passes(2, 5, 1, 3), rotary=Passes(10, 10, 10, 10), gated_activation=Passes(5, 9, 2, 3),
    loss=Passes(2, 4, 3, 3), split_loss=Passes(1, 2, 17, 21), embedding=Passes(2, 1, 1, 1),
    joined=False, early_stop=True, own_ring=True, optimizer_bytes=28,
)  # fmt: skip
