"""Memory of gradients: a bucket has none from the beginning of a step to its first term, and simulations say so."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.simulation.timeline import RankTimeline

from .accelerator.build import missing
from .accelerator.device import NAME, install
from .accelerator.ranks import World, run

emulated = pytest.mark.skipif(missing() is not None, reason=f"the emulated accelerator: {missing()}")
WIDTH, DEPTH = 512, 8


class Deep(nn.Module):
    """Blocks whose gradients lie in several buckets, of a MiB or so each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Tied(Deep):
    """The first block's matrix is the last one's, too; one of a block in between gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[-1].weight = self.blocks[0].weight
        self.blocks[2].bias.requires_grad_(False)


def _measured(
    model: type[nn.Module], axes: dict[str, int], rows: int, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[int, RankTimeline]:
    """The most bytes that this rank's device has in a step: parameters, gradients and values; and its simulation."""
    device = install()
    here = torch.device(NAME, dist.get_rank() if dist.is_initialized() else 0)
    device.set_device(here.index)
    torch.manual_seed(0)
    batch = torch.randn(rows, WIDTH).to(here, dtype), torch.randn(rows, WIDTH).to(here, dtype)
    module = model().to(dtype)
    gc.collect()
    before = device.extension.requested(here.index)[0]
    program = quintnet.compile(
        module, quintnet.Mesh(**axes), batch, loss_fn=F.mse_loss, device=here, check="off", **options
    )
    # ranks compare what they have in most of the first six steps
    for _ in range(7 if dist.is_initialized() else 2):
        program.zero_grad()
        loss = None  # what a step gave is no part of the next one
        start = device.extension.requested(here.index)[0]
        with device.measuring(here.index) as found:
            loss = program.step(batch)
    assert loss is not None
    rows_of = {tuple(row.coordinate.items()): row for row in program.simulate().rows}
    place = here.index % program.mesh["pp"]
    return start - before + found.device, next(row for key, row in rows_of.items() if dict(key).get("pp", 0) == place)


HALF, SINGLE = torch.bfloat16, torch.float32
TWICE: dict[str, Any] = {"microbatches": 2}
# of one device: what of all gradients has memory at the peak, "some" or "all"
ALONE: list[tuple[type[nn.Module], int, torch.dtype, dict[str, Any], str]] = [
    (Deep, 1024, SINGLE, {}, "some"),
    (Deep, 1024, SINGLE, TWICE, "all"),
    (Deep, 1024, SINGLE, {"offload": ("parameters",)}, "some"),
    (Deep, 16, SINGLE, {"offload": ("parameters",)}, "some"),  # buckets leave while others come
    (Deep, 1024, HALF, {}, "none"),
    (Deep, 1024, HALF, {"reduce_dtype": "float32", **TWICE}, "all"),  # with copies of 16 bits
    (Deep, 16, SINGLE, {"precision": "bf16"}, "some"),  # with products that no kernel adds
    (Tied, 1024, SINGLE, {"offload": ("activations",)}, "all"),
    (Tied, 1024, SINGLE, {"recompute": "full"}, "some"),
    (Tied, 16, SINGLE, {"offload": ("parameters",), **TWICE}, "some"),
]


@emulated
@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "rows", "dtype", "options", "held"), ALONE, ids=str)
def test_a_peak_is_parameters_gradients_and_values_together(
    model: type[nn.Module], rows: int, dtype: torch.dtype, options: dict[str, Any], held: str
) -> None:
    """To the byte, and all of the device's memory."""
    measured, row = _measured(model, {"dp": 1}, rows, dtype, options)
    peak = row.peak
    assert measured == peak.bytes == peak.parameters + peak.gradients + peak.values
    most = row.gradient_bytes or WIDTH * WIDTH * DEPTH * dtype.itemsize  # on the host
    assert held == ("none" if not peak.gradients else "some" if peak.gradients < most else "all")


TOGETHER: list[tuple[type[nn.Module], dict[str, int], dict[str, Any]]] = [
    (Deep, {"pp": 2}, TWICE),
    (Deep, {"dp": 2}, {}),
    (Deep, {"dp": 2}, {"precision": "bf16", "reduce_dtype": "bfloat16", **TWICE}),  # sums in another dtype
    (Deep, {"dp": 2}, {"zero": 1, "bucket_mib": 2.0}),
    (Deep, {"dp": 2}, {"zero": 3, **TWICE}),
    (Deep, {"dp": 2}, {"zero": 2, **TWICE}),
    (Deep, {"pp": 2}, {"schedule": "zb-h1", "microbatches": 4}),
    (Deep, {"pp": 2}, {"schedule": "gpipe", "microbatches": 4}),
    (Deep, {"pp": 2}, {"schedule": "interleaved", "virtual_stages": 2, "microbatches": 2}),
    (Deep, {"pp": 2}, {"offload": ("parameters",), **TWICE}),
    (Tied, {"pp": 2}, TWICE),
    (Tied, {"pp": 2}, {"precision": "bf16", "reduce_dtype": "bfloat16", **TWICE}),
    (Tied, {"tp": 2}, TWICE),
]


def _measured_all(jobs: Sequence[tuple[type[nn.Module], dict[str, int], dict[str, Any]]]) -> list[tuple[int, int]]:
    """Of each: measured, and simulated."""
    found = [_measured(model, axes, 256, SINGLE, options) for model, axes, options in jobs]
    return [(measured, row.peak.bytes) for measured, row in found]


@pytest.mark.slow
@emulated
@pytest.mark.parametrize("jobs", [TOGETHER[:2], pytest.param(TOGETHER[2:], marks=pytest.mark.slow)])
def test_peaks_of_two_devices(jobs: Sequence[tuple[type[nn.Module], dict[str, int], dict[str, Any]]]) -> None:
    for found in run(_measured_all, World(2, seed=1), jobs):
        assert [measured for measured, _ in found] == [simulated for _, simulated in found]
