"""Parts of a compiled program that methods of features read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..core.mesh import Mesh
from ..ir.distributed_program import DistributedProgram
from ..ir.plan import Plan
from ..runtime.backends.backend import Backend
from ..runtime.threads.turns import Turn


@dataclass(frozen=True)
class ProgramParts:
    """A compiled program, as a method of a feature sees it.

    Attributes:
        model: the module.
        mesh: the mesh.
        plan: the plan that it was asked for.
        backend: what has its state, and runs programs.
        follow: compiles another call of the model, on the same state: takes what was captured, the number of rows, how
            caches are split already, and decisions of its own.
        difference: how far a tensor is from another that it should equal.
        turn: what threads that run programs of one module take.
        label: the name that announced calls have.
        kept: what methods keep until the program is closed.
    """

    model: nn.Module
    mesh: Mesh
    plan: Plan
    backend: Backend
    follow: Callable[..., DistributedProgram]
    difference: Callable[[Tensor, Tensor], float]
    turn: Turn
    label: str
    kept: dict[str, Any]
