"""A Vision Transformer on handwritten digits, for a training run described in YAML: see vit_digits.yaml."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from digits import Digits, bundled_digits
from torch import Tensor
from torch.utils.data import TensorDataset
from vit import VisionTransformer

import quintnet


def build(seed: int = 0) -> quintnet.TrainTask:
    """The model, its data, its loss and what to measure."""
    training, validation = (_samples(part) for part in bundled_digits(seed))
    model = VisionTransformer(8, patch=2)
    return quintnet.TrainTask(model, training, validation, F.cross_entropy, {"accuracy": quintnet.accuracy})


def _samples(digits: Digits) -> TensorDataset:
    tensors: tuple[Tensor, Tensor] = digits.tensors(torch.device("cpu"), torch.float32)
    return TensorDataset(*tensors)
