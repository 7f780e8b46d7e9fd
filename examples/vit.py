"""A small Vision Transformer, written for one device: nothing here knows how it will be split."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention over all tokens of an image, with one fused projection for q, k and v."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(f"hidden size {hidden} does not divide into {heads} heads")
        self.hidden = hidden
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, hidden = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(self.hidden, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, tokens, hidden))
        return out


class MLP(nn.Module):
    """The feed-forward half of a block: four times wider inside, GELU between."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class VisionTransformer(nn.Module):
    """Square grey images, cut into square patches, to logits: ``[batch, size, size] -> [batch, classes]``."""

    def __init__(
        self, size: int, patch: int, hidden: int = 64, depth: int = 8, heads: int = 4, classes: int = 10
    ) -> None:
        super().__init__()
        if size % patch:
            raise ValueError(f"images of {size} x {size} do not divide into patches of {patch} x {patch}")
        self.patch = patch
        self.grid = size // patch
        self.embed = nn.Linear(patch * patch, hidden)
        self.positions = nn.Parameter(torch.empty(self.grid * self.grid, hidden))
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, classes)
        # As large as the embedded patches: with the usual 0.02, hundreds of steps pass before place counts.
        nn.init.normal_(self.positions, std=0.5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(self.patches(images)) + self.positions
        for block in self.blocks:
            x = block(x)
        # Mean pooling: no class token to carry, and every token gets a gradient.
        logits: Tensor = self.head(self.norm(x).mean(dim=1))
        return logits

    def patches(self, images: Tensor) -> Tensor:
        """Rows of patches in reading order: ``[batch, size, size] -> [batch, tokens, patch * patch]``."""
        batch, grid, patch = images.shape[0], self.grid, self.patch
        tiles = images.view(batch, grid, patch, grid, patch).transpose(2, 3)
        return tiles.reshape(batch, grid * grid, patch * patch)
