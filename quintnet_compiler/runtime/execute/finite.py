"""NaN and Inf in loss or gradients: trace them to the operator that computed them first, and raise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.torch import pytree
from ...compat.torch_codegen import SHIPPED
from ...core.annotations import facts, has_facts, is_float
from ...core.errors import RunError
from ...ir.distributed_program import DistributedProgram, StageProgram
from .executor import Executor, Run
from .interpreter_trace import PHASES, Observer

WORDS = ("finite", "-inf", "inf", "nan")  # from harmless to bad


@dataclass(frozen=True, order=True)
class Origin:
    """The first operator or leaf of a rank with a value that is not finite; origins are ordered by time.

    Attributes:
        mask: 1 if the value has only -inf, as masks have on purpose; such origins come last.
        microbatch: its number, -1 for a leaf.
        phase: an index of ``PHASES``, -1 for a leaf.
        position: of the stage, in the order in which stages run the phase.
        node: the index of the operator in the generated function, or of the leaf in ``leaf_names``.
        level: an index of ``WORDS``.
        stage: the stage's index.
        rank: the rank that found it.
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
    """Return how bad the worst element is, as an index of ``WORDS``. Values offloaded to disk count as finite."""
    worst = 0
    for x in pytree.tree_leaves(value):
        if isinstance(x, Tensor) and is_float(x) and not x.is_meta and not bool(SHIPPED.isfinite(x).all()):
            negative = not bool(SHIPPED.isnan(x).any()) and not bool((x == float("inf")).any())
            worst = max(worst, 1 if negative else 3 if bool(SHIPPED.isnan(x).any()) else 2)
    return worst


class Detective:
    """Watches a rank's repeated step for the first operator whose result is worse than its inputs."""

    def __init__(self, program: DistributedProgram, rank: int) -> None:
        self.program, self.rank = program, rank
        self.first: Origin | None = None

    def leaves(self, tensors: Sequence[Tensor | None]) -> None:
        """Look at parameters and the batch, before anything runs."""
        for index, x in enumerate(tensors):
            level = badness(x)
            if level:
                self._keep(Origin(0, -1, -1, 0, index, level, 0, self.rank))

    def observer(self, stage: StageProgram, phase: str, microbatch: int) -> Observer:
        """Return what looks at the values of one run of a stage's function."""
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
    """Return the names of parameters and inputs, in the same order on every rank.

    Buffers and constants are left out: they may be masks with infinities.
    """
    parameters = [f"parameter {spec.name!r}" for spec in program.state.values() if spec.kind == "parameter"]
    return parameters + [f"batch{spec.path}" for spec in program.inputs]


def require_finite(
    executor: Executor, state: Mapping[str, Tensor], inputs: Sequence[Tensor], options: Run, loss: Tensor
) -> None:
    """Repeat a step whose loss or gradients look bad, and watch every value. Every rank must call this.

    Raises:
        RunError: QN501 on every rank, with the first bad value of all ranks; nothing where only the sum that screens
            gradients overflowed.
    """
    program, rank, store = executor.program, executor.part.rank, executor.gradients
    assert store is not None
    detective = Detective(program, rank)
    tensors = {f"parameter {name!r}": x for name, x in state.items()}
    tensors |= {f"batch{spec.path}": x for spec, x in zip(program.inputs, inputs, strict=True)}
    detective.leaves([tensors.get(name) for name in leaf_names(program)])
    executor.step(state, inputs, replace(options, check_finite=False), detective)
    worst = badness([loss, *(bucket.settled for bucket in store.buckets)])
    table = SHIPPED.zeros(program.mesh.size, 2 + len(fields(Origin)), dtype=torch.int64, device=loss.device)
    encoded = [0] * len(fields(Origin)) if detective.first is None else list(map(int, astuple(detective.first)))
    table[rank] = torch.tensor([worst, detective.first is not None, *encoded], device=loss.device)
    # each rank fills one row, so the sum has the rows of all ranks
    everyone = tuple(range(program.mesh.size))
    rows = (executor.transport.start_sum(table, everyone, "findings")() if len(everyone) > 1 else table).tolist()
    if any(row[0] for row in rows):
        origins = [Origin(*row[2:]) for row in rows if row[1]]
        raise _error(program, min(origins) if origins else None, max(row[0] for row in rows), options.step)


def _error(program: DistributedProgram, origin: Origin | None, worst: int, step: int) -> RunError:
    head = f"step {step}: the loss or a gradient is {WORDS[worst]}; no parameter was changed"
    if origin is None:
        return RunError(
            "QN501",
            f"{head}\n  every term is finite, their sum over microbatches or ranks is not",
        )
    coordinate = ", ".join(f"{axis}={index}" for axis, index in program.mesh.coordinate(origin.rank).items())
    rank = f"rank {origin.rank} ({coordinate})"
    if origin.phase < 0:
        name = leaf_names(program)[origin.node]
        return RunError("QN501", f"{head}\n  {name} held {WORDS[origin.level]} before, on {rank}")
    phase = PHASES[origin.phase]
    node = list(program.stages[origin.stage].pieces[phase].module.graph.nodes)[origin.node]
    phase = "backward" if phase == "weight" else phase
    description = f"{WORDS[origin.level]} in %{node.name}, {phase} of microbatch {origin.microbatch}, {rank}"
    return RunError(
        "QN501",
        f"{head}\n  first bad value: {description}",
        where=facts(node).where if has_facts(node) else None,
        fix="see what goes into this operator: an epsilon, a wider dtype or a smaller learning rate may help",
    )
