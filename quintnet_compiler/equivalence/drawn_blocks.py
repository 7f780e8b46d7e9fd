"""Run each distinct block of a module once, with random values for tensors that have none.

This fits into one process if the model does not, and works for models on the meta device.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.block_reuse import blocks_once
from ..compat.torch import pytree
from ..compat.torch_hooks import backward_hooks
from ..core.errors import QuintNetError
from ..huggingface.registries import without_caches
from ..runtime.state.module_parameters import has_values
from ..weights.meta_buffers import computed_buffers

MAX_POSITIONS = 64  # of each text


def with_values(
    model: nn.Module, others: list[nn.Module], needed: Mapping[str, Tensor], device: torch.device
) -> tuple[list[nn.Module], dict[str, Tensor]]:
    """Return copies of the modules, and their tensors for the names of ``needed``.

    The copies share all tensors that have values, and get random values for those of ``needed`` that have none. Hooks
    stay.
    """
    computed = _computed(model, needed)
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for module in (model, *others):
        for x in (*module.parameters(), *module.buffers()):
            memo[id(x)] = x
    tensors: dict[str, Tensor] = {}
    for name, x in needed.items():
        if not has_values(x):
            values = computed.get(name)
            values = _drawn(x, generator) if values is None else values.clone()
            tensors[name] = memo[id(x)] = _like(x, values.to(device))
        else:
            tensors[name] = x
    return [copy.deepcopy(module, memo) for module in (model, *others)], tensors


@contextlib.contextmanager
def each_block_once(model: nn.Module) -> Iterator[None]:
    """Call each distinct block of ``model`` once inside, without caches of keys and values, which need every block."""
    with blocks_once(model), without_caches(model):
        yield


def drawn_batch(batch: Any, rows: int, *, short: bool) -> Any:
    """Return the batch with values for ``rows`` rows; ``short``: of at most MAX_POSITIONS, if it is tokens alone."""
    generator = torch.Generator().manual_seed(0)
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    lengths = {x.shape[1] for x in tensors if x.dim() == 2}
    tokens = len(lengths) == 1 and all(x.dim() == 2 and not x.is_floating_point() for x in tensors)

    def with_rows(x: Tensor) -> Tensor:
        if tokens and short:
            x = x[:, :MAX_POSITIONS]
        if x.dim() and x.shape[0] > rows:
            x = x[:rows]
        if not x.is_meta:
            return x
        if x.is_floating_point():
            return torch.randn(x.shape, generator=generator).to(x.dtype)
        return torch.ones(x.shape, dtype=x.dtype) if x.dtype is torch.bool else torch.randint(
            0, 2, x.shape, generator=generator
        ).to(x.dtype)  # fmt: skip

    return pytree.tree_map_only(Tensor, with_rows, batch)


def _computed(model: nn.Module, needed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parameters = {name for name, _ in model.named_parameters()}
    try:
        return computed_buffers(model, [n for n, x in needed.items() if x.is_meta and n not in parameters])
    except QuintNetError:
        return {}


def _drawn(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return random weights that keep activations near one; with one dim, weights near one."""
    if not x.is_floating_point():
        return torch.zeros(x.shape, dtype=x.dtype)
    noise = torch.empty(x.shape, dtype=x.dtype).normal_(generator=generator)
    return noise.div_(math.sqrt(max(math.prod(x.shape[1:]), 1))) if x.dim() > 1 else noise.mul_(0.1).add_(1)


def _like(x: Tensor, values: Tensor) -> Tensor:
    if not isinstance(x, nn.Parameter):
        return values
    parameter = nn.Parameter(values, requires_grad=x.requires_grad)
    for hook in (backward_hooks(x) or {}).values():
        parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    return parameter
