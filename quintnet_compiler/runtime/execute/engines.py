"""Engines that run generated functions: eager Python, or inductor between collectives, with or without CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from ...compat.torch import make_fx, schema_or_none
from ...compat.torch_inductor import decompositions, kernels
from ...core.annotations import value
from ...core.errors import BackendWarning, CompileError
from ...ir.generated import GeneratedModule
from ...ops.catalog import op_spec
from .layouts import ByLayout
from .segments import MAX_VARIANTS, Function, Segment, Stepper, split

if TYPE_CHECKING:
    from .cuda_graphs.graphed_engine import Graphs

Engine = Callable[[GeneratedModule, str], Function]  # takes a generated function and its name in messages


def eager(module: GeneratedModule, name: str) -> Function:
    """Return the generated Python function itself, without the overhead of a module's call (hooks)."""
    forward: Function = module.forward
    return forward


@dataclass(frozen=True)
class Inductor:
    """An engine that compiles the segments between calls of ``comm`` with inductor.

    Equal segments (of repeated blocks, stages, ranks of one process) are compiled once, when they first run, because
    only then the strides of their inputs are known. Segments that inductor cannot compile run eagerly, with one
    :class:`BackendWarning` for each reason.

    Attributes:
        graphs: captures segments as CUDA graphs, unless None; segments then hand over no gradients.
    """

    graphs: Graphs | None = None
    functions: WeakKeyDictionary[GeneratedModule, Function] = field(default_factory=WeakKeyDictionary)
    kernels: dict[str, CompiledSegment] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def __call__(self, module: GeneratedModule, name: str) -> Function:
        if module not in self.functions:
            parts = split(module.graph, pure=self.graphs is not None)
            self.functions[module] = Stepper.from_parts(module.graph, parts, lambda s: self._run(s, name))
        return self.functions[module]

    def of_parameters(self, module: GeneratedModule, name: str) -> Function:
        """Return what runs a function that prepares parameters for all microbatches.

        It runs once a step, so only casts with scales, which read a parameter several times, are worth compiling. Each
        parameter's casts are a segment, because many of those are equal.
        """
        graph = module.graph
        if not any(map(_casts, graph.nodes)):
            return eager(module, name)

        def kernel(segment: Segment) -> Function:
            if not any(map(_casts, segment.nodes)):
                return eager(segment.module, name)
            sizes = [tuple(value(node).shape) for node in segment.inputs]  # one kernel for each size
            return self._kernel(f"{sizes} {segment.module.code}", segment, name)

        if module not in self.functions:
            self.functions[module] = Stepper.from_parts(graph, split(graph, apart=True), kernel)
        return self.functions[module]

    def _run(self, segment: Segment, name: str) -> Function:
        kernel = self._kernel(segment.module.code, segment, name)
        return kernel if self.graphs is None else self.graphs.wrap_kernel(kernel, segment.module, name)

    def _kernel(self, key: str, segment: Segment, name: str) -> CompiledSegment:
        return self.kernels.setdefault(key, CompiledSegment(segment.module, name, self.warned))


def engine_of_parameters(engine: Engine) -> Engine:
    """Return the engine for functions that run once a step, where ``engine`` runs all others."""
    return engine.of_parameters if isinstance(engine, Inductor) else eager


def _casts(node: fx.Node) -> bool:
    return op_spec(node).cast_step is not None


@dataclass(frozen=True)
class CompiledSegment:
    """A segment that is compiled for each layout (dtypes, shapes, strides) of its inputs.

    ``alone``: even if it is a single operator, where nothing can be fused.
    """

    module: fx.GraphModule
    name: str
    warned: set[str]
    variants: ByLayout[Function] = field(default_factory=ByLayout)
    alone: bool = False

    def __call__(self, args: list[Tensor]) -> Sequence[Any]:
        run = self.variants.get(args)
        if run is None:
            if len(self.variants) == MAX_VARIANTS:
                self._warn(f"it met inputs of more than {MAX_VARIANTS} sizes")
                return eager(self.module, self.name)(args)
            run = self.variants.store(args, self._compiled(args))
        return run(args)

    def _compiled(self, args: Sequence[Tensor]) -> Function:
        try:
            compile_segment = always_compiled if self.alone else compile_fused
            return compile_segment(self.module, args) or self.module
        except Exception as error:  # of many types: no compiler, an operator without lowering, inductor's bugs
            self._warn(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}")
            return self.module

    def _warn(self, reason: str) -> None:
        if reason not in self.warned:
            self.warned.add(reason)
            text = f"inductor cannot compile a part of the {self.name}, which runs eager: {reason}"
            warnings.warn(BackendWarning(text), stacklevel=2)


