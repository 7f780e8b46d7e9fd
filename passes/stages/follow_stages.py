"""Stages for a second program over the same parameters: evaluation, or another batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from ...core.annotations import facts, is_getitem, leaf, tensor_inputs
from ...core.errors import CompileError
from ...ir.program import ShardedProgram, StagedProgram
from ...ops.derivatives.user_derivatives import derivatives


@dataclass(frozen=True)
class FollowStages:
    """Put every operator into the earliest stage that has its parameters and comes after its inputs.

    Before: %h = linear(%x @ stage 1, %w), w held by stages 0 and 2
    After:  %h @ stage 2
    Ensures: as CutStages; no parameter moves.

    ``stages``: for each parameter the stages that hold it.
    """

    num_stages: int
    stages: Mapping[str, tuple[int, ...]]

    def __call__(self, program: ShardedProgram, /) -> StagedProgram:
        of = derivatives(program.program.graph)
        latest: dict[fx.Node, int] = {}
        while True:  # a derivative that the user wrote is in one stage: that of its last parameter
            before = dict(latest)
            stage = self._stages(program, of, latest)
            if latest == before:
                return StagedProgram(program, self.num_stages, stage)

    def _stages(
        self, program: ShardedProgram, of: Mapping[fx.Node, fx.Node], latest: dict[fx.Node, int]
    ) -> dict[fx.Node, int]:
        stage: dict[fx.Node, int] = {}
        for node in program.program.graph.nodes:
            if node.op != "call_function":
                continue
            sources = tensor_inputs(node)
            names = [found.name for n in sources if (found := leaf(n)) is not None and found.kind == "parameter"]
            before = [stage[n] for n in sources if n in stage]
            if not names and not before:
                continue
            earliest = max(before, default=0)
            if node in of:
                earliest = max(earliest, latest.get(of[node], 0))
            if names and not is_getitem(node):
                shared = set.intersection(*(set(self.stages[name]) for name in names))
                later = [s for s in sorted(shared) if s >= earliest]
                if not later:
                    raise CompileError(
                        "QN206",
                        f"this pass of the model uses {names[0]} after stage {earliest}, which does not hold it",
                        where=facts(node).where,
                        fix="compile without pp, or evaluate the model on one device",
                    )
                earliest = later[0]
            stage[node] = earliest
            if node in of:
                latest[of[node]] = max(earliest, latest.get(of[node], 0))
        return stage
