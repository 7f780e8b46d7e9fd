"""How the golden models are split. Together the three plans use every pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.api.compiled_program import CompiledProgram

from .models import MLP, Mixture, Transformer


@dataclass(frozen=True)
class Golden:
    """A model, a batch for it, and how it is split."""

    model: type[nn.Module]
    batch: tuple[Tensor, ...]
    mesh: Mesh
    plan: dict[str, Any] = field(default_factory=dict)
    loss_fn: Any = None

    def compiled(self) -> CompiledProgram:
        options = {"loss_fn": self.loss_fn, "check": "off", **self.plan}
        return quintnet.compile(self.model(), self.mesh, self.batch, **options)


@cache
def golden_program(name: str) -> CompiledProgram:
    """A program to read."""
    return GOLDEN[name].compiled()


@cache
def golden_passes(name: str) -> list[tuple[str, Any]]:
    """The name of each pass and the program after it, to read."""
    return golden_program(name).passes()


ROWS = (torch.zeros(8, 8), torch.zeros(8, 8))
TOKENS = (torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4, 8))
GOLDEN = {
    "mlp": Golden(MLP, ROWS, Mesh(dp=2, tp=2), {"zero": 3, "precision": "bf16"}, F.mse_loss),
    "transformer": Golden(
        Transformer, TOKENS, Mesh(pp=2, tp=2),
        {"microbatches": 2, "recompute": "selective", "sequence_parallel": True, "async_tp": True}, F.mse_loss,
    ),
    "mixture": Golden(Mixture, ROWS, Mesh(ep=2), {}, F.mse_loss),
}  # fmt: skip
