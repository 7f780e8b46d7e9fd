from . import textbook
from .api.compile import compile
from .api.compiled_program import CompiledProgram
from .api.moe import expert_linear
from .api.plan import estimate, plan
from .api.visualize import visualize
from .core.errors import (
    BackendWarning,
    CacheWarning,
    CheckpointError,
    CheckpointWarning,
    CheckWarning,
    CompileError,
    CompileWarning,
    FaultWarning,
    InputError,
    LogWarning,
    QuintNetError,
    RunError,
)
from .core.mesh import Mesh
from .cost_models.cluster import Cluster
from .equivalence.verify import VerifyReport
from .features.hot_experts.choice import HotExperts, hot_experts
from .huggingface.parallel_plan import HuggingFacePlan, hf_plan
from .ir.plan import Plan
from .ops.rules.notation import Rule, rule
from .ops.rules.trial.find_rule import find_rule
from .planner.estimate import Estimate
from .planner.report import PlanReport
from .reports.tensor_picture import TensorPicture
from .runtime.launch.launch import launch
from .runtime.launch.preemption import REQUEUE_EXIT_CODE, Preempted
from .schedules.kinds import SCHEDULES
from .schedules.schedule import Schedule
from .simulation.faults import Faults
from .simulation.timeline import Timeline
from .textbook import simulate
from .training.batches import BatchSampler
from .training.buckets import pad_to_bucket
from .training.callbacks import Callback
from .training.config import TrainConfig
from .training.loggers import ConsoleLogger, JsonLogger, TensorBoardLogger, WandbLogger
from .training.measures import accuracy
from .training.resume.resumable_loader import ResumableLoader
from .training.run import TrainTask
from .training.time_report import RunTime
from .training.trainer import History, Trainer
from .weights.initialize import Constant, Normal, Uniform
from .weights.quantized import unpack_quantized

__all__ = [
    "BackendWarning",
    "CacheWarning",
    "CheckWarning",
    "BatchSampler",
    "Callback",
    "ResumableLoader",
    "ConsoleLogger",
    "JsonLogger",
    "RunTime",
    "TensorBoardLogger",
    "WandbLogger",
    "History",
    "TrainConfig",
    "TrainTask",
    "Trainer",
    "CheckpointWarning",
    "Cluster",
    "Estimate",
    "FaultWarning",
    "LogWarning",
    "Faults",
    "PlanReport",
    "accuracy",
    "estimate",
    "plan",
    "CompileError",
    "CompileWarning",
    "CheckpointError",
    "CompiledProgram",
    "Constant",
    "HotExperts",
    "HuggingFacePlan",
    "InputError",
    "Mesh",
    "Normal",
    "Plan",
    "Preempted",
    "QuintNetError",
    "Rule",
    "REQUEUE_EXIT_CODE",
    "RunError",
    "SCHEDULES",
    "Schedule",
    "TensorPicture",
    "Timeline",
    "Uniform",
    "VerifyReport",
    "compile",
    "expert_linear",
    "hf_plan",
    "hot_experts",
    "launch",
    "pad_to_bucket",
    "find_rule",
    "rule",
    "visualize",
    "simulate",
    "unpack_quantized",
    "textbook",
]
