"""Tell transformers' Trainer and accelerate that there is one process, which reads whole batches.

Every rank is that process. Rank 0 writes files and logs.
"""

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
    """The index of this process: 0 if it writes files and logs, else 1."""

    @property
    def process_index(self) -> int:
        return 0 if judges() else 1

    @property
    def local_process_index(self) -> int:
        return self.process_index


class OneProcess(_Writer, Accelerator):  # type: ignore[misc]
    """An accelerator that neither wraps models nor divides batches, and gathers from no other process."""

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
        """Raise RunError QN113."""
        raise RunError(
            "QN113", "accelerator.backward was called on a loss", fix="program.step(batch) computes gradients"
        )


def as_one_process(accelerator: Accelerator) -> None:
    """Make an accelerator a :class:`OneProcess`. Every rank reads the batches of an iterable data set."""
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
    """Return a copy of training arguments whose batches are those of all data ranks."""
    arguments = copy.copy(args)
    arguments.__class__ = type(type(args).__name__, (_OneProcessArguments, type(args)), {})
    arguments.per_device_train_batch_size *= data_ranks
    arguments.per_device_eval_batch_size *= data_ranks
    return arguments


def first_of(loader: DataLoader[Any]) -> Any:
    """Return the first batch, and leave the states of random numbers as they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        batch = next(iter(loader))
    random.setstate(states[0])
    np.random.set_state(states[1])
    return batch
