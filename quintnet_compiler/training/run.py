"""Train a model as a configuration describes."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from ..api.compile import compile as compile_model
from ..api.compiled_program import CompiledProgram
from ..capture.step_module import LossFn
from ..checkpoint.manifest import available
from ..checkpoint.stores.places import folder_at
from ..core.errors import CompileError
from ..ir.plan import Plan
from ..runtime.launch.launchers import started
from ..runtime.launch.world import world_size
from .batches import BatchSampler
from .config import TrainConfig
from .measures import Metric
from .trainer import History, Trainer
from .validation import LossWeight


@dataclass(frozen=True)
class TrainTask:
    """The result of a configuration's ``model`` function.

    Attributes:
        model: a plain module.
        train_data: a map-style dataset; collated samples are what ``quintnet.compile`` takes as a batch.
        val_data: the same for validation.
        loss_fn: as in :func:`quintnet.compile`.
        metrics: metrics of the model's outputs in validation, by name.
        loss_weight: how much the loss of a validation batch counts, see :class:`Trainer`.
        perplexity: also report e to the power of the validation loss.
        collate: makes a batch of samples.
        start: gives the program its initial values if the module is on the meta device (``load_pretrained``,
            ``initialize``); not called if a checkpoint has them.
    """

    model: nn.Module
    train_data: Dataset[Any]
    val_data: Dataset[Any] | None = None
    loss_fn: LossFn | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    loss_weight: LossWeight | None = None
    perplexity: bool = False
    collate: Callable[[list[Any]], Any] = default_collate
    start: Callable[[CompiledProgram], None] | None = None


def run(config: TrainConfig) -> History:
    """Train on this rank of the world (or on all of them, if there is no world).

    The model is put in training mode, as ``model.train()`` does; what must stay in evaluation mode (a teacher)
    overrides its ``train``.
    """
    torch.manual_seed(config.seed)  # so that all ranks build the same model
    task = _task(config)
    device = _device(config)
    sampler = BatchSampler(len(task.train_data), config.batch_size, seed=config.seed, shuffle=config.shuffle)  # type: ignore[arg-type]
    workers: dict[str, Any] = {"num_workers": config.num_workers, "collate_fn": task.collate}
    first = task.collate([task.train_data[index] for index in range(config.batch_size)])
    plan: Plan = config.decisions
    model = task.model if any(p.is_meta for p in task.model.parameters()) else task.model.to(device)
    model.train()  # from_pretrained leaves models in evaluation mode
    program = compile_model(model, config.mesh_of(world_size()), first, loss_fn=task.loss_fn, plan=plan, device=device)
    if task.start is not None and not (config.checkpoint_dir and available(folder_at(config.checkpoint_dir))):
        task.start(program)
    optimizer = optimizer_of(config, program.parameters())
    steps = config.num_epochs * (sampler.samples // config.batch_size)
    steps = min(steps, config.max_steps or steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(config, step, steps))
    val_loader = None
    if task.val_data is not None:
        val_loader = DataLoader(task.val_data, batch_size=config.batch_size, **workers)
    return Trainer(
        program,
        optimizer,
        DataLoader(task.train_data, batch_sampler=sampler, **workers),
        val_loader,
        scheduler=schedule,
        epochs=config.num_epochs,
        max_steps=config.max_steps,
        max_grad_norm=config.max_grad_norm,
        validate_every=config.val_interval,
        patience=config.patience,
        metrics=task.metrics,
        loss_weight=task.loss_weight,
        perplexity=task.perplexity,
        checkpoint_folder=config.checkpoint_dir,
        save_every=config.save_interval,
        mean_time_between_failures=config.mean_time_between_failures,
        keep=config.keep_checkpoints,
        preempt_signals=[signal.Signals[name] for name in config.preempt_signals],
        log_every=config.log_interval,
        log_folder=config.log_dir,
        tensorboard=config.tensorboard,
        measure_step=config.measure_step,
    ).fit()


def learning_rate_factor(config: TrainConfig, step: int, steps: int) -> float:
    """Return the factor of the learning rate in step ``step`` (from 0) of ``steps``."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    if config.lr_schedule == "cosine":
        return (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return max(0.0, 1 - done) if config.lr_schedule == "linear" else 1.0


def _task(config: TrainConfig) -> TrainTask:
    module, _, name = config.model.rpartition(":")
    folder = os.getcwd()  # as python -m has it
    if module.endswith(".py"):  # as python has it
        folder, module = str(Path(module).parent.resolve()), Path(module).stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        builder = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        fix = "write package.module:function or path/to/file.py:function"
        raise CompileError("QN108", f"model: {config.model}: {error}", fix=fix) from error
    task = builder(**config.model_args)
    if not isinstance(task, TrainTask):
        raise CompileError(
            "QN108",
            f"model: {config.model} returned a {type(task).__name__}",
            fix="return quintnet.TrainTask(model, train_data, val_data, loss_fn)",
        )
    return task


def _device(config: TrainConfig) -> torch.device:
    world = started()
    local_ranks = 1 if world is None else world.on_this_machine or world.size
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    if config.device == "cpu" or (config.device == "auto" and not enough):
        return torch.device("cpu")
    device = torch.device("cuda", 0 if world is None else world.local_rank)
    torch.cuda.set_device(device)
    return device


def optimizer_of(config: TrainConfig, parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of torch.optim that a configuration names.

    Raises:
        CompileError: QN108 if there is none of that name, or not with these options.
    """
    optimizers = {
        name: x
        for name, x in vars(torch.optim).items()
        if isinstance(x, type) and issubclass(x, torch.optim.Optimizer) and x is not torch.optim.Optimizer
    }
    kind = {name.lower(): x for name, x in optimizers.items()}.get(config.optimizer.lower())
    if kind is None:
        message = f"optimizer: torch.optim has no optimizer {config.optimizer}"
        raise CompileError("QN108", message, fix=f"one of {', '.join(sorted(optimizers))}")
    accepted = [name for name in inspect.signature(kind).parameters if name != "params"]
    decay = {"weight_decay": config.weight_decay} if config.weight_decay or "weight_decay" in accepted else {}
    options = {"lr": config.learning_rate, **decay, **config.optimizer_args}
    if unknown := sorted(options.keys() - set(accepted)):
        message = f"optimizer: {kind.__name__} has no option {', '.join(unknown)}"
        raise CompileError("QN108", message, fix=f"its options are {', '.join(accepted)}")
    try:
        optimizer: torch.optim.Optimizer = kind(parameters, **options)
    except (TypeError, ValueError) as error:
        shown = ", ".join(f"{name}={x!r}" for name, x in options.items())
        message = f"optimizer: {kind.__name__}({shown}): {error}"
        raise CompileError("QN108", message, fix="correct learning_rate, weight_decay or optimizer_args") from error
    return optimizer
