"""Whole steps as CUDA graphs, which share one memory pool."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from ...runtime.execute.cuda_graphs.graphed_engine import CudaGraphs

T = TypeVar("T")


@dataclass(frozen=True)
class CudaStepCapture:
    """Captures steps on a stream of its own.

    Graphs share the memory of what a step computes on the way: one replay ends before the next one begins, and nothing
    that lives longer lies there.
    """

    graphs: CudaGraphs = field(default_factory=CudaGraphs)

    @property
    def device_kind(self) -> str:
        """Return the type of device that runs the work."""
        return self.graphs.device

    def warm_up(self, work: Callable[[], T]) -> T:
        """Run work on the stream of captures, so that libraries allocate there what they keep."""
        stream, current = self.graphs.stream, torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = work()
        current.wait_stream(stream)
        return result

    def capture_step(self, work: Callable[[], object]) -> Callable[[], None]:
        """Return what replays ``work``."""
        gc.collect()  # not in the capture, where freeing what belongs to a device may not be permitted
        torch.cuda.empty_cache()  # of earlier steps, whose memory the graph's pool cannot take

        def on_inputs(inputs: list[Tensor]) -> None:
            work()

        replay = self.graphs(on_inputs, [])
        return lambda: replay([])
