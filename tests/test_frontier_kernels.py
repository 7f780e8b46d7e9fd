"""Derivatives in generated code against autograd's: memory formats, mutation inside a derivative, odd operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from .frontier import LAYOUTS, trains_equally

torch.set_num_threads(1)
TWO = {name: LAYOUTS[name] for name in ("dp2", "tp2")}


class Between(nn.Module):
    """A Linear, and what is in question: ``function(module, x)``, which may use ``parts``."""

    def __init__(self, function: Callable[..., Tensor], features: int = 4, **parts: nn.Module) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(4, features), function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *batch: Tensor) -> Tensor:
        return self.function(self, *batch)


class Normalized(nn.Module):
    """GroupNorm, and a gradient that arrives as ``back`` leaves it."""

    def __init__(self, back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 8, 1), nn.GroupNorm(2, 8)
        self.linear, self.back = nn.Linear(8, 4), back

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.back(self.norm(self.convolution(x)).tanh())).square().mean()  # type: ignore[no-any-return]


def _image() -> Tensor:
    return torch.randn(8, 4, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_group_norm_with_a_gradient_that_is_not_contiguous(last: bool) -> None:
    x = _image().to(memory_format=torch.channels_last) if last else _image()
    trains_equally(lambda: Normalized(lambda h: h.flatten(2).transpose(1, 2)), (x,), meshes=LAYOUTS)
    trains_equally(lambda: Normalized(lambda h: h.mean((2, 3))), (x,), meshes=TWO)


class Positional(nn.Module):
    """The positional convolution of Wav2Vec2: ranks hold slices along the normalized weight's last dim."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.c = weight_norm(nn.Conv1d(16, 16, 4, padding=2), dim=2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.a(x)).transpose(1, 2)
        return self.b(F.gelu(self.c(h)[..., :-1]).transpose(1, 2))  # type: ignore[no-any-return]


def test_weight_norm_along_the_last_dim() -> None:
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    trains_equally(Positional, (x, x.sin()), F.mse_loss, TWO)


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
SIGNS = torch.where(torch.rand(8, generator=torch.Generator().manual_seed(1)) > 0.5, 1.0, -1.0)
DERIVATIVES: dict[str, Callable[[], nn.Module]] = {
    "norm of order 3": lambda: Between(lambda s, x, y: s.inner(x).norm(p=3, dim=1).mean()),
    "normalize of order 3": lambda: Between(lambda s, x, y: F.normalize(s.inner(x), p=3).square().sum()),
    "sgn": lambda: Between(lambda s, x, y: (s.inner(x) * torch.sgn(s.inner(x))).mean()),
    "sgn alone": lambda: Between(lambda s, x, y: torch.sgn(s.inner(x)).mean() + s.inner(x).sum()),
    "pool to one": lambda: Between(
        lambda s, x, y: s.pool(s.inner(x).reshape(-1, 2, 2).transpose(1, 2)).square().mean(),
        pool=nn.AdaptiveAvgPool1d(1),
    ),
    "pool after a norm": lambda: Between(
        lambda s, x, y: s.pool(s.norm(s.inner(x).reshape(-1, 2, 2, 4)).permute(0, 3, 1, 2)).square().mean(),
        features=16,
        pool=nn.AdaptiveAvgPool2d(1),
        norm=nn.LayerNorm(4),
    ),
    "circular padding": lambda: Between(
        lambda s, x, y: F.pad(s.inner(x).unsqueeze(1), (1, 2), mode="circular").square().mean()
    ),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_that_change_values_in_place(name: str) -> None:
    trains_equally(DERIVATIVES[name], (X, SIGNS), meshes=TWO)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "margin ranking": lambda out, y: F.margin_ranking_loss(out[:, 0], out[:, 1], y, 0.3),
    "hinge embedding": lambda out, y: F.hinge_embedding_loss(5 * out[:, 0], y),
    "cosine embedding": lambda out, y: F.cosine_embedding_loss(out, out.sin(), y, 0.2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_operators_without_a_rule_that_change_values_in_place(name: str) -> None:
    options: dict[str, Any] = {"plan": {"unknown_ops": "replicate"}}
    trains_equally(lambda: nn.Linear(4, 4), (X, SIGNS), LOSSES[name], TWO, **options)
