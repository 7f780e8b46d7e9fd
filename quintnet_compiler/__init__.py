"""QuintNet: train a plain nn.Module, written for one device, on any number of GPUs."""

from __future__ import annotations

from .api import compile
from .compiled import CompiledProgram
from .errors import CompileError, InputError, QuintNetError, RunError
from .mesh import Mesh
from .passes.rule_notation import Rule, rule
from .plan import Plan
from .runtime.launch import launch
from .schedule import Schedule

__all__ = [
    "CompileError",
    "CompiledProgram",
    "InputError",
    "Mesh",
    "Plan",
    "QuintNetError",
    "Rule",
    "RunError",
    "Schedule",
    "compile",
    "launch",
    "rule",
]
