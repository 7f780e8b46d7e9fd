"""Errors of batches and modules that a program does not fit."""

from __future__ import annotations

from collections.abc import Container

from ..core.errors import CompileError, InputError
from ..core.mesh import Mesh


def check_divides(mesh: Mesh, microbatches: int, rows: int) -> None:
    """Raise QN106 if a global batch of ``rows`` does not split evenly over data ranks and microbatches."""
    ways = mesh.data_ways * microbatches
    if rows % ways:
        near = max(ways, rows // ways * ways)
        split = f"dp={mesh['dp']}" + (f" x ep={mesh['ep']}" if mesh["ep"] > 1 else "")
        split += f" x {microbatches} microbatches" if microbatches > 1 else ""
        raise InputError(
            "QN106",
            f"a batch of {rows} rows does not divide over {split}",
            fix=f"use a batch of {near} rows, or drop the last incomplete batch",
        )


def no_parameter(name: str, reason: str) -> CompileError:
    """Return QN112 for a parameter of the module that the program does not have."""
    return CompileError(
        "QN112",
        f"the program has no parameter for {name}, which {reason}",
        fix="compile the module again, and give the new program's parameters to the optimizer",
    )


def changed_how(name: str, names: Container[str]) -> str:
    """Return how a parameter of the module differs from the program's, which has these names."""
    return "is another object now" if name in names else "was not there when it was compiled"
