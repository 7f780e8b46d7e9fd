"""Segments as CUDA graphs, whose kernels the host starts all at once: captured and replayed where that is the same."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from ...core.errors import BackendWarning
from .cudagraph_segment import Buffers, Capture, CudaGraphSegment, Work
from .layouts import ByLayout
from .replay_safety import Observed
from .segments import MOST_VARIANTS, Function

FEWEST_OPERATORS = 3  # of a segment: the kernels of fewer are started as soon as a replay is
MOST_CAPTURES = 64  # of one segment and layout: as many microbatches can be alive at once


@dataclass(frozen=True)
class CudaGraphs:
    """They run one after the other, so what is temporary in one may lie where it does in another (``pool``). Inputs
    and results lie elsewhere. ``failed``: graphs that could not be ended, which must not die before the process does.
    """

    device: str = "cuda"
    failed: list[Any] = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work, given: list[Tensor]) -> Work:
        # not torch.cuda.graph, which waits for all that the device does: for what comes from another rank, say, which
        # may wait for this one
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            graph.capture_begin(self.pool, capture_error_mode="thread_local")  # NCCL's thread may ask for its events
            try:
                work(given)
            except BaseException:
                try:
                    graph.capture_end()
                except RuntimeError:  # says again that the capture failed, and leaves the allocator asking this graph
                    self.failed.append(graph)
                raise
            graph.capture_end()
        here.wait_stream(self.stream)
        return lambda _: graph.replay()


@dataclass(frozen=True)
class Graphs:
    """What all segments of an engine share."""

    capture: Capture
    warned: set[str] = field(default_factory=set)
    buffers: Buffers = field(default_factory=Buffers)

    def of(self, kernel: Function, module: fx.GraphModule, name: str) -> Function:
        """``kernel``, which computes what ``module`` does, captured where it may be and there is something to gain."""
        return SegmentPlace(kernel, module, name, self)

    def warn(self, name: str, reason: str) -> None:
        if reason not in self.warned:
            self.warned.add(reason)
            text = f"a part of the {name} cannot be a CUDA graph, and runs as inductor alone runs it: {reason}"
            warnings.warn(BackendWarning(text), stacklevel=2)


@dataclass(frozen=True)
class SegmentPlace:
    """A segment at its place in a function. At the first call with a layout of inputs its Python runs, and is observed;
    later ones have results at places that stay, more of them whenever all are in use. ``refused``: why it is not
    captured; "" where nothing would be gained."""

    kernel: Function
    module: fx.GraphModule
    name: str
    graphs: Graphs
    layouts: ByLayout[list[CudaGraphSegment]] = field(default_factory=ByLayout)
    refused: list[str] = field(default_factory=list)

    def __call__(self, args: list[Tensor]) -> Sequence[Any]:
        device = self.graphs.capture.device
        other = next((x.device.type for x in args if x.device.type != device), None)
        if other is not None:
            self.graphs.warn(self.name, f"its values are on the {other}, not on {device}")
        if other is not None or self.refused:
            return self.kernel(args)
        captures = self.layouts.get(args)
        if captures is None:
            return self._observed(args) if len(self.layouts) < MOST_VARIANTS else self.kernel(args)
        try:
            made = self._made(captures, args)
        except Exception as error:  # of many kinds: what the host waits for cannot be captured, say
            self._refuse(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}")
            return self.kernel(args)
        args.clear()
        return made

    def _observed(self, args: list[Tensor]) -> Sequence[Any]:
        given = list(args)
        with Observed(args) as seen:
            made: Sequence[Any] = self.module(args)
        if seen.operators < FEWEST_OPERATORS:
            self.refused.append("")
        elif seen.reason is not None:
            self._refuse(seen.reason)
        else:
            self.layouts.put(given, [])
        return made

    def _refuse(self, reason: str) -> None:
        self.refused.append(reason)
        self.graphs.warn(self.name, reason)
        self.layouts.clear()

    def _made(self, captures: list[CudaGraphSegment], args: list[Tensor]) -> Sequence[Any]:
        ready = next((one for one in captures if one.free), None)
        if ready is not None:
            return ready(args)
        if len(captures) == MOST_CAPTURES:
            self.graphs.warn(self.name, f"more than {MOST_CAPTURES} results of it are in use at once")
            return self.kernel(list(args))
        captures.append(CudaGraphSegment(self.kernel, args, self.graphs.buffers, self.graphs.capture))
        return captures[-1].results(args)
