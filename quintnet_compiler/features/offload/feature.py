"""The record of all that this feature gives to the compiler."""

from __future__ import annotations

from ...core.errors import CompileError
from ...ir.plan import Plan
from ...ir.plans.host_state import HostState
from ...ir.program import DifferentiatedProgram
from ...ops.copies import COPIES, read_in, write_out
from ...passes.autodiff.recompute_budget import Leaves
from ...passes.lowering.coalesce_collectives import CoalesceCollectives
from ...runtime.execute.extensions import RankMethod
from ...schedules.schedule import COMPUTE, Op, Schedule
from ..feature import Feature, MemorySaver, Rewrite, RewriteSetting
from .activations import OffloadActivations
from .checks.activations import check_offload
from .checks.parameters import check_offload_parameters
from .disk_copies import DiskCopies
from .parameters import OffloadParameters

ZERO_STAGES = (0, 3)  # ZeRO 1 and 2 have all parameters on the device for a whole step


def _activations(setting: RewriteSetting, program: DifferentiatedProgram) -> OffloadActivations | None:
    if "activations" not in setting.plan.offload or not setting.training:
        return None
    in_files = setting.plan.offload_folder is not None
    return OffloadActivations(setting.node_seconds, stages_alone(setting.stage_schedule), in_files)


def _leaving(setting: RewriteSetting, program: DifferentiatedProgram) -> Leaves | None:
    rewrite = _activations(setting, program)
    return None if rewrite is None else rewrite.away(program)


def stages_alone(schedule: Schedule) -> frozenset[int]:
    """Return the stages in which each microbatch's backward follows its forward at once."""
    stages = set(range(len(schedule.placement)))
    for row in schedule.actions:
        computing = [action for action in row if action.op in COMPUTE]
        for action, following in zip(computing, [*computing[1:], None], strict=True):
            place = action.stage, action.microbatch
            if action.op is Op.FORWARD and (following is None or (following.stage, following.microbatch) != place):
                stages.discard(action.stage)
    return frozenset(stages)


def _parameters(setting: RewriteSetting, program: DifferentiatedProgram) -> OffloadParameters | None:
    return OffloadParameters() if "parameters" in setting.plan.offload else None


def _host_state(plan: Plan) -> HostState:
    return HostState(
        values="activations" in plan.offload,
        parameters="parameters" in plan.offload,
        optimizer="optimizer" in plan.offload,
        folder=plan.offload_folder,
    )


def _check_plan(plan: Plan, searched: bool) -> None:
    if "parameters" in plan.offload and plan.zero not in ZERO_STAGES:
        raise CompileError(
            "QN207",
            f'offload=("parameters",) with zero={plan.zero}, which has all parameters on the device for a whole step',
            fix='use zero=3, which gathers them for each block, or zero=0; or offload=("optimizer",)',
        )
    if plan.offload_folder is not None and "activations" not in plan.offload and not searched:
        raise CompileError(
            "QN207",
            f"offload_folder={plan.offload_folder!r}, and no activations leave the device",
            fix='use offload=("activations",), or leave offload_folder out',
        )


def _completed(plan: Plan) -> Plan:
    return plan if "activations" in plan.offload else plan.model_copy(update={"offload_folder": None})


OFFLOAD = Feature(
    "offload",
    operators={
        write_out: (RankMethod(DiskCopies.write_out, DiskCopies.of_rank),),
        read_in: (RankMethod(DiskCopies.read_in, DiskCopies.of_rank),),
        COPIES[write_out]: (RankMethod(DiskCopies.start_write_out, DiskCopies.of_rank),),
        COPIES[read_in]: (RankMethod(DiskCopies.start_read_in, DiskCopies.of_rank),),
    },
    rewrites=(
        Rewrite(
            OffloadActivations,
            "which saved values wait for the backward in host memory",
            CoalesceCollectives,
            _activations,
            check_offload,
            leaving=_leaving,
        ),
        Rewrite(
            OffloadParameters,
            "where parameters that are in host memory are copied in",
            CoalesceCollectives,
            _parameters,
            check_offload_parameters,
            planned=False,
        ),
    ),
    plan_fields=("offload", "offload_folder"),
    check_plan=_check_plan,
    host_state=_host_state,
    completed=_completed,
    memory_savers=(
        MemorySaver("saved values wait in host memory (offload)", {"offload": ("activations",)}),
        MemorySaver("the optimizer computes on the host (offload)", {"offload": ("optimizer",)}),
        MemorySaver(
            "saved values wait in host memory, and the optimizer computes there (offload)",
            {"offload": ("activations", "optimizer")},
        ),
        MemorySaver("parameters, gradients and the optimizer are on the host (offload)", {"offload": ("parameters",)}),
        MemorySaver("all that can wait in host memory does (offload)", {"offload": ("activations", "parameters")}),
    ),
)
