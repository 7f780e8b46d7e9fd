"""Predicted against measured: every node of the ranks' functions, timed while all ranks run in this process."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.cost_protocol import RankCosts
from ..ir.distributed_program import DistributedProgram, StageProgram
from ..ops.collectives import collective_of
from ..runtime.backends.local import LocalBackend
from ..runtime.execute.executor import Run
from ..runtime.execute.interpreter_trace import Observer
from .priced import ProgramPrices
from .timeline import duration


@dataclass(frozen=True)
class OperatorError:
    """All nodes of one operator: their seconds in one run of every function."""

    operator: str
    count: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Of the prediction, as a fraction of what was measured."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


@dataclass(frozen=True)
class CostReport:
    """Operators by how many seconds they are wrong, the worst first. Collectives are left out: here they are copies."""

    operators: tuple[OperatorError, ...]

    @property
    def measured(self) -> float:
        return sum(one.measured for one in self.operators)

    @property
    def predicted(self) -> float:
        return sum(one.predicted for one in self.operators)

    def to_json(self) -> str:
        rows = [{**asdict(one), "error": one.error} for one in self.operators]
        return json.dumps({"measured": self.measured, "predicted": self.predicted, "operators": rows}, indent=1)

    def __str__(self) -> str:
        total = self.predicted / self.measured - 1 if self.measured else 0.0
        lines = [f"predicted {duration(self.predicted)}, measured {duration(self.measured)} ({total:+.1%})"]
        for one in self.operators:
            times = f"{duration(one.predicted):>9} {duration(one.measured):>9} {one.error:+8.1%}"
            lines.append(f"  {times}  {one.operator} ×{one.count}")
        return "\n".join(lines)


class _Stopwatch:
    """Takes the time from node to node."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[tuple[int, str, str], list[float]] = defaultdict(list)

    def observer(self, stage: StageProgram, phase: str, microbatch: int) -> Observer:
        last = time.perf_counter()

        def observe(node: fx.Node, value: Any) -> None:
            nonlocal last
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            now = time.perf_counter()
            if node.op != "placeholder":
                self.seconds[stage.index, phase, node.name].append(now - last)
            last = time.perf_counter()

        return observe


def compare_costs(
    program: DistributedProgram, backend: LocalBackend, inputs: Sequence[Tensor], costs: RankCosts, steps: int = 3
) -> CostReport:
    """Run training steps node by node, and set each operator's time beside its price. No parameter changes.

    A node's time holds the two microseconds or so that stepping through a function takes.
    """
    device = next(iter(inputs)).device
    watches = [_Stopwatch(device) for _ in range(program.mesh.size)]
    for step in range(steps):
        backend.run(program, list(inputs), Run(train=True, step=step, check_finite=False), watches)
    priced = ProgramPrices(program, costs)
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for stage in program.stages:
        rank = priced.ranks[program.schedule.placement[stage.index]]
        for phase in stage.pieces:
            for node in priced.nodes(stage, phase):
                taken = watches[rank].seconds.get((stage.index, phase, node.node.name))
                if taken and collective_of(name := str(node.node.target)) is None and name != "wait":
                    source = priced.source.get(node.node.name)
                    name = str(node.node.target if source is None else source.target)
                    found[name].append((statistics.median(taken), node.compute))
    rows = [
        OperatorError(name, len(pairs), sum(a for a, _ in pairs), sum(b for _, b in pairs))
        for name, pairs in found.items()
    ]
    return CostReport(tuple(sorted(rows, key=lambda one: -abs(one.predicted - one.measured))))
