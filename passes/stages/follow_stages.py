"""Stages for a second program over the same parameters: evaluation, or another batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        derivative_of = derivatives(program.program.graph)
        latest: dict[fx.Node, int] = {}
        while True:  # a user's derivative is in one stage: that of its last parameter
            previous = dict(latest)
            stage = self._stages(program, derivative_of, latest)
            if latest == previous:
                return StagedProgram(program, self.num_stages, stage)

    def _stages(
        self, program: ShardedProgram, derivative_of: Mapping[fx.Node, fx.Node], latest: dict[fx.Node, int]
    ) -> dict[fx.Node, int]:
        """Return the stage of each operator. ``latest``: of each user's derivative, the last stage so far."""
        stage: dict[fx.Node, int] = {}
        for node in program.program.graph.nodes:
            if node.op != "call_function":
                continue
            names = _parameter_names(node)
            input_stages = [stage[n] for n in tensor_inputs(node) if n in stage]
            if not names and not input_stages:
                continue
            earliest = max(input_stages, default=0)
            derivative = derivative_of.get(node)
            if derivative is not None:
                earliest = max(earliest, latest.get(derivative, 0))
            if names and not is_getitem(node):
                earliest = self._stage_with(node, names, earliest)
            stage[node] = earliest
            if derivative is not None:
                latest[derivative] = max(earliest, latest.get(derivative, 0))
        return stage

    def _stage_with(self, node: fx.Node, names: Sequence[str], earliest: int) -> int:
        """Return the first stage from ``earliest`` on that holds all these parameters.

        Raises:
            CompileError: QN206 if none does.
        """
        shared = set.intersection(*(set(self.stages[name]) for name in names))
        stages = [stage for stage in sorted(shared) if stage >= earliest]
        if not stages:
            raise CompileError(
                "QN206",
                f"this pass of the model uses {names[0]} after stage {earliest}, which does not hold it",
                where=facts(node).where,
                fix="compile without pp, or evaluate the model on one device",
            )
        return stages[0]


def _parameter_names(node: fx.Node) -> list[str]:
    """Return the names of the parameters that a node reads."""
    leaves = (leaf(source) for source in tensor_inputs(node))
    return [source.name for source in leaves if source is not None and source.kind == "parameter"]
