"""``quintnet cache``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from .answer import Answer
from .inputs.options import Json


def cache(
    folder: Annotated[Path, typer.Argument(help="that was given as cache=", show_default=False)],
    unused: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0, help="remove programs that no start has used for so long")
    ] = None,
    most: Annotated[
        float | None, typer.Option(metavar="GIB", min=0, help="then remove those used longest ago, until this is left")
    ] = None,
    json: Json = False,
) -> Answer:
    """The programs that compile(cache=FOLDER) has kept, those used last first; with an option, some are removed.

    A start that finds its program no more compiles it again.

    Exit code: 0, 2 there is no such folder, 4 it belongs to another user, or others may use it.

    Example: quintnet cache programs

    Example: quintnet cache programs --unused 30 --most 10
    """
    from ..driver.cache_folder import CacheFolder
    from ..driver.cache_report import DAY, CacheReport, surplus

    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {str(folder)!r}", param_hint="FOLDER")
    kept_folder = CacheFolder(folder)
    files = kept_folder.files()
    last_use = 0.0 if unused is None else time.time() - unused * DAY
    removed = surplus(files, before=last_use, most=float("inf") if most is None else most * 2**30)
    kept_folder.remove(removed)
    return Answer.from_report(CacheReport.of_folder(str(folder), files, removed))
