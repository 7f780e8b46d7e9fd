"""Golden texts: what is kept of a program after each pass."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import unified_diff
from typing import Any

from quintnet_compiler.ir.distributed_program import DistributedProgram
from quintnet_compiler.ir.printer import code_text, program_text


def texts(passes: Sequence[tuple[str, Any]]) -> dict[str, str]:
    """``NN_Pass.txt`` -> the program after that pass, as ``program.dump`` writes it. Where a pass gives the type of
    program that it got, the text is what it changes: ``-`` before, ``+`` after. ``rank_0.txt``: the code of rank 0."""
    found = {"00_Captured.txt": program_text(passes[0][1].captured)}
    before, kind = "", type(None)
    for number, (name, program) in enumerate(passes, 1):
        after = program_text(program)
        same = type(program) is kind
        found[f"{number:02d}_{name}.txt"] = changes(before, after) if same else after.rstrip("\n") + "\n"
        before, kind = after, type(program)
        if isinstance(program, DistributedProgram):
            found["rank_0.txt"] = code_text(program, program.rank(0))
    return found


def changes(before: str, after: str) -> str:
    """The lines that differ, in groups."""
    lines = list(unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[2:]
    return "".join("...\n" if line.startswith("@@") else f"{line}\n" for line in lines) or "no change\n"
