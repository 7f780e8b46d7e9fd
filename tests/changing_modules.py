"""Modules whose forward changes buffers and parameters, as people write them. Logits, or the loss itself."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from .frontier import Case

WIDTH, CLASSES, ROWS = 8, 5, 8


class _Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.last = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outside), nn.BatchNorm2d(outside, affine=False)])
        shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        self.shortcut = shortcut if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.last(h)) + self.shortcut(x))


class ResNet(nn.Module):
    """Residual blocks with BatchNorm2d."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.Sequential(_Residual(4, 4), _Residual(4, 8, 2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Volumes(nn.Module):
    """BatchNorm3d with a momentum of its own, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv3d(2, 4, 3, 1, 1), nn.BatchNorm3d(4, momentum=0.3, eps=1e-3)
        self.frozen, self.head = nn.BatchNorm3d(4).eval(), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.frozen(self.norm(self.conv(x))) ** 2).mean((2, 3, 4)))


class Styles(nn.Module):
    """InstanceNorm that keeps statistics, averages over rows; 1-d, and 2-d with a momentum of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, 1, 1), nn.InstanceNorm2d(4, track_running_stats=True)
        self.last = nn.InstanceNorm1d(4, momentum=0.3, affine=True, track_running_stats=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.norm(self.conv(x)).exp().flatten(2)).exp().mean(2))


class Twice(nn.Module):
    """One BatchNorm1d at two places: the second one reads what the first one wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.out = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.linear(self.norm(x))))


class Spectral(nn.Module):
    """A power iteration in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = spectral_norm(nn.Linear(WIDTH, 16)), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Codebook(nn.Module):
    """Vector quantization whose codes follow the batches (VQ-VAE-2, appendix A.1)."""

    def __init__(self, codes: int = 6) -> None:
        super().__init__()
        self.encode, self.decode, self.codes = nn.Linear(WIDTH, 4), nn.Linear(4, CLASSES), codes
        self.register_buffer("embed", torch.randn(codes, 4))
        self.register_buffer("size", torch.ones(codes))
        self.register_buffer("sums", self.embed.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        nearest = (z[:, None] - self.embed[None]).pow(2).sum(-1).argmin(-1)
        chosen = F.one_hot(nearest, self.codes).to(z.dtype)
        q = chosen @ self.embed
        if self.training:
            with torch.no_grad():
                self.size.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.t() @ z, alpha=0.1)
                total = self.size.sum()
                size = (self.size + 1e-5) / (total + self.codes * 1e-5) * total
                self.embed.copy_(self.sums / size[:, None])
        return self.decode(z + (q - z).detach())


class Counter(nn.Module):
    """Counts its calls; two buffers change places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("a", torch.zeros(CLASSES))
        self.register_buffer("b", torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.a, self.b = self.b * 1, self.a * 1
        return self.linear(x) * torch.exp(-0.1 * self.count) + self.a


class Recurrent(nn.Module):
    """Hidden state of each row, from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again, self.out = nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.register_buffer("hidden", torch.zeros(ROWS, 16))
        self.register_buffer("position", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.into(x) + self.again(self.hidden))
        self.hidden, self.position = h.detach(), self.position + 1
        return self.out(h)


class Memory(nn.Module):
    """A bank of the last outputs, written at a place that moves (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("bank", torch.zeros(4 * ROWS, CLASSES))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        bank = self.bank.clone()
        out = z + (z @ bank.t()).softmax(-1) @ bank
        with torch.no_grad():
            self.bank[(self.at + torch.arange(ROWS)) % len(bank)] = z.detach()
            self.at.copy_((self.at + ROWS) % len(bank))
        return out


class Follower(nn.Module):
    """An average of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("average", torch.zeros(CLASSES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * self.linear.weight.detach()
        return self.linear(x) + F.linear(x, self.average)


class Tokens(nn.Module):
    """Statistics over the tokens of all sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.training:
            self.mean = torch.lerp(self.mean, h.detach().mean((0, 1)), 0.1)
        return self.b(h - self.mean).mean(1)


class AverageLoss(nn.Module):
    """An average of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.linear(x), y)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss


class Clipped(nn.Module):
    """Weights that stay small: all of them before they are used, one by its ``data``; a part of one, by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.2, 0.2)
            self.a.weight.t().split(2)[1].mul_(0.5)
        self.a.bias.data = self.a.bias.data * 0.9
        self.b.weight.data.div_(torch.linalg.vector_norm(self.b.weight.detach()))
        return self.b(self.a(x).tanh()) + self.b.weight[:, 0].square()


class Teacher(nn.Module):
    """Momentum contrast (He et al. 2020): a second encoder is an average of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES)) for _ in "qk")
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x)
        with torch.no_grad():
            for mine, theirs in zip(self.query.parameters(), self.key.parameters(), strict=True):
                theirs.data = theirs.data * 0.9 + mine.data * 0.1
            k = self.key(x)
        return q - 0.5 * k


class Shortened(nn.Module):
    """An embedding whose rows are no longer than one: those that a batch looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(12, WIDTH, max_norm=1.0), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed((x * 3).long().clamp(-5, 5) + 6).mean(1))


SHAPES: Mapping[type[nn.Module], tuple[int, ...]] = types.MappingProxyType(
    {ResNet: (3, 8, 8), Volumes: (2, 4, 4, 4), Styles: (2, 4, 4), Tokens: (6, WIDTH)}
    | dict.fromkeys(
        (Twice, Spectral, Codebook, Counter, Recurrent, Memory, Follower, AverageLoss, Clipped, Teacher, Shortened),
        (WIDTH,),
    )
)
# those that microbatches leave alone: what they change does not depend on the rows, or by sums over them
BY_ROWS = (Spectral, Counter, Recurrent, Follower, Styles, AverageLoss, Clipped, Teacher)


def changing(kind: type[nn.Module], **more: Any) -> Case:
    """A module of ``kind``, and how it trains."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        dice = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, *SHAPES[kind], generator=dice)
        return x, torch.randint(CLASSES, (ROWS,), generator=dice)

    return Case(kind, batch, None if kind is AverageLoss else F.cross_entropy, **more)
