"""The small module that cases are made of: two linears, and a forward that each case has of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .frontier import LAYOUTS, Case

Cases = dict[str, Case]


def refused(case: Case, code: str, cause: str) -> Case:
    return replace(case, refuses=dict.fromkeys(LAYOUTS, code), cause=cause)


class Small(nn.Module):
    """Two linears; ``body(module, *batch)`` is its forward."""

    def __init__(self, body: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.a, self.b, self.body = nn.Linear(4, 8), nn.Linear(8, 4), body
        self.drop, self.beta, self.scales, self.table = nn.Dropout(0.5), 0.5, [1.0, 2.0], torch.ones(4)
        self.register_buffer("mean", torch.zeros(4))
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *batch: Tensor) -> Tensor:
        return self.body(self, *batch)

    def hidden(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def xy(step: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=dice), torch.randint(4, (8,), generator=dice)


def x_alone(step: int) -> tuple[Tensor]:
    return xy(step)[:1]


def case_of(body: Callable[..., Tensor], batch: Any = x_alone, **more: Any) -> Case:
    """``body`` returns the loss."""
    return Case(lambda: Small(body), batch, **more)


def logits_with(loss_of: Callable[[], Any], **more: Any) -> Case:
    """Logits, and a loss function with parameters of its own: it, and those by name."""
    return Case(lambda: (Small(Small.hidden), *loss_of()), xy, **more)
