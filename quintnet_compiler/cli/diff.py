"""``quintnet diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .answer import Answer
from .inputs.options import Json

Place = Annotated[Path, typer.Argument(help="a plan file, or a folder of quintnet dump")]


def diff(a: Place, b: Place, json: Json = False) -> Answer:
    """What differs between two plans, or two dumps: decisions, files, and lines of code.

    Exit code: 0 (equal or not), 2 usage, 4 a plan is not valid.

    Example: quintnet diff before.json after.json

    Example: quintnet diff out_before out_after
    """
    from ..dump.compare import compare_folders, compare_plans
    from ..ir.plan import read_plan

    for place in (a, b):
        if not place.exists():
            raise typer.BadParameter(f"there is no {str(place)!r}", param_hint="A B")
    if a.is_dir() != b.is_dir():
        raise typer.BadParameter("give two plan files, or two dump folders", param_hint="A B")
    if a.is_dir():
        for place in (a, b):
            if not (place / "plan.json").is_file():
                raise typer.BadParameter(f"{str(place)!r} is no dump: it has no plan.json", param_hint="A B")
        return Answer.from_report(compare_folders(a, b))
    return Answer.from_report(compare_plans(read_plan(a), read_plan(b)))
