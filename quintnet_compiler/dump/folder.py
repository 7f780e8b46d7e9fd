"""A dump folder: which files it has, and their hashes."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..core.code_origin import version_of
from ..core.files import naming, open_folder, write_file
from ..ir.distributed_program import DistributedProgram
from ..ir.plan import Plan
from ..ir.printer import code_text, program_text
from .communication import schedule_json
from .drawing import boxes, dot, draw_boxes, edges
from .model_graph import operators, units
from .page import Extras, program_page


def dump_program(
    program: DistributedProgram, plan: Plan, passes: Sequence[tuple[str, Any]], folder: Path, extras: Extras
) -> Path:
    """Write all that runs below ``folder``, and ``index.html``, which shows it.

    ``plan.json``, ``schedule.txt``, ``passes/NN_Name.txt``, ``ranks/rankNNN.py`` (of ranks that run the same functions,
    one; ``ranks.json`` says which), ``comm/schedule.json``, ``graph/model.dot`` and ``.svg``, ``timeline/``, and
    ``manifest.json`` with their hashes. Nothing is written elsewhere: a link in place of a file is replaced, a link in
    place of a folder refused.

    Raises:
        CompileError: QN701 if something else is where a folder or a file should be.
        OSError: naming what cannot be written.
    """
    write_files(folder, dump_files(program, plan, passes, extras))
    return folder


def dump_files(
    program: DistributedProgram, plan: Plan, passes: Sequence[tuple[str, Any]], extras: Extras
) -> dict[str, str]:
    """The texts of a dump by path; equal programs give equal texts."""
    shown = units(program, operators(program))
    drawn = boxes(shown)
    arrows = edges(drawn, shown)
    picture = draw_boxes(drawn, arrows)
    files = {
        "plan.json": plan.to_json(),
        "schedule.txt": f"{program.schedule}\n",
        **{f"passes/{number:02d}_{name}.txt": program_text(after) for number, (name, after) in enumerate(passes, 1)},
        **ranks_files(program),
        "comm/schedule.json": schedule_json(program),
        "graph/model.dot": dot(drawn, arrows),
        "graph/model.svg": f"{picture}\n",
    }
    for name, timeline in (("predicted", extras.predicted), ("measured", extras.measured)):
        if timeline is not None:
            files[f"timeline/{name}.trace.json"] = timeline.chrome_trace() + "\n"
            files[f"timeline/{name}.svg"] = timeline.svg() + "\n"
    files["index.html"] = program_page(program, plan, passes, shown, picture, extras, hashes_of(files))
    files["manifest.json"] = manifest(files)
    return files


def hashes_of(files: Mapping[str, str]) -> dict[str, str]:
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(files.items())}


def ranks_files(program: DistributedProgram) -> dict[str, str]:
    """Return the code of ranks that differ: those of one pipeline place run the same functions and actions."""
    places = [program.mesh.coordinate(rank).get("pp", 0) for rank in range(program.mesh.size)]
    first = [places.index(place) for place in places]
    names = {rank: f"ranks/rank{rank:03d}.py" for rank in dict.fromkeys(first)}
    index = {"files": {str(rank): names[owner] for rank, owner in enumerate(first)}}
    code = {name: code_text(program, program.rank(rank)) for rank, name in names.items()}
    return {**code, "ranks.json": json.dumps(index, indent=1) + "\n"}


def manifest(files: Mapping[str, str]) -> str:
    """Versions, and SHA-256 of each file."""
    versions = {name: version_of(name) for name in ("quintnet-compiler", "torch")}
    versions["python"] = platform.python_version()
    return json.dumps({"version": 1, "versions": versions, "files": hashes_of(files)}, indent=1) + "\n"


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts by path (at most one folder deep) below ``folder``.

    Raises:
        CompileError: QN701, see :func:`dump_program`.
        OSError: naming what cannot be written.
    """
    with ExitStack() as stack:
        with naming(folder):
            opened = {"": stack.enter_context(open_folder(folder))}
        for path, text in files.items():
            inner, _, name = path.rpartition("/")
            with naming(folder / path):
                if inner not in opened:
                    opened[inner] = stack.enter_context(open_folder(Path(inner), opened[""]))
                write_file(opened[inner], name, text)
