"""``quintnet calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..core.progress import working
from ..reports.calibrate import calibrate as measure_machine
from .answer import Answer
from .options import Json


def calibrate(
    out: Annotated[Path | None, typer.Option(help="write the calibration here")] = None,
    ranks: Annotated[list[int] | None, typer.Option(min=2, help="measure collectives over so many processes")] = None,
    json: Json = False,
) -> Answer:
    """Measure how long operators and collectives take on this machine. Nothing else should run meanwhile.

    Exit code: 0, 2 usage, 6 a process failed.

    Example: quintnet calibrate --ranks 2 --ranks 4 --out machine.json
    """
    with working("measuring"):
        found = measure_machine(tuple(ranks or (2,)))
    if out:
        found.save(out)
    return Answer(found.summary(), found.model_dump_json(indent=1))
