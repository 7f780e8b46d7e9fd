"""A module of which each distinct block runs once, with drawn values where it has none: what fits into one process of
a model that does not, or that is on the meta device."""

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

POSITIONS = 64  # of texts: so many of each are enough


def with_values(
    model: nn.Module, others: list[nn.Module], needed: Mapping[str, Tensor], device: torch.device
) -> tuple[list[nn.Module], dict[str, Tensor]]:
    """Copies of the modules that share every tensor that has values, and have drawn values for those of ``needed``
    that have none. The copies, and ``needed`` as they have it. Hooks stay."""
    computed = _computed(model, needed)
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for module in (model, *others):
        for x in (*module.parameters(), *module.buffers()):
            memo[id(x)] = x
    found: dict[str, Tensor] = {}
    for name, x in needed.items():
        if not has_values(x):
            values = computed.get(name)
            values = _drawn(x, generator) if values is None else values.clone()
            found[name] = memo[id(x)] = _like(x, values.to(device))
        else:
            found[name] = x
    return [copy.deepcopy(module, memo) for module in (model, *others)], found


@contextlib.contextmanager
def each_block_once(model: nn.Module) -> Iterator[None]:
    """Call each distinct block of ``model`` once while inside. Caches of keys and values, which collect what every
    block makes, are not made."""
    with blocks_once(model), without_caches(model):
        yield


def drawn_batch(batch: Any, rows: int, *, short: bool) -> Any:
    """The batch with values. ``short``: where it is tokens alone, fewer of them."""
    generator = torch.Generator().manual_seed(0)
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    lengths = {x.shape[1] for x in tensors if x.dim() == 2}
    tokens = len(lengths) == 1 and all(x.dim() == 2 and not x.is_floating_point() for x in tensors)

    def one(x: Tensor) -> Tensor:
        if tokens and short:
            x = x[:, :POSITIONS]
        if x.dim() and x.shape[0] > rows:
            x = x[:rows]
        if not x.is_meta:
            return x
        if x.is_floating_point():
            return torch.randn(x.shape, generator=generator).to(x.dtype)
        return torch.ones(x.shape, dtype=x.dtype) if x.dtype is torch.bool else torch.randint(
            0, 2, x.shape, generator=generator
        ).to(x.dtype)  # fmt: skip

    return pytree.tree_map_only(Tensor, one, batch)


def _computed(model: nn.Module, needed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parameters = {name for name, _ in model.named_parameters()}
    try:
        return computed_buffers(model, [n for n, x in needed.items() if x.is_meta and n not in parameters])
    except QuintNetError:
        return {}


def _drawn(x: Tensor, generator: torch.Generator) -> Tensor:
    """Weights of a size that keeps values near one; near one where they have one dim."""
    if not x.is_floating_point():
        return torch.zeros(x.shape, dtype=x.dtype)
    noise = torch.empty(x.shape, dtype=x.dtype).normal_(generator=generator)
    return noise.div_(math.sqrt(max(math.prod(x.shape[1:]), 1))) if x.dim() > 1 else noise.mul_(0.1).add_(1)


def _like(x: Tensor, values: Tensor) -> Tensor:
    if not isinstance(x, nn.Parameter):
        return values
    made = nn.Parameter(values, requires_grad=x.requires_grad)
    for hook in (backward_hooks(x) or {}).values():
        made.register_hook(hook)  # type: ignore[no-untyped-call]
    return made
