"""The loss of a Trainer's batch (the model's own, or of smoothed labels), and the number that divides its sum."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from ..compat.trainers import labels_counted
from ..ir.containers import LossOfNames
from ..weights.adapters import is_peft

COUNT = "num_items_in_batch"
_SMOOTHER_COUNTS = COUNT in inspect.signature(LabelSmoother.__call__).parameters  # from transformers 5.15 on
_CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


@dataclass(frozen=True)
class SmoothedLoss(LossOfNames):
    """A loss that a Trainer computes from logits of a model, which is called without labels.

    ``shifted``: the logits of a position are for the label of the next one.
    """

    smoother: LabelSmoother
    shifted: bool
    names = ("labels", COUNT)

    def __call__(self, outputs: Any, values: Mapping[str, Any]) -> Tensor:
        counts = {COUNT: values.get(COUNT)} if _SMOOTHER_COUNTS else {}
        loss: Tensor = self.smoother(outputs, values["labels"], shift_labels=self.shifted, **counts)
        return loss


def smoothed_loss(trainer: Any) -> SmoothedLoss | None:
    """Return the loss of a Trainer that smooths labels; None for any other, whose loss is the model's own."""
    if trainer.label_smoother is None:
        return None
    model = trainer.model.get_base_model() if is_peft(trainer.model) else trainer.model
    return SmoothedLoss(trainer.label_smoother, _of_trl(trainer) or type(model).__name__ in _CAUSAL)


def loss_owner(trainer: Any) -> type:
    """Return the class whose ``compute_loss`` a Trainer has."""
    return next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))


def training_count(trainer: Any, count: Any) -> Tensor:
    """Return the divisor of the loss of one of several accumulated batches; ``count``: the labels of all."""
    number = torch.as_tensor(count, dtype=torch.float32)
    return number.clamp(min=1) if _of_trl(trainer) and trainer.label_smoother is None else number


def evaluation_count(trainer: Any, batch: Mapping[str, Any]) -> Tensor | None:
    """Return the divisor of the loss of a batch in an evaluation; None for the labels that its loss counts."""
    if not _of_trl(trainer):
        return labels_counted(trainer, batch)
    if trainer.label_smoother is not None or not trainer.model_accepts_loss_kwargs or "labels" not in batch:
        return None
    return training_count(trainer, batch["labels"][..., 1:].ne(-100).sum())


def _of_trl(trainer: Any) -> bool:
    """Return whether a Trainer is an SFTTrainer, which computes the loss of texts itself."""
    return loss_owner(trainer).__module__.startswith("trl.")
