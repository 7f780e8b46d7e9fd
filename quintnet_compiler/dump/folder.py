"""A dump folder: which files it has, and their hashes."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..files import open_folder, write_file
from ..plan import Plan
from ..printer import code_text, program_text
from ..program import DistributedProgram
from ..versions import version_of


def dump_program(program: DistributedProgram, plan: Plan, passes: Sequence[tuple[str, Any]], folder: Path) -> Path:
    """Write ``plan.json``, ``schedule.txt``, ``passes/NN_Name.txt``, ``ranks/rankNNN.py`` (of ranks that run the same
    functions, one; ``ranks.json`` says which), and ``manifest.json`` below ``folder``.

    Nothing is written elsewhere: a link in place of a file is replaced, a link in place of a folder refused.

    Raises:
        CompileError: QN701 if something else is where a folder or a file should be.
    """
    files = {
        "plan.json": plan.to_json(),
        "schedule.txt": f"{program.schedule}\n",
        **{f"passes/{number:02d}_{name}.txt": program_text(after) for number, (name, after) in enumerate(passes, 1)},
        **ranks_files(program),
    }
    files["manifest.json"] = manifest(files)
    write_files(folder, files)
    return folder


def ranks_files(program: DistributedProgram) -> dict[str, str]:
    """The code of ranks that differ: those of one pipeline place run the same functions and actions."""
    places = [program.mesh.coordinate(rank).get("pp", 0) for rank in range(program.mesh.size)]
    first = [places.index(place) for place in places]
    names = {rank: f"ranks/rank{rank:03d}.py" for rank in dict.fromkeys(first)}
    index = {"files": {str(rank): names[one] for rank, one in enumerate(first)}}
    code = {name: code_text(program, program.rank(rank)) for rank, name in names.items()}
    return {**code, "ranks.json": json.dumps(index, indent=1) + "\n"}


def manifest(files: Mapping[str, str]) -> str:
    """Versions, and SHA-256 of each file."""
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(files.items())}
    versions = {name: version_of(name) for name in ("quintnet-compiler", "torch")}
    versions["python"] = platform.python_version()
    return json.dumps({"version": 1, "versions": versions, "files": hashes}, indent=1) + "\n"


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts by path (at most one folder deep) below ``folder``.

    Raises:
        CompileError: QN701, see :func:`dump_program`.
    """
    with ExitStack() as stack:
        opened = {"": stack.enter_context(open_folder(folder))}
        for path, text in files.items():
            inner, _, name = path.rpartition("/")
            if inner not in opened:
                opened[inner] = stack.enter_context(open_folder(Path(inner), opened[""]))
            write_file(opened[inner], name, text)
