"""Plans with parameters on hosts: priced as they are simulated, and chosen where nothing else fits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintnet
from benchmarks.models import Llama, Size, loss_fn

pytestmark = pytest.mark.usefixtures("shared_captures")

SIZE = Size(dim=2048, layers=8, heads=16, kv_heads=16, hidden=8192, vocab=32000, sequence=1024)
PARAMETERS = ("parameters",)
PLANS: list[tuple[dict[str, int], dict[str, Any], int]] = [
    ({"dp": 1}, {}, 4),
    ({"dp": 1}, {"microbatches": 2}, 4),
    ({"dp": 4}, {"zero": 3}, 16),
    ({"dp": 4}, {"zero": 3, "microbatches": 2}, 32),
    ({"tp": 2}, {}, 4),
    ({"pp": 2}, {"microbatches": 4}, 16),
    ({"dp": 2, "tp": 2}, {"zero": 3, "recompute": "full"}, 16),
]


@cache
def llama() -> nn.Module:
    with torch.device("meta"):
        return Llama(SIZE)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    ids = torch.empty(rows, SIZE.sequence, dtype=torch.int64, device="meta")
    return ids, ids


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "decided", "rows"), PLANS, ids=str)
def test_an_estimate_is_what_is_simulated(axes: dict[str, int], decided: dict[str, Any], rows: int) -> None:
    """In time; and no less memory of the device. On the host are AdamW's moments, too."""
    mesh = quintnet.Mesh(**axes)
    cluster = quintnet.Cluster("h100", gpus_per_node=mesh.size)
    plan: Any = {"mesh": axes, "precision": "bf16", **decided, "offload": PARAMETERS}
    found = quintnet.estimate(llama(), cluster, batch(rows), plan, loss_fn=loss_fn)
    plan["stages"] = list(found.begins)
    program = quintnet.compile(llama(), mesh, batch(rows), loss_fn=loss_fn, device="cuda", plan=plan, check="off")
    timeline = program.simulate(cluster)
    assert found.seconds - found.optimizer == pytest.approx(timeline.seconds, rel=0.08)
    for planned, row in zip(found.memory, sorted(timeline.rows, key=lambda one: one.rank), strict=False):
        assert row.peak.bytes <= planned.total + 2**21  # tables of positions stay on the device
        assert planned.parameters == planned.optimizer == planned.settled == 0
        assert planned.host == pytest.approx(2 * row.host_bytes, rel=0.01)
    assert found.communication["from host"] > 0


class Large(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.blocks = nn.ModuleList(nn.Linear(2**14, 2**14, bias=False) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_they_are_chosen_where_nothing_else_fits(devices: int) -> None:
    """Parameters and gradients take 12 GiB of each device, which has 12 GB; a host has 30 for each. Where hosts do not
    have enough, either, nothing fits."""
    given = (torch.empty(8, 2**14, device="meta"),)
    device = {
        "name": "small", "tflops": {"fp32": 60, "bf16": 900}, "memory_gb_per_second": 3000, "memory_gb": 12,
        "link_gb_per_second": 400, "network_gb_per_second": 50, "host_gb_per_second": 64,
        "host_memory_gb_per_second": 200,
    }  # fmt: skip
    cluster = quintnet.Cluster(device, 1, devices)
    model = Large(6 * devices)
    report = quintnet.plan(model, cluster, given)
    best = report.best
    assert best.offload == PARAMETERS and best.zero in (0, 3) and "parameters, gradients and" in report.note
    program = quintnet.compile(model, quintnet.Mesh(**best.mesh), given, plan=best, device="cuda", check="off")
    assert max(row.peak.bytes for row in program.simulate(cluster).rows) < 12e9
    known = [one for one in report.ask.known() if one.memory_bytes <= 12e9 * 0.92]
    assert report.found.ranked[0].seconds == min(one.seconds for one in known)
    with pytest.raises(quintnet.CompileError, match="QN212"):
        quintnet.plan(model, cluster, given, plan={"zero": 1, "mesh": {"dp": devices}})
    with pytest.raises(quintnet.CompileError, match="QN212"):
        quintnet.plan(Large(9 * devices), cluster, given)
    with pytest.raises(quintnet.CompileError, match="QN207"):
        quintnet.plan(model, cluster, given, plan={"zero": 1, "offload": PARAMETERS})
