"""Private names of torch: what torch.export makes of switches of gradients in a trace, and what it keeps of one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._export.passes import replace_set_grad_with_hop_pass as its_pass

from .torch import composite_in_cpp
from .torch_symbols import ShapeEnv

__all__ = ["free", "kernels_alone", "switches_by"]


@contextlib.contextmanager
def kernels_alone(module: fx.GraphModule) -> Iterator[None]:
    """Inside, operators of ``module`` that have kernels are not traced as torch's definitions in Python, where these
    stand in front of autograd: the one of multilabel_margin_loss, for one, counts labels behind the last. Instead: a
    TorchDispatchMode that records them."""
    key = torch._C.DispatchKey.Autograd
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    targets = {
        node.target for graph in graphs for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)
    }
    defined = [op for op in targets if key in op.py_kernels and not composite_in_cpp(op)]
    with contextlib.ExitStack() as stack:
        for op in defined:
            stack.callback(op._dispatch_cache.clear)
            stack.enter_context(mock.patch.dict(op.py_kernels))
            del op.py_kernels[key]
            op._dispatch_cache.clear()
        yield


def free(exported: torch.export.ExportedProgram) -> None:
    """Free a trace that is no longer needed; instead: nothing.

    Its tensors hold symbols and one another in C++, where Python's garbage collector cannot see it, and torch caches
    answers about symbols without a limit, so it would stay until the process ends.
    """
    for node in exported.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        node.meta.clear()
        if mode is not None and mode.shape_env is not None:
            mode.shape_env.tracked_fakes = []
            mode.shape_env.fake_tensor_cache.clear()
    for answers in vars(ShapeEnv).values():
        if hasattr(answers, "cache_clear"):
            answers.cache_clear()


@contextlib.contextmanager
def switches_by(run: Callable[[fx.Graph, bool], Mapping[str, str]], replace: Any) -> Iterator[None]:
    """Inside, ``run(graph, whether gradients are on)`` takes the place of the pass that makes operators of the parts of
    a graph where they are off; it returns which results have other names. Instead: inlining these operators, which are
    not made inside of autocast."""
    name = "replace_set_grad_with_hop_pass"
    theirs = getattr(its_pass, name)

    def ours(gm: fx.GraphModule, signature: Any) -> tuple[fx.GraphModule, Any]:
        renamed = run(gm.graph, torch.is_grad_enabled())
        for spec in () if signature is None else signature.output_specs:
            spec.arg.name = renamed.get(spec.arg.name, spec.arg.name)
        gm.recompile()
        return gm, signature

    with mock.patch.object(its_pass, name, replace(ours, theirs)):
        yield
