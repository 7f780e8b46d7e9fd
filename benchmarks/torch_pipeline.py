"""The same model under ``torch.distributed.pipelining``: stages cut by hand, with DTensor inside where tp > 1."""

from __future__ import annotations

from typing import Any

import dtensor
import torch
from harness import Peer
from models import Batch, Llama, loss_fn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

SCHEDULES = {
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb-v": schedules.ScheduleZBVZeroBubble,
}


class Stage(nn.Module):
    """An equal share of the layers; the first stage also embeds, the last also has the head. Names are the model's."""

    def __init__(self, model: Llama, index: int, count: int) -> None:
        super().__init__()
        cuts = [len(model.layers) * at // count for at in range(count + 1)]
        self.embed = model.embed if index == 0 else None
        self.layers = nn.ModuleDict({str(n): model.layers[n] for n in range(cuts[index], cuts[index + 1])})
        self.norm = model.norm if index == count - 1 else None
        self.head = model.head if index == count - 1 else None
        self.cos, self.sin = model.cos, model.sin

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def build(model: Llama, batch: Batch, *, microbatches: int, schedule: str = "1f1b", pp: int = 2, tp: int = 1) -> Peer:
    """One of torch's schedules as a peer; with two stages on each rank where it asks for them."""
    mesh = init_device_mesh("cpu", (pp, tp), mesh_dim_names=("pp", "tp"))
    rank, each = mesh.get_local_rank("pp"), 1 if schedule == "1f1b" else 2
    count = pp * each
    mine = [rank] if each == 1 else [rank, count - 1 - rank if schedule == "zb-v" else pp + rank]
    modules = {index: Stage(model, index, count) for index in mine}
    for module in modules.values():
        if tp > 1:
            dtensor.parallelize(module, mesh["tp"], sequence_parallel=False)

    def scaled_loss(logits: Tensor, targets: Tensor) -> Tensor:
        # Scaling here instead of scale_grads=True spares torch a pass over all gradients.
        return loss_fn(logits, targets) / microbatches

    group, device = mesh.get_group("pp"), torch.device("cpu")
    stages = [PipelineStage(modules[index], index, count, device, group=group) for index in mine]
    runs: Any = SCHEDULES[schedule](
        stages if each > 1 else stages[0],  # type: ignore[arg-type]
        microbatches, loss_fn=scaled_loss, scale_grads=False,
    )  # fmt: skip

    def step(batch: Batch) -> Tensor | None:
        tokens, targets = batch
        inputs = (tokens,) if 0 in mine else ()
        losses: list[Tensor] = []
        last = {"target": targets, "losses": losses} if count - 1 in mine else {}
        runs.step(*inputs, **last, return_outputs=False)
        return torch.stack(losses).sum() if last else None

    parameters = {name: p for module in modules.values() for name, p in module.named_parameters()}

    def gradients() -> dict[str, Tensor]:
        return {name: dtensor.whole(p.grad) for name, p in parameters.items() if p.grad is not None}

    return Peer(step, list(parameters.values()), gradients)
