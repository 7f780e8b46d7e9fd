"""Dump folders: everything that a person needs to see what runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .files import open_folder, write_file
from .plan import Plan
from .printer import code_text, program_text
from .program import DistributedProgram


def dump_program(program: DistributedProgram, plan: Plan, passes: Sequence[tuple[str, Any]], folder: Path) -> Path:
    """Write ``plan.json``, ``schedule.txt``, ``passes/NN_Name.txt`` and ``ranks/rankNNN.py`` below ``folder``.

    Nothing is written elsewhere: a link in place of a file is replaced, a link in place of a folder refused.

    Raises:
        CompileError: QN701 if something else is where a folder or a file should be.
    """
    with open_folder(folder) as top:
        write_file(top, "plan.json", plan.to_json())
        write_file(top, "schedule.txt", f"{program.schedule}\n")
        with open_folder(Path("passes"), top) as inner:
            for number, (name, after) in enumerate(passes, 1):
                write_file(inner, f"{number:02d}_{name}.txt", program_text(after))
        with open_folder(Path("ranks"), top) as inner:
            for rank in range(program.mesh.size):
                write_file(inner, f"rank{rank:03d}.py", code_text(program, program.rank(rank)))
    return folder
