"""The record of all that this feature gives to the compiler."""

from __future__ import annotations

from ...ir.program import DifferentiatedProgram, LocalProgram
from ...passes.autodiff.recompute import Recompute
from ...passes.lowering.fuse_norms import FuseNorms
from ...schedules.schedule import Op, Schedule
from ..feature import Feature, MemorySaver, Rewrite, RewriteSetting
from .checks.chunk_losses import check_chunked
from .checks.early_loss_gradients import check_early_loss_gradients
from .chunk_losses import ChunkLosses
from .early_loss_gradients import EarlyLossGradients


def _chunk_losses(setting: RewriteSetting, program: LocalProgram) -> ChunkLosses | None:
    return ChunkLosses(setting.plan.loss_chunks) if setting.plan.loss_chunks > 1 else None


def _early_loss_gradients(setting: RewriteSetting, program: DifferentiatedProgram) -> EarlyLossGradients | None:
    # not where saved values have a budget, which does not count gradients that the forward keeps
    if not program.again or not setting.training or setting.plan.activation_memory_budget is not None:
        return None
    stages = {program.stage[node] for node in program.again}
    alone = all(most_microbatches(setting.stage_schedule, stage) <= 1 for stage in stages)
    return EarlyLossGradients() if alone else None


def most_microbatches(schedule: Schedule, stage: int) -> int:
    """Return the most microbatches whose forward a stage has run, and whose backward it has not."""
    live = most = 0
    for action in schedule.actions[schedule.placement[stage]]:
        if action.stage == stage and action.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
            live += 1 if action.op is Op.FORWARD else -1
            most = max(most, live)
    return most


CHUNKED_LOSSES = Feature(
    "chunked_losses",
    rewrites=(
        Rewrite(ChunkLosses, "which rows of logits a loss reads at a time", FuseNorms, _chunk_losses, check_chunked),
        Rewrite(
            EarlyLossGradients,
            "which gradients of logits are computed in the forward",
            Recompute,
            _early_loss_gradients,
            check_early_loss_gradients,
        ),
    ),
    plan_fields=("loss_chunks",),
    memory_savers=tuple(
        MemorySaver(f"losses are computed in {parts} parts (loss_chunks)", {"loss_chunks": parts}, in_functions=True)
        for parts in (8, 64)
    ),
)
