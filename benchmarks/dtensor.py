"""The same model under torch's own tensor parallelism: ``parallelize_module`` with its standard plan."""

from __future__ import annotations

from harness import RANKS, Peer
from models import Batch, Llama, loss_fn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def plan(model: Llama, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Column, column, row; with sequence parallelism the residual stream and norms are split along it."""
    between = Shard(1) if sequence_parallel else Replicate()
    styles: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    for index in range(len(model.layers)):
        at = f"layers.{index}"
        # Entering once per region, not once per projection, saves collectives, as in torch's tutorial.
        styles |= {
            f"{at}.attention": PrepareModuleInput(
                input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            f"{at}.mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
            f"{at}.attention.o": RowwiseParallel(output_layouts=between),
            f"{at}.mlp.down": RowwiseParallel(output_layouts=between),
        }
        styles |= {f"{at}.attention.{name}": ColwiseParallel() for name in "qkv"}
        styles |= {f"{at}.mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
        if sequence_parallel:
            styles |= {f"{at}.{name}": SequenceParallel() for name in ("norm1", "norm2")}
    if sequence_parallel:
        styles["norm"] = SequenceParallel()
    return styles


def build(model: Llama, batch: Batch, *, sequence_parallel: bool) -> Peer:
    """The parallelized model as a peer."""
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan(model, sequence_parallel))
    parameters = dict(model.named_parameters())

    def step(batch: Batch) -> Tensor:
        tokens, targets = batch
        loss = loss_fn(model(tokens), targets)
        loss.backward()
        for parameter in parameters.values():
            grad = parameter.grad
            if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
                # Norm weights of sequence parallelism: not settled until they are summed over the ranks.
                parameter.grad = grad.redistribute(placements=[Replicate()])
        return loss.detach()

    def gradients() -> dict[str, Tensor]:
        return {name: _whole(p.grad) for name, p in parameters.items() if p.grad is not None}

    return Peer(step, list(parameters.values()), gradients)


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
