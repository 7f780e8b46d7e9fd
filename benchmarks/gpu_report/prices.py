"""Measure operators in bf16, and compare steps with predictions from these."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from models import Llama, Size, loss_fn, make_batch

import quintnet
from quintnet_compiler.cost_models.calibrated import CalibratedCosts
from quintnet_compiler.reports.calibrate import CalibrationEffort, calibrate

from .entries import Check, Entry, Figures, NotRun
from .setting import Setting

EFFORT = CalibrationEffort(
    trials=3,
    seconds=0.002,
    sides=(128, 1024, 4096, 8192),
    rows=(64, 1024, 16384, 131072),
    most_flops=1.2e12,
    dtype=torch.bfloat16,
)
QUICK = CalibrationEffort(trials=1, seconds=0.0002, sides=(32, 128), rows=(4, 64, 1024))
SIZES = (
    Size(dim=1024, layers=4, heads=8, kv_heads=8, hidden=4096, vocab=8192, sequence=1024),
    Size(dim=2048, layers=4, heads=16, kv_heads=8, hidden=5632, vocab=8192, sequence=2048),
    Size(dim=4096, layers=2, heads=32, kv_heads=8, hidden=14336, vocab=8192, sequence=4096),
)
TINY = (Size(dim=64, layers=2, heads=4, kv_heads=2, hidden=192, vocab=256, sequence=64),)
ROWS = 4


def run(setting: Setting) -> Iterator[Entry]:
    if setting.emulated:
        yield NotRun("prices of a GPU", "operators are measured on the CPU instead, briefly and in float32")
        yield NotRun("whether predictions are right", "this is a model of 64 units, on a machine that may be busy")
    calibration = calibrate((), QUICK if setting.emulated else EFFORT)
    for line in calibration.summary().splitlines():
        yield Figures("calibration", {"what": line.strip()})
    costs = CalibratedCosts(calibration)
    device = torch.device("cpu") if setting.emulated else setting.device
    dtype = torch.float32 if setting.emulated else torch.bfloat16
    wrong = 0
    for size in TINY if setting.emulated else SIZES:
        batch = tuple(x.to(device) for x in make_batch(size, ROWS, 0))
        with torch.device(device):
            model = Llama(size).to(dtype)
        program = quintnet.compile(model, quintnet.Mesh(dp=1), batch, loss_fn=loss_fn, device=device, check="off")
        predicted = program.simulate(costs).seconds

        def step(program: quintnet.CompiledProgram = program, batch: tuple[torch.Tensor, ...] = batch) -> None:
            program.step(batch)
            program.zero_grad()

        measured = setting.seconds(step, times=5, warm=3)
        wrong += not 0.5 < predicted / measured < 2
        yield Figures(
            "a step, predicted and measured",
            {
                "model": f"{size.layers} layers of {size.dim}, {ROWS} x {size.sequence} tokens",
                "predicted, ms": 1e3 * predicted,
                "measured, ms": 1e3 * measured,
                "error, %": 100 * (predicted / measured - 1),
            },
        )
    if not setting.emulated:
        yield Check("predictions are within a factor of 2", not wrong, f"{wrong} of {len(SIZES)} are not")
