"""After a step that ran out of memory: what the program's own estimate says of it, and of other options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.annotations import format_bytes
from ..core.errors import QuintNetError, RunError
from ..ir.cost_protocol import RankCosts
from ..ir.distributed_program import DistributedProgram
from ..ir.plan import Plan
from ..simulation.program import simulate_program

LONGEST = 20.0  # seconds that compiling may have taken: each option is compiled once more


def with_estimates(
    error: RunError,
    program: DistributedProgram,
    plan: Plan,
    recompile: Callable[[Mapping[str, Any]], DistributedProgram],
    prices: RankCosts,
    seconds: float,
) -> RunError:
    """``error``, and the peak of memory on the fullest rank by the simulation: of ``program``, and of what it would be
    with other options. Each was compiled and simulated; what cannot be compiled is left out.

    Args:
        seconds: that compiling the program took. The options are not tried if that was long.
    """
    lines = [f"by the program's own estimate, the fullest rank needs {simulate_program(program, prices).peak}"]
    for option in _options(plan) if seconds <= LONGEST else ():
        try:
            bytes_ = simulate_program(recompile(option), prices).peak.bytes
        except QuintNetError:
            continue
        lines.append(f"  {format_bytes(bytes_)} with {', '.join(f'{key}={value!r}' for key, value in option.items())}")
    return RunError(error.code, "\n  ".join([error.message, *lines]), where=error.where, fix=error.fix)


def _options(plan: Plan) -> list[Mapping[str, Any]]:
    options: list[Mapping[str, Any]] = [{"microbatches": 2 * plan.microbatches}]
    if plan.recompute == "none":
        options += [{"recompute": "selective"}, {"recompute": "full"}, {**options[0], "recompute": "full"}]
    if plan.zero < 3:
        options.append({"zero": 3})
    return options
