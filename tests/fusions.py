"""What TorchInductor fuses for a GPU, and the bytes that each kernel moves, on a machine without one.

A program is compiled for CUDA, and each segment of its functions is traced as the engine traces it. The graph is then
moved to tensors without values of an H100, and inductor's scheduler for Triton is asked what it would fuse. Nothing is
generated or run. torch answers what it asks of a device from :data:`H100`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo import device_interface
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

import quintnet
from quintnet_compiler.compat.torch import codegen_of
from quintnet_compiler.core.absent_gpu import CPU, on_device
from quintnet_compiler.core.annotations import is_getitem, value
from quintnet_compiler.features.fp8.ops import scaled_kernels
from quintnet_compiler.runtime.execute.engines import _casts, can_fuse, traced_for_inductor
from quintnet_compiler.runtime.execute.segments import Segment, split

CUDA = torch.device("cuda", 0)
FUSED = "fused"
SUM_BYTES = 4  # of an element of a sum of gradients, in float32
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", gcnArchName="", major=9, minor=0, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    total_memory=80 * 2**30, L2_cache_size=50 * 2**20, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
)  # fmt: skip


@dataclass
class Traffic:
    """What a generated function runs.

    Attributes:
        kernels: how often each operator runs; inductor's own kernels are ``fused``.
        bytes: what each of them reads and writes. ``accumulate`` copies a gradient to where it is summed up.
        eager: operators that run as generated Python, because nothing there can be fused.
        calls: how often each method of ``comm`` is called between segments.
    """

    kernels: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    eager: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def traffic(program: quintnet.CompiledProgram, rank: int = 0) -> dict[str, Traffic]:
    """Return what each function (``once``, ``forward``, ``backward``) of a rank of a program for CUDA runs."""
    counted: dict[str, Traffic] = defaultdict(Traffic)
    equal: dict[object, list[tuple[str, int]] | None] = {}
    for stage in program._primary().program.rank(rank).stages:
        for name, piece in stage.pieces.items():
            for part in split(piece.module.graph, apart=name == "once"):
                if isinstance(part, fx.Node):
                    counted[name].calls[str(part.target)] += part.op == "call_method"
                else:
                    _count(part, counted[name], equal, only_casts=name == "once")
    return counted


def _count(segment: Segment, counted: Traffic, equal: dict[object, Any], *, only_casts: bool) -> None:
    key = segment.module.code, tuple(_layout(node) for node in segment.inputs)
    if key not in equal:  # of what runs once a step, the engine compiles only casts with scales
        equal[key] = None if only_casts and not any(map(_casts, segment.nodes)) else scheduled(segment)
    for node in segment.nodes:
        if node.op == "call_method" and node.target == "accumulate":
            gradient = value(node.args[1])  # type: ignore[arg-type]
            counted.kernels["accumulate"] += 1
            counted.bytes["accumulate"] += gradient.nbytes + gradient.numel() * SUM_BYTES
        elif equal[key] is None and not is_getitem(node):
            counted.eager[str(node.target)] += 1
    for operator, size in equal[key] or ():
        if operator != "quintnet.accumulate":  # counted above, with what it writes
            counted.kernels[operator] += 1
            counted.bytes[operator] += size


def _layout(node: fx.Node) -> object:
    return None if node.name == "comm" else (value(node).shape, value(node).stride(), value(node).dtype)


def scheduled(segment: Segment) -> list[tuple[str, int]] | None:
    """Return each kernel of a segment and the bytes that it moves, or None where the engine would run Python."""
    mode = FakeTensorMode()
    with mode:
        args = [_like(node) for node in segment.inputs]
    traced = _traced(_on_cpu(segment.module), args)
    return _kernels(traced, mode) if can_fuse(traced.graph) else None


def kernels_of_module(module: fx.GraphModule, args: Sequence[Tensor]) -> list[tuple[str, int]]:
    """Return each kernel of a module that is always compiled, and the bytes that it moves."""
    mode = FakeTensorMode()
    with mode:
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in args]
    return _kernels(_traced(module, fakes), mode)


def _traced(module: fx.GraphModule, args: Sequence[Tensor]) -> fx.GraphModule:
    with mock.patch.object(scaled_kernels, "kernels_of", lambda device: frozenset(("rows", "128"))):
        return traced_for_inductor(module, args, on_gpu=True)


def _kernels(traced: fx.GraphModule, mode: FakeTensorMode) -> list[tuple[str, int]]:
    with V.set_fake_mode(mode), config.patch(shape_padding=False):
        compile_fx._recursive_post_grad_passes(traced, is_inference=True)
    _move(traced.graph, mode)
    inputs = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"]
    lowering = GraphLowering(traced)
    with _on_h100(), V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        lowering.run(*inputs)
        lowering._update_scheduler()
        nodes = [node for node in lowering.scheduler.nodes if not isinstance(node, scheduler.NopKernelSchedulerNode)]
        return [(_operator(node), node.get_read_write_buffers_sizes()) for node in nodes]


def _operator(node: Any) -> str:
    if not node.is_extern():
        return FUSED
    name = getattr(node.node, "python_kernel_name", None) or type(node.node).__name__
    return str(name).removeprefix("extern_kernels.").removeprefix("torch.ops.").removesuffix(".default")


def _like(node: fx.Node) -> Tensor:
    if node.name == "comm":
        return torch.empty(0)
    x = value(node)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)


def _on_cpu(module: fx.GraphModule) -> fx.GraphModule:
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].args, env[node].kwargs = on_device((env[node].args, env[node].kwargs), CPU)
    graph.set_codegen(codegen_of(module.graph))
    return fx.GraphModule({}, graph)


def _move(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Let a graph, which was traced on the CPU, be of tensors on a GPU."""

    def on_gpu(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.numel():  # what stands for comm stays
            return x
        with mode, _disable_current_modes():
            meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return FakeTensor(mode, meta, CUDA)

    for node in graph.nodes:
        node.args, node.kwargs = on_device((node.args, node.kwargs), CUDA)
        if "val" in node.meta:
            node.meta["val"] = torch.utils._pytree.tree_map(on_gpu, node.meta["val"])


@contextlib.contextmanager
def _on_h100() -> Iterator[None]:
    """Let torch answer for a device that is not there."""
    interface: Any = device_interface.get_interface_for_device("cuda")
    answers = [
        (torch.cuda, "get_device_properties", lambda *args: H100),
        (torch.cuda, "get_device_capability", lambda *args: (H100.major, H100.minor)),
        (torch.cuda, "current_device", lambda: 0),
        (scheduler, "has_triton", lambda *args: True),
        (interface, "current_device", staticmethod(lambda: 0)),
        (interface, "get_device_properties", staticmethod(lambda *args: H100)),
        (interface, "get_compute_capability", staticmethod(lambda *args: 90)),
        (interface.Worker, "current_device", staticmethod(lambda: 0)),
        (interface.Worker, "get_device_properties", staticmethod(lambda *args: H100)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer))
        yield
