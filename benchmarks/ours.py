"""quintnet's side of the benchmarks: the only file here that knows its interface."""

from __future__ import annotations

from typing import Any

from dtensor import whole
from harness import Peer
from models import Batch, Llama, loss_fn
from torch import Tensor


def build(model: Llama, batch: Batch, *, mesh: dict[str, int], **plan: Any) -> Peer:
    """The compiled program as a peer."""
    import quintnet  # here, so that a broken installation is this peer's error and nobody else's

    program = quintnet.compile(model, quintnet.Mesh(**mesh), batch, loss_fn=loss_fn, **plan)

    def gradients() -> dict[str, Tensor]:
        return {name: whole(p.grad) for name, p in program.named_parameters() if p.grad is not None}

    return Peer(program.step, list(program.parameters()), gradients)
