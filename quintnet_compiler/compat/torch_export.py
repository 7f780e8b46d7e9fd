"""Private names of torch: what torch.export makes of switches of gradients in a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._export.passes import replace_set_grad_with_hop_pass as its_pass

__all__ = ["switches_by"]


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
