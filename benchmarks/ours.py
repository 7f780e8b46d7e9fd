"""quintnet's side of the benchmarks: the only file here that knows its interface."""

from __future__ import annotations

from typing import Any

from harness import Peer
from models import Batch, Llama, loss_fn
from torch import Tensor
from torch.distributed.tensor import DTensor


def tensor_parallel(model: Llama, batch: Batch, *, sequence_parallel: bool) -> Peer:
    """tp=2."""
    import quintnet  # here, so that a broken installation is this peer's error and nobody else's

    mesh = quintnet.Mesh(tp=2)
    return _peer(quintnet.compile(model, mesh, batch, loss_fn=loss_fn, sequence_parallel=sequence_parallel))


def pipeline(model: Llama, batch: Batch, *, microbatches: int) -> Peer:
    """pp=2, 1F1B."""
    import quintnet

    mesh = quintnet.Mesh(pp=2)
    return _peer(quintnet.compile(model, mesh, batch, loss_fn=loss_fn, microbatches=microbatches, schedule="1f1b"))


def _peer(program: Any) -> Peer:
    def gradients() -> dict[str, Tensor]:
        return {name: _whole(p.grad) for name, p in program.named_parameters()}

    return Peer(program.step, list(program.parameters()), gradients)


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
