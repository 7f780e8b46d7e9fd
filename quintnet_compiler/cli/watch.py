"""``quintnet watch``."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import Annotated

import typer

from .answer import Answer, write_output
from .inputs.options import Json


def watch(
    folder: Annotated[Path, typer.Argument(help="of the run: its log_dir")],
    out: Annotated[Path | None, typer.Option(help="the page; without it, page.html in the folder")] = None,
    every: Annotated[float, typer.Option(min=0.2, help="seconds between two looks at the folder")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="write the page as the run is now, and end")] = False,
    json: Json = False,
) -> Answer:
    """A page of a run while it goes on: loss, speed and memory over steps, the measured step, where the time went.

    Reads metrics.jsonl, timeline.json and time.json, which a Trainer with a log_folder writes, and replaces the page
    when they change. A browser that has the page open reads it again by itself; there is no server. Ends when the run
    has finished, or at Ctrl-C.

    Exit code: 0, 2 no such folder.

    Example: quintnet watch runs/vit
    """
    from ..training.run_page import PAGE, RunPage
    from ..training.run_page import watch as watch_run

    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is no folder", param_hint="FOLDER")
    page = out or folder / PAGE
    if not once:
        typer.echo(f"open {page.resolve().as_uri()}", err=True)
    run_page = RunPage(folder)
    try:
        write_output("--out", page, lambda path: watch_run(folder, path, every, once=once))
    except KeyboardInterrupt:
        run_page.update()
        write_output("--out", page, run_page.write)
    run_page.update()
    metrics = run_page.metrics
    loss = metrics.newest.get(("train", "loss"))
    document = {
        "page": str(page),
        "step": metrics.step,
        "loss": None if loss is None else f"{loss:g}",
        "end": run_page.end,
    }
    return Answer(str(page), jsons.dumps({**document, "unreadable": metrics.unreadable}, indent=1))
