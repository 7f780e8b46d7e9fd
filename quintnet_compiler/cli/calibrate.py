"""``quintnet calibrate``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..core.progress import working
from .answer import Answer, write_output
from .inputs.options import Json

DTYPES = ("float32", "bfloat16", "float16")
LONGEST_SIDE = 2048  # of the products that CalibrationEffort measures


def calibrate(
    out: Annotated[Path | None, typer.Option(help="write the calibration here")] = None,
    ranks: Annotated[list[int] | None, typer.Option(min=2, help="measure collectives over so many processes")] = None,
    dtype: Annotated[
        str, typer.Option(metavar="|".join(DTYPES), help="of what is measured; for programs that compute in it")
    ] = "float32",
    largest: Annotated[
        int, typer.Option(min=LONGEST_SIDE, help="the longest side of products; 8192 for GPUs (minutes on a CPU)")
    ] = LONGEST_SIDE,
    json: Json = False,
) -> Answer:
    """Measure how long operators and collectives take on this machine. Nothing else should run meanwhile.

    Exit code: 0, 2 usage, 6 a process failed.

    Example: quintnet calibrate --ranks 2 --ranks 4 --out machine.json

    Example: quintnet calibrate --dtype bfloat16 --largest 8192 --out gpu.json
    """
    import torch

    from ..reports.calibrate import CalibrationEffort
    from ..reports.calibrate import calibrate as measure_machine

    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(DTYPES)}", param_hint="--dtype")
    effort = CalibrationEffort(dtype=getattr(torch, dtype))
    if largest > LONGEST_SIDE:
        effort = replace(effort, sides=(*effort.sides, largest), most_flops=2.0 * largest**3)
    with working("measuring"):
        calibration = measure_machine(tuple(ranks or (2,)), effort)
    write_output("--out", out, calibration.save)
    return Answer(calibration.summary(), calibration.model_dump_json(indent=1))
