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

from quintnet_compiler.ir.cost_protocol import RankCosts
from quintnet_compiler.ir.distributed_program import DistributedProgram, StageProgram
from quintnet_compiler.ops.catalog import collective_of
from quintnet_compiler.runtime.backends.local import LocalBackend
from quintnet_compiler.runtime.execute.executor import Run
from quintnet_compiler.runtime.execute.interpreter_trace import Observer
from quintnet_compiler.simulation.priced import ProgramPrices
from quintnet_compiler.simulation.timeline import duration


@dataclass(frozen=True)
class OperatorError:
    """All nodes of one operator: their seconds in one run of every function."""

    operator: str
    count: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Return the error of the prediction, as a fraction of what was measured."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


@dataclass(frozen=True)
class CostReport:
    """Operators by how many seconds they are wrong, the worst first. Collectives are left out: here they are copies."""

    operators: tuple[OperatorError, ...]

    @property
    def measured(self) -> float:
        """Return the measured seconds of all operators."""
        return sum(operator.measured for operator in self.operators)

    @property
    def predicted(self) -> float:
        """Return the predicted seconds of all operators."""
        return sum(operator.predicted for operator in self.operators)

    def to_json(self) -> str:
        """Return everything, in seconds."""
        rows = [{**asdict(operator), "error": operator.error} for operator in self.operators]
        return json.dumps({"measured": self.measured, "predicted": self.predicted, "operators": rows}, indent=1)

    def __str__(self) -> str:
        total = self.predicted / self.measured - 1 if self.measured else 0.0
        lines = [f"predicted {duration(self.predicted)}, measured {duration(self.measured)} ({total:+.1%})"]
        for row in self.operators:
            times = f"{duration(row.predicted):>9} {duration(row.measured):>9} {row.error:+8.1%}"
            lines.append(f"  {times}  {row.operator} ×{row.count}")
        return "\n".join(lines)


class _Stopwatch:
    """The seconds of each node, in each of its runs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[tuple[int, str, str], list[float]] = defaultdict(list)

    def observer(self, stage: StageProgram, phase: str, microbatch: int) -> Observer:
        """Return an observer that notes the seconds since the previous node."""
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
    """Run training steps node by node, and compare each operator's time with its price.

    No parameter changes. A node's time includes the two microseconds or so of stepping through a function.
    """
    device = next(iter(inputs)).device
    watches = [_Stopwatch(device) for _ in range(program.mesh.size)]
    for step in range(steps):
        backend.run(program, list(inputs), Run(train=True, step=step, check_finite=False), watches)
    priced = ProgramPrices(program, costs)
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for stage in program.stages:
        rank = priced.ranks[program.schedule.placement[stage.index]]
        for phase in stage.pieces:
            for node in priced.node_times(stage, phase):
                taken = watches[rank].seconds.get((stage.index, phase, node.node.name))
                if taken and collective_of(name := str(node.node.target)) is None and name != "wait":
                    source = priced.source.get(node.node.name)
                    name = str(node.node.target if source is None else source.target)
                    times[name].append((statistics.median(taken), node.compute))
    rows = [
        OperatorError(name, len(pairs), sum(a for a, _ in pairs), sum(b for _, b in pairs))
        for name, pairs in times.items()
    ]
    return CostReport(tuple(sorted(rows, key=lambda row: -abs(row.predicted - row.measured))))
