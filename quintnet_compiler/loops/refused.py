"""Refuse arguments of transformers' Trainer that a compiled program does not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..core.errors import CompileError
from ..features.answers import host_state
from ..ir.plan import Plan
from .trainer_loss import SmoothedLoss, loss_owner

_TRACED = ("transformers.", "trl.trainer.sft_trainer")  # their compute_loss is the model's own loss
_FLAGS = {
    "fsdp": "the mesh and the plan say how parameters are stored: zero=3",
    "deepspeed": "the mesh and the plan say how parameters are stored: zero=3",
    "parallelism_config": "the mesh says it: quintnet.Mesh(dp=2, tp=2)",
    "fp16": "bf16=True; or a loop of your own with precision='fp16', whose loss scale a program keeps itself",
    "fp16_full_eval": "evaluate in the precision of training",
    "bf16_full_eval": "evaluate in the precision of training",
    "torch_compile": "options={'backend': 'inductor'}",
    "auto_find_batch_size": "quintnet.plan(model, cluster, batch) says what fits",
    "predict_with_generate": "program.generate after training",
    "activation_offloading": "options={'recompute': 'full'}",
    "eval_use_gather_object": "return tensors",
}
_LAYERWISE = ("lomo", "adalomo", "layerwise")


def refuse_arguments(trainer: Any, args: Any, options: dict[str, Any]) -> None:
    """Refuse arguments that are not supported. ``options``: further keyword arguments of the Trainer.

    Raises:
        CompileError: QN108 with all of them.
    """
    problems = list(_problems(trainer, args, options))
    if problems:
        lines = "\n  ".join(f"{argument}: {fix}" for argument, fix in problems)
        raise CompileError("QN108", f"a compiled program cannot follow\n  {lines}", fix="leave these out")


def refuse_changes(trainer: Any, model: nn.Module, loss: SmoothedLoss | None) -> None:
    """Refuse what was set after the Trainer was made, and would be ignored.

    Args:
        trainer: the Trainer.
        model: that its program trains.
        loss: of the program, if the Trainer smooths labels.

    Raises:
        CompileError: QN108 with the attribute.
    """
    changed = {
        "compute_loss": "compute_loss" in vars(trainer),
        "compute_loss_func": trainer.compute_loss_func is not None,
        "label_smoother": trainer.label_smoother is not (loss and loss.smoother),
        "model": trainer.model is not model,
    }
    names = [name for name, is_new in changed.items() if is_new]
    if names:
        raise CompileError(
            "QN108",
            f"{', '.join(names)} of the Trainer was set after it had compiled its model and loss",
            fix="make a Trainer with that model, whose forward computes the loss, and with label_smoothing_factor=",
        )


def refuse_plan(plan: Plan) -> None:
    """Raise CompileError QN108 for plans that need the program's own optimizer, as a Trainer makes its own."""
    if host_state(plan).optimizer:
        raise CompileError(
            "QN108", 'a Trainer makes its own optimizer, and the plan has offload=("optimizer",)',
            fix="leave it out, or train in a loop of your own, with program.optimizer(make)",
        )  # fmt: skip


def _problems(trainer: Any, args: Any, options: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, fix in _FLAGS.items():
        value = getattr(args, name, None)
        if value:
            yield f"{name}={value!r}", fix
    optim = str(getattr(args.optim, "value", args.optim))
    if any(word in optim for word in _LAYERWISE):
        yield f"optim={optim!r}", "it updates inside of the backward; choose another"
    config = args.accelerator_config
    for name in ("dispatch_batches", "split_batches"):
        if getattr(config, name, None):
            yield f"accelerator_config.{name}", "every rank reads whole batches"
    for name in ("compute_loss_func", "model_init"):
        if options.get(name) is not None:
            yield name, "compute the loss in the model's forward" if name == "compute_loss_func" else "pass the model"
    owner = loss_owner(trainer)
    if not f"{owner.__module__}.".startswith(_TRACED):
        yield f"{owner.__name__}.compute_loss", "compute the loss in the model's forward"
    if getattr(args, "loss_type", "nll") != "nll":
        yield f"loss_type={args.loss_type!r}", "'nll', the model's own loss"