def compile_fused(module: fx.GraphModule, args: Sequence[Tensor]) -> Function | None:
    """Return inductor's code for ``module`` on inputs of the layout of ``args``; None where nothing can be fused."""
    traced = traced_for_inductor(module, args, on_gpu=any(x.is_cuda for x in args))
    return _kernels_of(traced) if can_fuse(traced.graph) else None


def always_compiled(module: fx.GraphModule, args: Sequence[Tensor]) -> Function:
    """Return inductor's code for ``module`` on inputs of the layout of ``args``, even of a single operator."""
    return _kernels_of(traced_for_inductor(module, args, on_gpu=any(x.is_cuda for x in args)))


def _kernels_of(traced: fx.GraphModule) -> Function:
    return kernels(traced, [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"])


def traced_for_inductor(module: fx.GraphModule, args: Sequence[Tensor], *, on_gpu: bool) -> fx.GraphModule:
    """Return ``module`` in the operators that inductor compiles, for inputs of the layout of ``args``."""

    def flat(*tensors: Tensor) -> tuple[Any, ...]:
        results: tuple[Any, ...] = module(list(tensors))
        return results

    table = {**decompositions(), **_own_decompositions(module.graph, on_gpu)}
    with torch.no_grad():
        return make_fx(flat, decomposition_table=table, tracing_mode="fake")(*args)


def _own_decompositions(graph: fx.Graph, on_gpu: bool) -> dict[Any, Callable[..., Tensor]]:
    """Return, by operator of the graph, what makes its result of operators of torch, where its spec says that."""
    own = {node.target: op_spec(node).consists_of for node in graph.nodes}
    return {target: each.function for target, each in own.items() if each and (on_gpu or not each.on_gpus)}


def can_fuse(graph: fx.Graph) -> bool:
    """Return whether inductor could fuse two pointwise operators or reductions that share a value.

    Matmuls, views and single casts are as fast without inductor.
    """
    read_or_written: set[fx.Node] = set()
    for node in graph.nodes:
        if not {torch.Tag.pointwise, torch.Tag.reduction}.isdisjoint(getattr(node.target, "tags", ())):
            values = {_base(n) for n in (node, *node.all_input_nodes)}
            if not read_or_written.isdisjoint(values):
                return True
            read_or_written |= values
    return False


def _base(node: fx.Node) -> fx.Node:
    """Return the node that ``node`` is a view of, or ``node`` itself."""
    while any(result.alias_info is not None for result in getattr(schema_or_none(node.target), "returns", ())):
        node = node.all_input_nodes[0]
    return node


def _with_cuda_graphs() -> Inductor:
    from .cuda_graphs.graphed_engine import CudaGraphs, Graphs

    return Inductor(Graphs(CudaGraphs()))


@dataclass(frozen=True)
class EngineKind:
    """A value of ``compile(backend=...)``.

    Attributes:
        make: the engine of a program.
        replayed: whether kernels are priced as replayed, without what the host takes to launch each of them.
    """

    make: Callable[[], Engine]
    replayed: bool = False


_ENGINES: dict[str, EngineKind] = {
    "eager": EngineKind(lambda: eager),
    "inductor": EngineKind(Inductor),
    "cudagraphs": EngineKind(_with_cuda_graphs, replayed=True),
}
ENGINES: Mapping[str, EngineKind] = MappingProxyType(_ENGINES)
"""Kinds of engines, by the name that ``compile(backend=...)`` takes."""


def add_engines(engines: Mapping[str, EngineKind]) -> None:
    """Add the engines of a feature.

    Raises:
        ValueError: if there is one of the same name.
    """
    if repeated := engines.keys() & ENGINES.keys():
        raise ValueError(f"there is an engine {', '.join(sorted(repeated))} already")
    _ENGINES.update(engines)


def check_engine(name: str) -> None:
    """Check the name of an engine.

    Raises:
        CompileError: QN108 for an unknown name.
    """
    if name not in ENGINES:
        raise CompileError("QN108", f"there is no backend {name!r}", fix=f"use one of {', '.join(ENGINES)}")
