"""The parts, in the order in which they run: what is cheap and tells most first."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .entries import Entry

if TYPE_CHECKING:
    from .setting import Setting


@dataclass(frozen=True)
class Part:
    """``name``: of the module in this package. ``seconds``: its limit. ``usual``: whether it runs if no parts are
    named."""

    name: str
    title: str
    proves: str
    seconds: int
    usual: bool = True

    def work(self) -> Callable[[Setting], Iterator[Entry]]:
        """Return the function of this part, which runs in this process."""
        function: Callable[[Setting], Iterator[Entry]] = importlib.import_module(f"{__package__}.{self.name}").run
        return function


PARTS = (
    Part(
        "machine",
        "Versions and ceilings",
        "What the device reaches by itself: what other figures are shares of.",
        60,
    ),
    Part(
        "layouts",
        "Models on layouts, all ranks in one process",
        "Every kind of generated program computes here what the unsplit module computes on the CPU: in float64 "
        "exactly, in 16 bits as closely as one rank does.",
        240,
    ),
    Part(
        "process_group",
        "The accelerator's process group, one rank",
        "NCCL connects, and each collective runs through the code that a rank of many runs; programs do not depend on "
        "the device's number.",
        90,
    ),
    Part(
        "shared_device",
        "Several processes on one device",
        "One process per rank trains exactly, on device tensors: everything that many devices need but NCCL, as values "
        "travel through host memory.",
        210,
    ),
    Part(
        "races",
        "Communication that is late",
        "Nothing is read before it is there, or freed while it is read: steps whose communication is late, on another "
        "stream, give the same bits. And how often the host waits.",
        150,
    ),
    Part(
        "features",
        "What people train with",
        "Packed documents, losses in parts, 8 bits, adapters, generation and checkpoints: the same as on CPUs.",
        120,
    ),
    Part(
        "memory",
        "Memory, predicted and measured",
        "The simulation's peak of a rank is what the allocator counts, for six plans and over twenty steps.",
        120,
    ),
    Part(
        "slices",
        "One rank of 64 of Llama-3 70B",
        "The share of the device's matmul ceiling that generated code reaches without communication, kernels, and how "
        "long the device is idle between them; beside plain PyTorch and torch.compile.",
        210,
    ),
    Part(
        "mixture",
        "A layer of a mixture of experts",
        "The same for routing and grouped products, and how often they make the host wait.",
        120,
    ),
    Part(
        "graphs",
        "TorchInductor and CUDA graphs",
        "Programs that are compiled, and captured in CUDA graphs, train as the generated Python does.",
        150,
    ),
    Part(
        "prices",
        "Prices of operators",
        "Steps predicted from operators as they were measured here, beside steps as they take.",
        90,
    ),
    Part(
        "starts",
        "Commands, launchers and loops",
        "What a user starts runs here: the command line, torchrun, all ranks in one process, transformers' Trainer.",
        240,
    ),
    Part(
        "nccl_ranks",
        "Several ranks of NCCL on one device",
        "NCCL between ranks: every collective bit by bit, layouts exactly, checkpoints, and that a rank which ends or "
        "does not come is told of. It takes NCCL 2.30 or later.",
        240,
        usual=False,
    ),
)
