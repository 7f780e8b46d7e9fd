"""Batches and losses that families share, and how a model of fixed widths is made narrow."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..frontier import Case

ROWS, CLASSES = 8, 7
Build = Callable[[], nn.Module]


def images(size: int, channels: int = 3, *, places: bool = False) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches of images ``[8, channels, size, size]`` and a class of each, or of each of its ``places``."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        dice = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, channels, size, size, generator=dice)
        return x, torch.randint(CLASSES, (ROWS, size, size) if places else (ROWS,), generator=dice)

    return batch


def classifier(build: Build, size: int = 32, loss_fn: Callable[..., Tensor] = F.cross_entropy) -> Case:
    """A model that says the class of an image."""
    return Case(build, images(size), loss_fn)


def segmenter(build: Build, size: int = 32) -> Case:
    """A model that says the class of each place of an image; torchvision's auxiliary head counts 0.4 (He et al.)."""
    return Case(build, images(size, places=True), _of_places)


def _of_places(out: Any, y: Tensor) -> Tensor:
    if isinstance(out, Tensor):
        return F.cross_entropy(out, y)
    loss = F.cross_entropy(out["out"], y)
    return loss + 0.4 * F.cross_entropy(out["aux"], y) if "aux" in out else loss


def with_loss(build: Build, size: int, channels: int = 3) -> Case:
    """A model that is called with images and classes, and returns its loss."""
    return Case(build, images(size, channels))


class Denoises(nn.Module):
    """The loss of a diffusion model: noise and times are drawn in forward (Ho et al. 2020, algorithm 1)."""

    def __init__(self, net: nn.Module, call: Callable[..., Any], steps: int = 50) -> None:
        super().__init__()
        self.net, self.call, self.steps = net, call, steps
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        t = torch.randint(self.steps, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        kept = self.kept[t].unflatten(0, (-1, *[1] * (x.dim() - 1)))
        found = self.call(self.net, kept.sqrt() * x + (1 - kept).sqrt() * noise, t, y)
        return F.mse_loss(found, noise)


class Told(nn.Module):
    """A denoiser that is told the class as a text of two words, by ``call(net, x, t, words, pooled)``."""

    def __init__(self, net: nn.Module, call: Callable[..., Any], width: int = 16) -> None:
        super().__init__()
        self.net, self.call, self.width = net, call, width
        self.words = nn.Embedding(CLASSES, 2 * width)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Any:
        words = self.words(y).unflatten(1, (2, self.width))
        return self.call(self.net, x, t, words, words.mean(1))


def told(build: Build, call: Callable[..., Any], size: int = 8, channels: int = 4, width: int = 16) -> Case:
    """A diffusion model that is told the class as a text."""
    return with_loss(lambda: Denoises(Told(build(), call, width), lambda net, x, t, y: net(x, t, y)), size, channels)


@contextlib.contextmanager
def narrow(by: int) -> Iterator[None]:
    """Convolutions, linear layers and norms that are made meanwhile have a ``by``-th of their features, where these
    divide and are at least two for each: so a model as shipped, with all of its layers, fits a test."""

    def fewer(n: int) -> int:
        return n // by if n % by == 0 and n >= 2 * by else n

    with contextlib.ExitStack() as stack:
        for kind, names in WIDTHS.items():
            made = kind.__init__

            @functools.wraps(made)
            def init(self: Any, *args: Any, made: Any = made, names: Any = names, **kwargs: Any) -> None:
                given = [fewer(n) if i < len(names) else n for i, n in enumerate(args)]
                if len(args) > GROUPS and kwargs.get("groups") is None and issubclass(type(self), nn.Conv2d):
                    given[GROUPS] = fewer(args[GROUPS])
                kwargs = {key: fewer(n) if key in (*names, "groups") else n for key, n in kwargs.items()}
                made(self, *given, **kwargs)

            stack.enter_context(mock.patch.object(kind, "__init__", init))
        yield


WIDTHS = {
    nn.Conv2d: ("in_channels", "out_channels"),
    nn.Linear: ("in_features", "out_features"),
    nn.BatchNorm2d: ("num_features",),
}
GROUPS = 6  # the position of Conv2d's argument


def made_narrow(build: Build, by: int = 8) -> Build:
    """``build`` in :func:`narrow`."""

    def made() -> nn.Module:
        with narrow(by):
            return build()

    return made
