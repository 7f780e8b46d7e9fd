"""What tells transformers' Trainer and accelerate that there is one process, which reads whole batches: every rank is
that process. Rank 0 writes files and logs."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers.training_args import ParallelMode

from ..core.errors import RunError
from ..runtime.launch.world import judges


class _Writer:
    """Which process this is: the first, if it writes files and logs, else another."""

    @property
    def process_index(self) -> int:
        return 0 if judges() else 1

    @property
    def local_process_index(self) -> int:
        return self.process_index


class OneProcess(_Writer, Accelerator):  # type: ignore[misc]
    """An accelerator that neither wraps models nor divides batches, and has nobody to gather from."""

    @property
    def num_processes(self) -> int:
        return 1

    @property
    def is_main_process(self) -> bool:
        return judges()

    @property
    def is_local_main_process(self) -> bool:
        return judges()

    def prepare_model(self, model: Any, *_: Any, **__: Any) -> Any:
        return model

    def gather(self, tensor: Any) -> Any:
        return tensor

    def pad_across_processes(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    def backward(self, loss: torch.Tensor, **_: Any) -> None:
        """Raises: RunError QN113."""
        raise RunError(
            "QN113", "accelerator.backward was called on a loss", fix="program.step(batch) computes gradients"
        )


def as_one_process(accelerator: Accelerator) -> None:
    """Make it :class:`OneProcess`. Batches of an iterable data set are read by every rank."""
    accelerator.__class__ = OneProcess
    accelerator.dataloader_config.dispatch_batches = False


class _OneProcessArguments(_Writer):
    """Properties of training arguments."""

    @property
    def world_size(self) -> int:
        return 1

    @property
    def n_gpu(self) -> int:
        return 1

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.NOT_DISTRIBUTED


def arguments_of_one_process(args: Any, data_ranks: int) -> Any:
    """A copy of training arguments whose batches are those of all data ranks."""
    found = copy.copy(args)
    found.__class__ = type(type(args).__name__, (_OneProcessArguments, type(args)), {})
    found.per_device_train_batch_size *= data_ranks
    found.per_device_eval_batch_size *= data_ranks
    return found


def first_of(loader: DataLoader[Any]) -> Any:
    """The first batch, without a trace in the states of random numbers."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        found = next(iter(loader))
    random.setstate(states[0])
    np.random.set_state(states[1])
    return found
