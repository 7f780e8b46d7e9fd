"""Three small models whose programs are kept as text. Lines of this file are in those texts: after a change here,
``make golden`` and look at the difference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintnet import expert_linear


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8, bias=False), nn.LayerNorm(8, bias=False)
        self.qkv, self.proj = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (2, 12)).transpose(1, 2)
        y = F.scaled_dot_product_attention(*heads.chunk(3, -1), is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2, bias=False)
        self.up, self.down = nn.Parameter(torch.ones(2, 16, 8)), nn.Parameter(torch.ones(2, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.softmax(self.router(x), -1).max(-1)
        hidden = F.gelu(expert_linear(x, chosen, self.up))
        return x + expert_linear(hidden, chosen, self.down) * weights.unsqueeze(-1)
