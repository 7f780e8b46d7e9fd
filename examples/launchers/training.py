"""What the scripts of this folder train: a small regression, split over all ranks that were started."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet


def model_and_batch() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The same on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
    x = torch.randn(64, 8)
    return model, (x, x.sum(1, keepdim=True))


def train(steps: int = 20) -> float:
    """The last loss."""
    model, batch = model_and_batch()
    mesh = quintnet.Mesh(dp=dist.get_world_size() if dist.is_initialized() else 1)
    program = quintnet.compile(model, mesh, batch, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    for _ in range(steps):
        loss = program.step(batch)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)
