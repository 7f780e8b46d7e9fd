"""Buffers whose elements share memory, as ``torch.ones(1).expand(5)`` does: nothing can be read into them."""

from __future__ import annotations

from torch import Tensor, nn


def is_folded(x: Tensor) -> bool:
    """Return whether a dim of a tensor goes over the same memory again and again."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def unfold_buffers(model: nn.Module) -> None:
    """Give each folded buffer of a module memory of its own, with its values. Ties stay ties."""
    unfolded: dict[int, Tensor] = {}
    for module in model.modules():
        for name, x in module._buffers.items():
            if x is not None and is_folded(x):
                module._buffers[name] = unfolded.setdefault(id(x), x.contiguous())
