"""QuintNet: train a plain nn.Module, written for one device, on any number of GPUs."""

from __future__ import annotations

from . import textbook
from .advise import estimate, plan
from .api import compile
from .compiled import CompiledProgram
from .cost_models.cluster import Cluster
from .errors import (
    BackendWarning,
    CheckpointError,
    CheckpointWarning,
    CheckWarning,
    CompileError,
    FaultWarning,
    InputError,
    QuintNetError,
    RunError,
)
from .experts import expert_linear
from .hf_plan import HuggingFacePlan, hf_plan
from .initialize import Constant, Normal, Uniform
from .mesh import Mesh
from .passes.rule_notation import Rule, rule
from .plan import Plan
from .planner.estimate import Estimate
from .planner.report import PlanReport
from .runtime.launch import launch
from .schedule import Schedule
from .simulation.timeline import Timeline
from .tensor_picture import TensorPicture
from .textbook import simulate
from .training.batches import BatchSampler
from .training.config import TrainConfig
from .training.measures import accuracy
from .training.run import TrainTask
from .training.trainer import History, Trainer
from .verification import VerifyReport
from .visualize import visualize

__all__ = [
    "BackendWarning",
    "CheckWarning",
    "BatchSampler",
    "History",
    "TrainConfig",
    "TrainTask",
    "Trainer",
    "CheckpointWarning",
    "Cluster",
    "Estimate",
    "FaultWarning",
    "PlanReport",
    "accuracy",
    "estimate",
    "plan",
    "CompileError",
    "CheckpointError",
    "CompiledProgram",
    "Constant",
    "HuggingFacePlan",
    "InputError",
    "Mesh",
    "Normal",
    "Plan",
    "QuintNetError",
    "Rule",
    "RunError",
    "Schedule",
    "TensorPicture",
    "Timeline",
    "Uniform",
    "VerifyReport",
    "compile",
    "expert_linear",
    "hf_plan",
    "launch",
    "rule",
    "visualize",
    "simulate",
    "textbook",
]
