"""Private names of torch: TorchInductor for one graph. It takes seconds to import, so it is imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

__all__ = ["decompositions", "kernels"]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions that inductor expects to be applied; instead: torch.export.default_decompositions."""
    from torch._inductor.decomposition import select_decomp_table

    table: dict[Any, Callable[..., Any]] = select_decomp_table()
    return table


def kernels(traced: fx.GraphModule, fakes: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a graph without autograd; instead: torch.compile(traced), which guards and traces again."""
    from torch._inductor.compile_fx import compile_fx_inner

    *_, output = traced.graph.nodes
    # the strides that eager would give: what reads them later must not depend on the backend
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    compiled: Any = compile_fx_inner(traced, fakes, is_inference=True)
    # what it calls, without the contexts that it enters around each call for metrics of compilation
    run: Callable[[list[Any]], Sequence[Any]] = compiled.current_callable
    return run
