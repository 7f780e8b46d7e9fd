"""What runs generated functions: Python as it is, or inductor's code for what lies between communication, which may be
captured in CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from ...compat.torch import make_fx, schema_or_none
from ...compat.torch_inductor import decompositions, kernels
from ...core.annotations import value
from ...core.errors import BackendWarning, CompileError
from ...ir.generated import GeneratedModule
from ...ops.scaled_products import CASTS, CONSISTS_OF
from .cudagraphs import CudaGraphs, Graphs
from .layouts import ByLayout
from .segments import MOST_VARIANTS, Function, Segment, Stepper, split

Engine = Callable[[GeneratedModule, str], Function]  # of a generated function and what messages call it


def eager(module: GeneratedModule, name: str) -> Function:
    """The generated Python itself, without what a module's call looks for (hooks)."""
    found: Function = module.forward
    return found


@dataclass(frozen=True)
class Inductor:
    """Between two calls of ``comm``, code that inductor made; equal segments (of repeated blocks, stages, ranks of one
    process) are compiled once, when they first run: then the strides of what they take are known. What inductor
    cannot compile runs as it is, with one :class:`BackendWarning` for each reason. ``graphs``: what captures it: then
    segments only compute."""

    graphs: Graphs | None = None
    functions: WeakKeyDictionary[GeneratedModule, Function] = field(default_factory=WeakKeyDictionary)
    kernels: dict[str, CompiledSegment] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def __call__(self, module: GeneratedModule, name: str) -> Function:
        if module not in self.functions:
            parts = split(module.graph, pure=self.graphs is not None)
            self.functions[module] = Stepper.of(module.graph, parts, lambda s: self._run(s, name))
        return self.functions[module]

    def of_parameters(self, module: GeneratedModule, name: str) -> Function:
        """Return what makes of parameters what all microbatches read. It runs once a step: only casts to 8 bits, which
        read a parameter several times, are worth compiling, each parameter's by themselves: many are alike."""
        graph = module.graph
        if not any(map(_casts, graph.nodes)):
            return eager(module, name)

        def kernel(segment: Segment) -> Function:
            if not any(map(_casts, segment.nodes)):
                return eager(segment.module, name)
            sizes = [tuple(value(node).shape) for node in segment.inputs]  # as many kernels as there are sizes
            return self._kernel(f"{sizes} {segment.module.code}", segment, name)

        if module not in self.functions:
            self.functions[module] = Stepper.of(graph, split(graph, apart=True), kernel)
        return self.functions[module]

    def _run(self, segment: Segment, name: str) -> Function:
        kernel = self._kernel(segment.module.code, segment, name)
        return kernel if self.graphs is None else self.graphs.of(kernel, segment.module, name)

    def _kernel(self, key: str, segment: Segment, name: str) -> CompiledSegment:
        return self.kernels.setdefault(key, CompiledSegment(segment.module, name, self.warned))


def engine_of_parameters(engine: Engine) -> Engine:
    """Return what runs the functions that run once a step, where ``engine`` runs all others."""
    return engine.of_parameters if isinstance(engine, Inductor) else eager


def _casts(node: fx.Node) -> bool:
    return node.target in CASTS


@dataclass(frozen=True)
class CompiledSegment:
    """A segment, compiled for each layout (dtypes, shapes, strides) of its inputs that it meets."""

    module: fx.GraphModule
    name: str
    warned: set[str]
    variants: ByLayout[Function] = field(default_factory=ByLayout)

    def __call__(self, args: list[Tensor]) -> Sequence[Any]:
        run = self.variants.get(args)
        if run is None:
            if len(self.variants) == MOST_VARIANTS:
                self._warn(f"it met inputs of more than {MOST_VARIANTS} sizes")
                return eager(self.module, self.name)(args)
            run = self.variants.put(args, self._compiled(args))
        return run(args)

    def _compiled(self, args: Sequence[Tensor]) -> Function:
        try:
            return compiled(self.module, args) or self.module
        except Exception as error:  # of many kinds: no compiler, an operator that it cannot lower, its own bugs
            self._warn(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}")
            return self.module

    def _warn(self, reason: str) -> None:
        if reason not in self.warned:
            self.warned.add(reason)
            text = f"inductor cannot compile a part of the {self.name}, which runs eager: {reason}"
            warnings.warn(BackendWarning(text), stacklevel=2)


def compiled(module: fx.GraphModule, args: Sequence[Tensor]) -> Function | None:
    """Inductor's code for ``module`` on inputs laid out like ``args``; None where it has nothing to fuse."""

    def flat(*given: Tensor) -> tuple[Any, ...]:
        made: tuple[Any, ...] = module(list(given))
        return made

    # scales and casts to 8 bits read a value several times, and become a part of what makes it; on GPUs
    apart = CONSISTS_OF if any(x.is_cuda for x in args) else {}
    with torch.no_grad():
        traced = make_fx(flat, decomposition_table={**decompositions(), **apart}, tracing_mode="fake")(*args)
    if not can_fuse(traced.graph):
        return None
    fakes = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"]
    return kernels(traced, fakes)


def can_fuse(graph: fx.Graph) -> bool:
    """Whether two operators that share a value could be one kernel of inductor's: matmuls and views are as fast without
    it, and so are casts of one parameter each."""
    known: set[fx.Node] = set()
    for node in graph.nodes:
        if not {torch.Tag.pointwise, torch.Tag.reduction}.isdisjoint(getattr(node.target, "tags", ())):
            shared = {_seen_in(n) for n in (node, *node.all_input_nodes)}
            if not known.isdisjoint(shared):
                return True
            known |= shared
    return False


def _seen_in(node: fx.Node) -> fx.Node:
    """What ``node`` is a view of; else itself."""
    while any(made.alias_info is not None for made in getattr(schema_or_none(node.target), "returns", ())):
        node = node.all_input_nodes[0]
    return node


ENGINES: Mapping[str, Callable[[], Engine]] = MappingProxyType(
    {"eager": lambda: eager, "inductor": Inductor, "cudagraphs": lambda: Inductor(Graphs(CudaGraphs()))}
)
"""What makes an engine, under the name that ``compile(backend=...)`` gives it."""
EngineName = Literal["eager", "inductor", "cudagraphs"]
REPLAYS: EngineName = "cudagraphs"  # what it runs again, the host starts all at once


def check_engine(name: str) -> None:
    """Raises: CompileError QN108 for an engine that there is not."""
    if name not in ENGINES:
        raise CompileError("QN108", f"there is no backend {name!r}", fix=f"use one of {', '.join(ENGINES)}")
