"""Batch norms whose forward cannot be traced as it is, or communicates with other processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat.torch import check_dims
from ..core.replaced import for_this_thread, one_thread

Forward = Callable[[Any, Tensor], Tensor]


@contextlib.contextmanager
def cumulative_averages() -> Iterator[None]:
    """Let batch norms with ``momentum=None`` divide by the tensor ``num_batches_tracked`` inside, without its value."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_thread())
        for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
            stack.enter_context(_replaced(kind, _cumulative(kind.forward)))
        yield


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Let nn.SyncBatchNorm act inside as without a process group: the module is called with all rows."""
    with one_thread(), _replaced(nn.SyncBatchNorm, nn.BatchNorm1d.forward):
        yield


@contextlib.contextmanager
def _replaced(kind: type[nn.Module], forward: Forward) -> Iterator[None]:
    original = vars(kind).get("forward")
    kind.forward = for_this_thread(forward, kind.forward)
    try:
        yield
    finally:
        if original is None:
            del kind.forward
        else:
            kind.forward = original


def _cumulative(theirs: Forward) -> Forward:
    def forward(self: nn.BatchNorm1d, x: Tensor) -> Tensor:
        mean, variance, count = self.running_mean, self.running_var, self.num_batches_tracked
        tracks = self.training and self.track_running_stats and self.momentum is None
        if not tracks or mean is None or variance is None or count is None:
            return theirs(self, x)
        check_dims(self, x)
        now = torch.zeros_like(mean), torch.zeros_like(variance)
        out = F.batch_norm(x, *now, self.weight, self.bias, True, 1.0, self.eps)  # momentum 1: the batch's statistics
        with torch.no_grad():
            count.add_(1)
            weight = 1.0 / count.to(mean.dtype)
            for old, new in zip((mean, variance), now, strict=True):
                old.mul_(1 - weight).add_(new * weight)
        return out

    return forward
