"""``quintnet goodput``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .answer import Answer
from .inputs.options import Json


def goodput(
    folder: Annotated[Path, typer.Argument(help="of the run: its log_dir, or its checkpoint_dir")], json: Json = False
) -> Answer:
    """Where the time of a run went, over all its starts: steps that are kept, compiling, data, saves, restarts, and
    steps that were lost.

    Exit code: 0, 2 no run in this folder, 4 its time.json is not what a Trainer writes.

    Example: quintnet goodput runs/vit
    """
    from ..training.time_report import RunTime

    run_time = RunTime.read(folder)
    if not run_time.starts:
        raise typer.BadParameter(str(run_time), param_hint="FOLDER")
    return Answer.from_report(run_time)
