"""The model that every benchmark trains: a plain Llama-style decoder, written for one device.

Sizes, weights and data are deterministic, so that every peer on every rank starts from the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Size:
    """The dimensions of a model and of its input."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    sequence: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


SIZES = {
    "tiny": Size(dim=64, layers=2, heads=4, kv_heads=2, hidden=192, vocab=256, sequence=64),
    "small": Size(dim=256, layers=4, heads=8, kv_heads=4, hidden=704, vocab=1024, sequence=64),
    "medium": Size(dim=768, layers=8, heads=12, kv_heads=4, hidden=2048, vocab=2048, sequence=64),
}


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, written out as most model code has it."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotary_tables(sequence: int, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's rotation, both ``[sequence, head_dim]``."""
    frequencies = base ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(sequence).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of ``[..., sequence, head_dim]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Causal attention with rotary positions and grouped heads; ``[batch, heads, sequence, head_dim]``."""
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    groups = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, repeat_heads(k, groups), repeat_heads(v, groups), is_causal=True)


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """Each head ``groups`` times, next to each other."""
    batch, heads, sequence, head_dim = x.shape
    spread = x[:, :, None].expand(batch, heads, groups, sequence, head_dim)
    return spread.reshape(batch, heads * groups, sequence, head_dim)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        self.q = nn.Linear(size.dim, size.heads * size.head_dim, bias=False)
        self.k = nn.Linear(size.dim, size.kv_heads * size.head_dim, bias=False)
        self.v = nn.Linear(size.dim, size.kv_heads * size.head_dim, bias=False)
        self.o = nn.Linear(size.heads * size.head_dim, size.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        # -1 heads: under tensor parallelism a projection has only this rank's heads.
        q, k, v = (
            project(x).view(batch, sequence, -1, self.head_dim).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        mixed = attend(q, k, v, cos, sin)
        out: Tensor = self.o(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return out


class MLP(nn.Module):
    """The SwiGLU feed-forward half of a block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.dim, size.hidden, bias=False)
        self.up = nn.Linear(size.dim, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """A pre-norm decoder block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1 = RMSNorm(size.dim)
        self.attention = Attention(size)
        self.norm2 = RMSNorm(size.dim)
        self.mlp = MLP(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Llama(nn.Module):
    """Token ids ``[batch, sequence]`` to logits ``[batch, sequence, vocab]``; the head has its own weight."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(size.vocab, size.dim)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.dim)
        self.head = nn.Linear(size.dim, size.vocab, bias=False)
        cos, sin = rotary_tables(size.sequence, size.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        out: Tensor = self.head(self.norm(x))
        return out


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_model(size: Size) -> Llama:
    """A model with the same weights on every rank and every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Llama(size)


def make_batch(size: Size, rows: int, index: int) -> Batch:
    """Token ids and the ids that follow them: batch number ``index`` of an endless deterministic stream."""
    generator = torch.Generator().manual_seed(1000 + index)
    ids = torch.randint(size.vocab, (rows, size.sequence + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
