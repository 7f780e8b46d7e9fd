"""The most memory of a rank's step as the device's allocator counts it, beside the simulation's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from models import SIZES, Size
from one_rank import ours, program_of

import quintnet
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts
from quintnet_compiler.simulation.program import simulate_program

from .entries import Check, Entry, Figures, NotRun
from .setting import Setting

LARGE = Size(dim=2048, layers=8, heads=16, kv_heads=8, hidden=5632, vocab=32000, sequence=2048)
BF16: dict[str, Any] = {"precision": "bf16"}
PLANS: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({"dp": 1}, BF16 | {"microbatches": 2}),
    ({"tp": 8}, BF16 | {"microbatches": 2}),
    ({"pp": 4}, BF16 | {"microbatches": 4}),
    ({"dp": 8}, BF16 | {"zero": 3}),
    ({"dp": 1}, BF16 | {"microbatches": 2, "recompute": "full"}),
    ({"pp": 2, "tp": 2}, BF16 | {"microbatches": 4, "schedule": "zb-h1"}),
    ({"dp": 1}, BF16 | {"microbatches": 2, "offload": ("activations",)}),
)
SAMPLE = (0, 2)
TOLERANCE = 0.10  # of the peak: kernels' workspaces, and blocks that are larger than what was asked for
STEPS = 20


def run(setting: Setting) -> Iterator[Entry]:
    size = SIZES["tiny"] if setting.emulated else LARGE
    for index, (axes, options) in enumerate(PLANS):
        if not setting.emulated or index in SAMPLE:
            yield from _plan(setting, size, axes, options)
    if setting.emulated:
        yield NotRun(f"{len(PLANS) - len(SAMPLE)} of {len(PLANS)} plans", "they take long on the emulated accelerator")
        yield NotRun("fragmentation", "the emulated accelerator gives memory back by exact size")


def _plan(setting: Setting, size: Size, axes: dict[str, int], options: dict[str, Any]) -> Iterator[Entry]:
    mesh, plan, rows = quintnet.Mesh(**axes), quintnet.Plan(**options), 8
    what = ", ".join([str(mesh), *(f"{name}={value}" for name, value in options.items())])
    program = program_of(size, mesh, plan, rows, setting.device)
    costs = ClusterCosts(Cluster("h100"), unknown="memory")
    predicted = simulate_program(program, costs, None, processes=False).rows[0].peak
    setting.free()
    device = getattr(torch, setting.device.type)
    baseline = device.memory_allocated()
    step = ours(program, program.rank(0), setting.device, size, "eager")
    step()
    setting.wait()
    device.reset_peak_memory_stats()
    for _ in range(1 if setting.emulated else STEPS):
        step()
    setting.wait()
    measured = device.max_memory_allocated() - baseline
    error = predicted.bytes / measured - 1
    cells: dict[str, str | float] = {
        "plan": what,
        "predicted, MiB": predicted.bytes / 2**20,
        "of it gradients, MiB": predicted.gradients / 2**20,
        "measured, MiB": measured / 2**20,
        "error, %": 100 * error,
    }
    if setting.cuda:
        stats = torch.cuda.memory_stats()
        cells["reserved, MiB"] = stats["reserved_bytes.all.peak"] / 2**20
        cells["retries"] = float(stats["num_alloc_retries"])
    yield Figures("peak of rank 0", cells)
    yield Check(f"memory of {what}", abs(error) < TOLERANCE, f"{100 * error:+.1f}%")
