"""A small diffusion model, written for one device: nothing here knows how it will be split."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions, told what is wanted by a scale and a shift of each channel, beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.told = nn.Linear(width, 2 * width)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        scale, shift = self.told(wanted)[:, :, None, None].chunk(2, dim=1)
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift))
        out: Tensor = x + h
        return out


class Denoiser(nn.Module):
    """Says what noise is in an image of a class: ``[batch, size, size]``, times and labels of shape ``[batch]``."""

    def __init__(self, width: int, depth: int, steps: int, classes: int) -> None:
        super().__init__()
        self.times, self.classes = nn.Embedding(steps, width), nn.Embedding(classes, width)
        self.into, self.out = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.blocks, self.norm = nn.ModuleList(Block(width) for _ in range(depth)), nn.GroupNorm(4, width)

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        wanted = F.silu(self.times(times) + self.classes(labels))
        x = self.into(images[:, None])
        for block in self.blocks:
            x = block(x, wanted)
        noise: Tensor = self.out(F.silu(self.norm(x)))[:, 0]
        return noise


class Diffusion(nn.Module):
    """Ho et al. (2020). With images and labels: the loss of noise and times that are drawn here. With times too: the
    noise in these images.
    """

    def __init__(self, width: int = 32, depth: int = 3, steps: int = 100, classes: int = 10) -> None:
        super().__init__()
        self.net, self.steps = Denoiser(width, depth, steps, classes), steps
        self.register_buffer("rates", torch.linspace(1e-3, 0.1, steps))
        self.register_buffer("kept", torch.cumprod(1 - self.rates, 0))

    def forward(self, images: Tensor, labels: Tensor, times: Tensor | None = None) -> Tensor:
        if times is not None:
            found: Tensor = self.net(images, times, labels)
            return found
        times = torch.randint(self.steps, labels.shape, device=labels.device)
        noise = torch.randn_like(images)
        kept = self.kept[times][:, None, None]
        noisy = kept.sqrt() * images + (1 - kept).sqrt() * noise
        return F.mse_loss(self.net(noisy, times, labels), noise)
