"""What TorchInductor makes of a segment of a generated function, without compiling it and without a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from quintnet_compiler.compat.torch import codegen_of, make_fx
from quintnet_compiler.compat.torch_inductor import decompositions
from quintnet_compiler.core.absent_gpu import CPU, on_device
from quintnet_compiler.core.annotations import value
from quintnet_compiler.runtime.execute.engines import can_fuse
from quintnet_compiler.runtime.execute.segments import Segment

OWN = "torch.ops.quintnet."  # hands gradients over: counted where the function runs


def fused_kernels(segment: Segment) -> Counter[str] | None:
    """The kernels of a segment by what they are: operators of libraries, and ``fused``, inductor's own. Its scheduler
    groups operators as for CPUs, but tensors are joined within kernels that read them, as for GPUs. None where the
    engine would run the segment as generated Python."""
    module, mode = _on_cpu(segment.module), FakeTensorMode()
    with mode:
        args = [_like(n) for n in segment.inputs]

    def flat(*tensors: torch.Tensor) -> tuple[Any, ...]:
        results: tuple[Any, ...] = module(list(tensors))
        return results

    with torch.no_grad():
        traced = make_fx(flat, decomposition_table=decompositions(), tracing_mode="fake")(*args)
    if not can_fuse(traced.graph):
        return None
    lowering = GraphLowering(traced)
    on_gpus = config.patch(force_pointwise_cat=True)
    with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), on_gpus:
        lowering.run(*[n.meta["val"] for n in traced.graph.find_nodes(op="placeholder")])
        lowering._update_scheduler()
        return Counter(kind for node in lowering.scheduler.nodes if (kind := _name(node)))


def _name(node: Any) -> str:
    """Return the operator of a scheduler's node, or nothing if it only picks one of several results."""
    if isinstance(node, NopKernelSchedulerNode):
        return ""
    if not node.is_extern():
        return "fused"
    name = getattr(node.node, "python_kernel_name", None) or ""
    if name.startswith(OWN):
        return ""
    return name.removeprefix("extern_kernels.").removeprefix("torch.ops.aten.").removesuffix(".default")


def _like(node: fx.Node) -> torch.Tensor:
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
