"""Tensor parallelism written by hand, in the way of Megatron-LM.

Attention heads and hidden units are divided over the ranks; a block communicates twice in forward (g) and
twice in backward (f). Embedding, head and loss are parallel over the vocabulary: nobody holds whole logits.
With sequence parallelism the values between are divided over the sequence, which is then dim 0, so that
collectives need no copies.

Fused projections, a replicated embedding, gathered logits, and f overlapping the weights' gradients were
tried: on two processes none of them is faster beyond the noise.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Peer
from models import Attention, Batch, Block, Llama, RMSNorm, attend
from torch import Tensor, nn
from torch.autograd import Function

# -- communication: each autograd function is the transpose of another one


def _all_gather(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_single(out, x.contiguous())
    return out


def _reduce_scatter(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_single(out, x.contiguous())
    return out


class EnterRegion(Function):
    """f: identity; its backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)  # in place: the sum of the projections' input gradients belongs to nobody else
        return grad


class LeaveRegion(Function):
    """g: the sum over ranks; its backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class GatherSequence(Function):
    """f of sequence parallelism: all-gather; backward reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _reduce_scatter(grad)


class ScatterSequence(Function):
    """g of sequence parallelism: reduce-scatter; backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _all_gather(grad)


class VocabParallelCrossEntropy(Function):
    """Mean cross-entropy of logits ``[tokens, vocab / ranks]``: one small all-gather, no whole logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        count, width = logits.shape
        local = targets - dist.get_rank() * width
        elsewhere = (local < 0) | (local >= width)
        local = local.masked_fill(elsewhere, 0)
        top = logits.amax(dim=1)
        target = logits.gather(1, local[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        powers = (logits - top[:, None]).exp_()
        # All of a rank's statistics travel together, each relative to the rank's own maximum.
        mine = torch.stack((top, powers.sum(dim=1), target))
        tops, sums, targets_logits = _all_gather(mine).view(-1, 3, count).unbind(1)
        whole_top = tops.amax(dim=0)
        total = (sums * (tops - whole_top).exp_()).sum(dim=0)
        ctx.save_for_backward(powers, (top - whole_top).exp_() / total, local, elsewhere)
        return (total.log() + whole_top - targets_logits.sum(dim=0)).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        powers, scale, local, elsewhere = ctx.saved_tensors
        grads = powers.mul_(scale[:, None])  # in place: a step runs backward once
        grads.scatter_add_(1, local[:, None], elsewhere[:, None].to(grads.dtype) - 1)
        return grads.mul_(grad / len(local)), None


def enter(x: Tensor, sequence_parallel: bool) -> Tensor:
    """From equal values (or parts of the sequence) to where each rank works on its own heads or units."""
    out: Tensor = (GatherSequence if sequence_parallel else EnterRegion).apply(x)
    return out


def leave(x: Tensor, sequence_parallel: bool) -> Tensor:
    """Back again, from partial sums."""
    out: Tensor = (ScatterSequence if sequence_parallel else LeaveRegion).apply(x)
    return out


# -- layers


class Split(nn.Module):
    """Owns this rank's part of a weight, divided along ``dim``."""

    def __init__(self, whole: Tensor, dim: int) -> None:
        super().__init__()
        self.dim = dim
        part = whole.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
        self.weight = nn.Parameter(part.clone(memory_format=torch.contiguous_format))


class SplitLinear(Split):
    """Column parallel with ``dim`` 0; row parallel, giving a partial sum, with ``dim`` 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class VocabParallelEmbedding(Split):
    """Gives a partial sum: zeros for the tokens of other ranks."""

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local = tokens - dist.get_rank() * rows
        elsewhere = (local < 0) | (local >= rows)
        rows_found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return rows_found.masked_fill(elsewhere[..., None], 0.0)


class MegatronAttention(nn.Module):
    def __init__(self, whole: Attention, sequence_parallel: bool) -> None:
        super().__init__()
        self.head_dim = whole.head_dim
        self.sequence_parallel = sequence_parallel
        self.q, self.k, self.v = (SplitLinear(part.weight, 0) for part in (whole.q, whole.k, whole.v))
        self.o = SplitLinear(whole.o.weight, 1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = enter(x, self.sequence_parallel)  # once for all three: their gradients are added, then reduced
        outer, inner, _ = x.shape
        order = (1, 2, 0, 3) if self.sequence_parallel else (0, 2, 1, 3)
        back = (2, 0, 1, 3) if self.sequence_parallel else (0, 2, 1, 3)
        q, k, v = (
            project(x).view(outer, inner, -1, self.head_dim).permute(order) for project in (self.q, self.k, self.v)
        )
        mixed = attend(q, k, v, cos, sin).permute(back).reshape(outer, inner, -1)
        return leave(self.o(mixed), self.sequence_parallel)


class MegatronBlock(nn.Module):
    def __init__(self, whole: Block, sequence_parallel: bool) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.norm1, self.norm2 = whole.norm1, whole.norm2
        self.attention = MegatronAttention(whole.attention, sequence_parallel)
        self.mlp = nn.ModuleDict(
            {
                "gate": SplitLinear(whole.mlp.gate.weight, 0),
                "up": SplitLinear(whole.mlp.up.weight, 0),
                "down": SplitLinear(whole.mlp.down.weight, 1),
            }
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = enter(self.norm2(x), self.sequence_parallel)
        y = self.mlp["down"](F.silu(self.mlp["gate"](y)) * self.mlp["up"](y))
        return x + leave(y, self.sequence_parallel)


class MegatronLlama(nn.Module):
    """Token and target ids to the loss; parameters have the model's names."""

    def __init__(self, whole: Llama, sequence_parallel: bool) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.embed = VocabParallelEmbedding(whole.embed.weight, 0)
        self.layers = nn.ModuleList(MegatronBlock(cast(Block, layer), sequence_parallel) for layer in whole.layers)
        self.norm = whole.norm
        self.head = SplitLinear(whole.head.weight, 0)
        self.cos, self.sin = whole.cos, whole.sin

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.sequence_parallel:
            tokens, targets = tokens.t(), targets.t()
        x = leave(self.embed(tokens), self.sequence_parallel)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(enter(self.norm(x), self.sequence_parallel))
        out: Tensor = VocabParallelCrossEntropy.apply(logits.flatten(0, 1), targets.flatten())
        return out


# -- the step


def build(model: Llama, batch: Batch, *, sequence_parallel: bool) -> Peer:
    """The hand-written module as a peer."""
    ours = MegatronLlama(model, sequence_parallel)
    norms = [module.weight for module in ours.modules() if isinstance(module, RMSNorm)]

    def step(batch: Batch) -> Tensor:
        loss: Tensor = ours(*batch)
        loss.backward()
        if sequence_parallel:  # each rank normalised only its part of the sequence
            _all_reduce_together([weight.grad for weight in norms if weight.grad is not None])
        return loss.detach()

    def gradients() -> dict[str, Tensor]:
        return {name: _whole_gradient(ours, name, p) for name, p in ours.named_parameters()}

    return Peer(step, list(ours.parameters()), gradients)


def _all_reduce_together(tensors: list[Tensor]) -> None:
    bucket = torch.cat([x.flatten() for x in tensors])
    dist.all_reduce(bucket)
    parts = bucket.split([x.numel() for x in tensors])
    torch._foreach_copy_(tensors, [part.view_as(x) for part, x in zip(parts, tensors, strict=True)])


def _whole_gradient(model: nn.Module, name: str, parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    owner = model.get_submodule(name.rpartition(".")[0])
    if not isinstance(owner, Split):
        return parameter.grad
    parts = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, parameter.grad.contiguous())
    return torch.cat(parts, owner.dim)
