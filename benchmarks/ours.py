"""quintnet's side of the benchmarks: the only file here that knows its interface."""

from __future__ import annotations

import gc
from typing import Any

import torch
from dtensor import whole
from harness import Peer, allocated_bytes
from models import Batch, Llama, loss_fn
from torch import Tensor, nn
from torch.nn.functional import mse_loss


def build(model: Llama, batch: Batch, *, mesh: dict[str, int], **plan: Any) -> Peer:
    """The compiled program as a peer."""
    code = _loaded(mesh)
    import quintnet

    program = quintnet.compile(model, quintnet.Mesh(**mesh), batch, loss_fn=loss_fn, **plan)

    def gradients() -> dict[str, Tensor]:
        return {name: whole(p.grad) for name, p in program.named_parameters() if p.grad is not None}

    return Peer(program.step, list(program.parameters()), gradients, code)


def _loaded(mesh: dict[str, int]) -> int:
    """The bytes that quintnet takes, and what compiling loads: torch.export, and a solver where an axis asks for it."""
    baseline = allocated_bytes() or 0
    import quintnet  # here, so that a broken installation is this peer's error and nobody else's

    first = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    quintnet.compile(first, quintnet.Mesh(**mesh), (torch.zeros(16, 8), torch.zeros(16, 8)), loss_fn=mse_loss)
    del first
    gc.collect()
    return (allocated_bytes() or 0) - baseline
