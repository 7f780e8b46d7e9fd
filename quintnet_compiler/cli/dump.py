"""``quintnet dump``."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from ..progress import working
from .answer import Answer
from .options import Json, MeshOption, Microbatches, PlanOption, Target, compiled


def dump(
    target: Target,
    out: Annotated[Path, typer.Option(help="the folder; files of an earlier dump are replaced")],
    mesh: MeshOption = None,
    plan: PlanOption = None,
    microbatches: Microbatches = None,
    json: Json = False,
) -> Answer:
    """Write all that runs as files, and a page to look at it: index.html, which needs no network.

    Exit code: 0, 2 usage, 4 the model or the layout is not supported.

    Example: quintnet dump mymodel:build --mesh pp=2,tp=2 --out out
    """
    program = compiled(target, mesh, plan, microbatches)
    with working("writing"):
        folder = program.dump(out)
    manifest = json_module.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    text = f"{len(manifest['files'])} files in {folder}; open {folder / 'index.html'}"
    return Answer(text, json_module.dumps({"folder": str(folder), **manifest}, indent=2))
