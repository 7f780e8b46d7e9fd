"""Plans as the planner makes them: they are exact when they run, and take no more memory than was planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from benchmarks import planned_memory


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gnn", "leaky"])
def test_planned_memory_is_enough(name: str) -> None:
    rows = planned_memory.compare(name, ranks=2, count=3, work=500.0)
    assert len(rows) == 3 and all(row["verified"] for row in rows)
    for row in rows:
        for measured, simulated, planned in zip(row["measured"], row["simulated"], row["planned"], strict=True):
            assert measured <= 1.01 * simulated
            assert measured <= 1.01 * planned


class Narrow(nn.Module):
    """Blocks whose parameters take more memory than what few rows save."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


LAYOUTS = [
    ({"dp": 2}, {"zero": 2}),
    ({"dp": 4}, {"zero": 3}),
    ({"dp": 2}, {"zero": 3, "recompute": "full"}),
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"dp": 2, "pp": 2}, {"zero": 3}),
]


@pytest.mark.parametrize(("axes", "decided"), LAYOUTS)
def test_a_plan_has_room_for_what_zero_has_whole(axes: dict[str, int], decided: dict[str, Any]) -> None:
    """Parameters and gradients of two blocks at a time, in messages too."""
    model, batch = Narrow(), (torch.randn(8, 64), torch.randn(8, 64))
    mesh = quintnet.Mesh(**axes)
    cluster = quintnet.Cluster("h100", gpus_per_node=mesh.size)
    plan = {"mesh": axes, "microbatches": 2, **decided}
    planned = quintnet.estimate(model, cluster, batch, plan, loss_fn=F.mse_loss).memory
    program = quintnet.compile(
        model,
        mesh,
        batch,
        loss_fn=F.mse_loss,
        device="cuda",
        microbatches=2,
        plan=decided,  # type: ignore[arg-type]
    )
    peaks = [row.peak.values for row in program.simulate(cluster).rows]
    assert max(peaks) <= max(one.saved + one.working for one in planned)
