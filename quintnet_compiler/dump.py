"""Dump folders: everything that a person needs to see what runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .plan import Plan
from .printer import code_text, program_text
from .program import DistributedProgram


def dump_program(program: DistributedProgram, plan: Plan, passes: Sequence[tuple[str, Any]], folder: Path) -> Path:
    """Write ``plan.json``, ``schedule.txt``, ``passes/NN_Name.txt`` and ``ranks/rankNNN.py`` below ``folder``."""
    for name in ("passes", "ranks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "schedule.txt").write_text(f"{program.schedule}\n")
    for number, (name, after) in enumerate(passes, 1):
        (folder / "passes" / f"{number:02d}_{name}.txt").write_text(program_text(after))
    for rank in range(program.mesh.size):
        (folder / "ranks" / f"rank{rank:03d}.py").write_text(code_text(program, program.rank(rank)))
    return folder
