"""NaN and Inf: noticed before an optimizer sees them, and traced to the operator that made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.torch import pytree
from ...core.annotations import facts, is_float, known
from ...core.errors import RunError
from ...ir.distributed_program import DistributedProgram, StageProgram
from .executor import Executor, Run
from .interpreter_trace import PHASES, Observer

WORDS = ("finite", "-inf", "inf", "nan")


@dataclass(frozen=True, order=True)
class Origin:
    """Where a rank first met a value that is not finite; the smallest of several came first.

    ``mask``: it is only -inf, as masks are on purpose. ``position``: of the stage in its phase. ``node``: of the
    operator in the generated function; of a leaf (see ``leaf_names``) where ``phase`` is -1. ``level``: see ``WORDS``.
    """

    mask: int
    microbatch: int
    phase: int
    position: int
    node: int
    level: int
    stage: int
    rank: int


def badness(value: Any) -> int:
    """How bad the worst element is: an index of ``WORDS``. What waits in a file is seen before and after."""
    worst = 0
    for x in pytree.tree_leaves(value):
        if isinstance(x, Tensor) and is_float(x) and not x.is_meta and not bool(torch.isfinite(x).all()):
            negative = not bool(torch.isnan(x).any()) and not bool((x == float("inf")).any())
            worst = max(worst, 1 if negative else 3 if bool(torch.isnan(x).any()) else 2)
    return worst


class Detective:
    """Watches a rank's repeated step, and keeps the first node that made a bad value from better ones."""

    def __init__(self, program: DistributedProgram, rank: int) -> None:
        self.program, self.rank = program, rank
        self.first: Origin | None = None

    def leaves(self, given: Sequence[Tensor | None]) -> None:
        """Parameters and the batch, before anything runs."""
        for index, x in enumerate(given):
            level = badness(x)
            if level:
                self._keep(Origin(0, -1, -1, 0, index, level, 0, self.rank))

    def observer(self, stage: StageProgram, phase: str, microbatch: int) -> Observer:
        # the last stage is the first to run backward
        back = phase in ("backward", "weight")
        position = len(self.program.stages) - stage.index if back else stage.index
        numbers = {node: i for i, node in enumerate(stage.pieces[phase].module.graph.nodes)}
        levels: dict[fx.Node, int] = {}

        def observe(node: fx.Node, value: Any) -> None:
            level = levels[node] = badness(value)
            if node.op != "placeholder" and level > max((levels.get(n, 0) for n in node.all_input_nodes), default=0):
                place = (microbatch, PHASES.index(phase), position, numbers[node])
                self._keep(Origin(level == 1, *place, level, stage.index, self.rank))

        return observe

    def _keep(self, origin: Origin) -> None:
        if self.first is None or origin < self.first:
            self.first = origin


def leaf_names(program: DistributedProgram) -> list[str]:
    """Parameters and inputs, numbered alike on every rank. Buffers and constants may be masks of infinities."""
    parameters = [f"parameter {spec.name!r}" for spec in program.state.values() if spec.kind == "parameter"]
    return parameters + [f"batch{spec.path}" for spec in program.inputs]


def require_finite(
    executor: Executor, state: Mapping[str, Tensor], inputs: Sequence[Tensor], how: Run, loss: Tensor
) -> None:
    """Repeat a step whose loss or gradients look bad, watching it. Every rank must call this.

    Raises:
        RunError: QN501 on every rank, with the first bad value of all ranks. Nothing is raised where a sum over
            finite values overflowed while looking.
    """
    program, rank, store = executor.program, executor.part.rank, executor.gradients
    assert store is not None
    detective = Detective(program, rank)
    given = {f"parameter {name!r}": x for name, x in state.items()}
    given |= {f"batch{spec.path}": x for spec, x in zip(program.inputs, inputs, strict=True)}
    detective.leaves([given.get(name) for name in leaf_names(program)])
    executor.step(state, inputs, replace(how, check_finite=False), detective)
    worst = badness([loss, *(bucket.settled for bucket in store.buckets)])
    table = torch.zeros(program.mesh.size, 2 + len(fields(Origin)), dtype=torch.int64, device=loss.device)
    found = [0] * len(fields(Origin)) if detective.first is None else list(map(int, astuple(detective.first)))
    table[rank] = torch.tensor([worst, detective.first is not None, *found], device=loss.device)
    # a sum of tables of zeros but for one row: everybody's findings
    everyone = tuple(range(program.mesh.size))
    rows = (executor.transport.start_sum(table, everyone, "findings")() if len(everyone) > 1 else table).tolist()
    if any(row[0] for row in rows):
        origins = [Origin(*row[2:]) for row in rows if row[1]]
        raise _error(program, min(origins) if origins else None, max(row[0] for row in rows), how.step)


def _error(program: DistributedProgram, origin: Origin | None, worst: int, step: int) -> RunError:
    head = f"step {step}: the loss or a gradient is {WORDS[worst]}; no parameter was changed"
    if origin is None:
        return RunError(
            "QN501",
            f"{head}\n  every term is finite, their sum over microbatches or ranks is not",
        )
    place = ", ".join(f"{axis}={index}" for axis, index in program.mesh.coordinate(origin.rank).items())
    rank = f"rank {origin.rank} ({place})"
    if origin.phase < 0:
        name = leaf_names(program)[origin.node]
        return RunError("QN501", f"{head}\n  {name} held {WORDS[origin.level]} before, on {rank}")
    phase = PHASES[origin.phase]
    node = list(program.stages[origin.stage].pieces[phase].module.graph.nodes)[origin.node]
    phase = "backward" if phase == "weight" else phase
    what = f"{WORDS[origin.level]} in %{node.name}, {phase} of microbatch {origin.microbatch}, {rank}"
    return RunError(
        "QN501",
        f"{head}\n  first bad value: {what}",
        where=facts(node).where if known(node) else None,
        fix="see what goes into this operator: an epsilon, a wider dtype or a smaller learning rate may help",
    )
