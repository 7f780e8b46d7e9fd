"""Segments as CUDA graphs: captured and replayed where a replay computes the same."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from ....core.errors import BackendWarning
from ..layouts import ByLayout
from ..segments import MAX_VARIANTS, Function
from .graph_segment import Buffers, Capture, CudaGraphSegment, Work
from .replay_safety import Observed

MIN_OPERATORS = 3  # of a captured segment: launching fewer kernels costs no more than a replay
MAX_CAPTURES = 64  # of one segment and layout: that many microbatches can be alive at once


@dataclass(frozen=True)
class CudaGraphs:
    """CUDA graphs that share one memory pool for temporaries; safe because they never run concurrently.

    Attributes:
        failed: graphs whose capture could not be ended; destroying one before the process ends is not safe.
    """

    device: str = "cuda"
    failed: list[Any] = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def pool(self) -> Any:
        """Return the handle of the memory pool."""
        return torch.cuda.graph_pool_handle()

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """Return the stream that captures run on."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work, inputs: list[Tensor]) -> Work:
        # torch.cuda.graph would synchronize the device, and so deadlock with a receive whose sender waits for this rank
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            graph.capture_begin(self.pool, capture_error_mode="thread_local")  # NCCL's thread may query its events
            try:
                work(inputs)
            except BaseException:
                try:
                    graph.capture_end()
                except RuntimeError:  # raised again for the failed capture; the allocator still refers to this graph
                    self.failed.append(graph)
                raise
            graph.capture_end()
        current.wait_stream(self.stream)
        return lambda _: graph.replay()


@dataclass(frozen=True)
class Graphs:
    """State that all segments of an engine share; ``warned``: the reasons of warnings so far."""

    capture: Capture
    warned: set[str] = field(default_factory=set)
    buffers: Buffers = field(default_factory=Buffers)

    def wrap_kernel(self, kernel: Function, module: fx.GraphModule, name: str) -> Function:
        """Return ``kernel``, compiled from ``module``, captured where that is possible and pays."""
        return GraphedSegment(kernel, module, name, self)

    def warn(self, name: str, reason: str) -> None:
        """Warn, once for each reason, that a segment runs without a graph."""
        if reason not in self.warned:
            self.warned.add(reason)
            text = f"a part of the {name} cannot be a CUDA graph, and runs as inductor alone runs it: {reason}"
            warnings.warn(BackendWarning(text), stacklevel=2)


@dataclass(frozen=True)
class GraphedSegment:
    """A segment with its captures.

    The first call with a layout of inputs runs the Python code, and observes its operators. Later calls replay a
    capture whose results are no longer in use, or add one.

    Attributes:
        refused: the reason why the segment is not captured, "" where that would not pay; empty while it may be.
    """

    kernel: Function
    module: fx.GraphModule
    name: str
    graphs: Graphs
    layouts: ByLayout[list[CudaGraphSegment]] = field(default_factory=ByLayout)
    refused: list[str] = field(default_factory=list)

    def __call__(self, args: list[Tensor]) -> Sequence[Any]:
        device = self.graphs.capture.device
        other_device = next((x.device.type for x in args if x.device.type != device), None)
        if other_device is not None:
            self.graphs.warn(self.name, f"its values are on the {other_device}, not on {device}")
        if other_device is not None or self.refused:
            return self.kernel(args)
        captures = self.layouts.get(args)
        if captures is None:
            return self._observed(args) if len(self.layouts) < MAX_VARIANTS else self.kernel(args)
        try:
            results = self._replayed(captures, args)
        except Exception as error:  # of many types: a synchronization with the host cannot be captured, for example
            self._refuse(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}")
            return self.kernel(args)
        args.clear()
        return results

    def _observed(self, args: list[Tensor]) -> Sequence[Any]:
        inputs = list(args)
        with Observed(args) as observed:
            results: Sequence[Any] = self.module(args)
        if observed.operators < MIN_OPERATORS:
            self.refused.append("")
        elif observed.reason is not None:
            self._refuse(observed.reason)
        else:
            self.layouts.store(inputs, [])
        return results

    def _refuse(self, reason: str) -> None:
        self.refused.append(reason)
        self.graphs.warn(self.name, reason)
        self.layouts.clear()

    def _replayed(self, captures: list[CudaGraphSegment], args: list[Tensor]) -> Sequence[Any]:
        ready = next((capture for capture in captures if capture.free), None)
        if ready is not None:
            return ready(args)
        if len(captures) == MAX_CAPTURES:
            self.graphs.warn(self.name, f"more than {MAX_CAPTURES} results of it are in use at once")
            return self.kernel(list(args))
        captures.append(CudaGraphSegment(self.kernel, args, self.graphs.buffers, self.graphs.capture))
        return captures[-1].results(args)
