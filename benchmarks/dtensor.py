"""The same model under torch's own tensor parallelism: ``parallelize_module`` with its standard plan."""

from __future__ import annotations

from harness import Peer
from models import Batch, Llama, loss_fn
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def plan(model: nn.Module, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Column, column, row; with sequence parallelism the residual stream and norms are split along it."""
    between = Shard(1) if sequence_parallel else Replicate()
    styles: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence_parallel:
        styles["norm"] = SequenceParallel()
    blocks = [name.removesuffix(".attention") for name, _ in model.named_modules() if name.endswith(".attention")]
    for at in blocks:
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
    present = {name for name, _ in model.named_modules()}
    return {name: style for name, style in styles.items() if name in present}


def parallelize(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """In place; a pipeline stage has only some of the model's modules."""
    parallelize_module(model, mesh, plan(model, sequence_parallel))


def build(model: Llama, batch: Batch, *, sequence_parallel: bool) -> Peer:
    """The parallelized model as a peer."""
    parallelize(model, init_device_mesh("cpu", (distributed.get_world_size(),)), sequence_parallel=sequence_parallel)
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
        return {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None}

    return Peer(step, list(parameters.values()), gradients)


def whole(gradient: Tensor) -> Tensor:
    """Return the whole tensor of all ranks."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
