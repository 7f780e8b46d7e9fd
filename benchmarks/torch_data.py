"""The model on one device, and torch's own data parallelism: DistributedDataParallel, and fully_shard (FSDP2)."""

from __future__ import annotations

import torch.distributed as dist
from dtensor import whole
from harness import Peer
from models import Batch, Llama, loss_fn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def single(model: Llama, batch: Batch) -> Peer:
    """Plain eager PyTorch on one process."""
    return _peer(model, model)


def ddp(model: Llama, batch: Batch) -> Peer:
    """With gradients as views into the buckets that are reduced, which saves a copy."""
    return _peer(model, DistributedDataParallel(model, gradient_as_bucket_view=True))


def fsdp(model: Llama, batch: Batch) -> Peer:
    """Every block is a unit, and so is the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _peer(model, model)


def _peer(model: nn.Module, runs: nn.Module) -> Peer:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parameters = dict(model.named_parameters())

    def step(batch: Batch) -> Tensor:
        tokens, targets = (x.chunk(ranks)[rank] for x in batch)
        loss = loss_fn(runs(tokens), targets)
        loss.backward()
        total = loss.detach()
        if ranks > 1:
            dist.all_reduce(total)  # the loss of the whole batch, as the others give it
        return total / ranks

    def gradients() -> dict[str, Tensor]:
        return {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None}

    return Peer(step, list(parameters.values()), gradients)
