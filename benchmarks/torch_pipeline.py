"""The same model under ``torch.distributed.pipelining``: two stages cut by hand, Schedule1F1B."""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import RANKS, Peer
from models import Batch, Llama, loss_fn
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Stage(nn.Module):
    """Half of the layers; the first stage also embeds, the last also has the head. Names are the model's."""

    def __init__(self, model: Llama, index: int) -> None:
        super().__init__()
        count = len(model.layers) // RANKS
        mine = range(index * count, len(model.layers) if index == RANKS - 1 else (index + 1) * count)
        self.embed = model.embed if index == 0 else None
        self.layers = nn.ModuleDict({str(number): model.layers[number] for number in mine})
        self.norm = model.norm if index == RANKS - 1 else None
        self.head = model.head if index == RANKS - 1 else None
        self.cos, self.sin = model.cos, model.sin

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def build(model: Llama, batch: Batch, *, microbatches: int) -> Peer:
    """torch's 1F1B as a peer."""
    rank = dist.get_rank()
    module = Stage(model, rank)

    def scaled_loss(logits: Tensor, targets: Tensor) -> Tensor:
        # Scaling here instead of scale_grads=True spares torch a pass over all gradients.
        return loss_fn(logits, targets) / microbatches

    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=scaled_loss, scale_grads=False)

    def step(batch: Batch) -> Tensor | None:
        tokens, targets = batch
        if rank == 0:
            schedule.step(tokens, return_outputs=False)
            return None
        losses: list[Tensor] = []
        schedule.step(target=targets, losses=losses, return_outputs=False)
        return torch.stack(losses).sum()

    def gradients() -> dict[str, Tensor]:
        return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}

    return Peer(step, list(module.parameters()), gradients)
