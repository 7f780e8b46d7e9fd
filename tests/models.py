"""Plain models, written for one device, that tests compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintnet import expert_linear
from quintnet_compiler.ops.attention.operator import attention

WIDTH, EXPERTS = 16, 4  # of a mixture


class MLP(nn.Module):
    """Residual MLP with a norm and a head."""

    def __init__(self, width: int = 16, hidden: int = 32, classes: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.ups = nn.ModuleList(nn.Linear(width, hidden) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(hidden, width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """Decoder with tied embedding and a loss that ignores labels of -100."""

    def __init__(self, vocab: int = 32, width: int = 32, heads: int = 4, depth: int = 3, length: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class ViT(nn.Module):
    """Vision Transformer with a class token."""

    def __init__(self, width: int = 32, heads: int = 4, depth: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Encoder(nn.Module):
    """torch's own encoder layers."""

    def __init__(self, width: int = 32, heads: int = 4, depth: int = 2, classes: int = 6) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(dim=1))


class CNN(nn.Module):
    """Residual convolutions with a long skip."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(2, width) for _ in range(4))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.relu(norm(conv(x)))
        x = F.max_pool2d(x + first, 2)
        return self.head(x.mean(dim=(2, 3)))


class Mixture(nn.Module):
    """Top-2 routing to stacked experts. ``skew`` sends most rows to the first expert, and none to the last."""

    def __init__(self, skew: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.2)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH) * 0.2) if bias else None
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.2)
        self.register_buffer("skew", skew * torch.tensor([2.0, 1.0, 0.0, -2.0]))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        weights, chosen = torch.topk(torch.softmax(self.router(x) + self.skew, -1), 2)
        rows, ids = x.repeat_interleave(2, 0), chosen.flatten()
        gate, up = expert_linear(rows, ids, self.up, self.up_bias).chunk(2, -1)
        made = expert_linear(F.silu(gate) * up, ids, self.down)
        x = x + (made.view(-1, 2, WIDTH) * weights.unsqueeze(-1)).sum(1)
        return F.cross_entropy(self.head(x), labels)


class Packed(nn.Module):
    """Two layers of attention with ``mask`` in rows of several documents, which have ids."""

    def __init__(self, mask: str = "causal") -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mask = mask

    def forward(
        self, x: Tensor, documents: Tensor, padding: Tensor | None = None, groups: Tensor | None = None
    ) -> Tensor:
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind()
            y = attention(q, k, v, padding, documents, groups, scale=0.5, mask=self.mask)
            x = x + out(y.transpose(1, 2).flatten(2))
        return x.square().mean()


def document_ids(rows: list[list[int]]) -> Tensor:
    """Of the positions of rows that hold documents of these lengths."""
    return torch.stack([torch.repeat_interleave(torch.tensor(sizes)) for sizes in rows])


def _packed(rows: int) -> tuple[Tensor, Tensor]:
    sizes = [[64, 256, 64], [384], [10, 330, 44], [80, 70, 234]]
    return _floats(384, WIDTH)(rows), document_ids([sizes[row % len(sizes)] for row in range(rows)])


def _tokens(rows: int, length: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, length), generator=g)
    labels = torch.randint(0, vocab, (rows, length), generator=g)
    labels[0, : length // 2] = -100  # spread unevenly over ranks and microbatches
    labels[-1, 1:] = -100
    return ids, labels


def _llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**config, **changes}))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32, n_embd=32, n_layer=3, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, use_cache=False,
        )
    )  # fmt: skip


def _llama_in_double() -> nn.Module:
    """Llama with torch's own RMSNorm, which computes in the dtype of its input."""
    model = _llama()
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = nn.RMSNorm(32, 1e-6), nn.RMSNorm(32, 1e-6)
    model.model.norm = nn.RMSNorm(32, 1e-6)
    return model


def _next_token_loss(out: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@dataclass(frozen=True)
class Case:
    """A model, how to make a batch of any size, its loss, and the relative tolerance that float64 allows."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss_fn: Callable[..., Tensor] | None = None
    tolerance: float = 1e-9


def _floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _classes(count: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randint(0, count, (rows, *shape), generator=torch.Generator().manual_seed(2))


def _pair(x: Callable[[int], Tensor], y: Callable[[int], Tensor]) -> Callable[[int], Any]:
    return lambda rows: (x(rows), y(rows))


def _keyed(rows: int) -> dict[str, Tensor]:
    ids, labels = _tokens(rows, 8, 32)
    return {"input_ids": ids, "labels": labels}


CASES: dict[str, Case] = {
    "mlp": Case(MLP, _pair(_floats(16), _classes(8)), F.cross_entropy),
    "gpt": Case(GPT, lambda rows: _tokens(rows, 8, 32)),
    "vit": Case(ViT, _pair(_floats(1, 8, 8), _classes(10)), F.cross_entropy),
    "encoder": Case(Encoder, _pair(_floats(6, 32), _classes(6)), F.cross_entropy),
    "mixture": Case(Mixture, _pair(_floats(WIDTH), _classes(8))),
    "cnn": Case(CNN, _pair(_floats(3, 8, 8), _classes(5)), F.cross_entropy),
    # transformers computes these losses, and Llama's norms, in float32 whatever the model's dtype ...
    # it casts its logits to float32, in which ranks that split the vocabulary add up differently
    "hf_gpt2": Case(_gpt2, _keyed, tolerance=2e-6),
    "hf_llama": Case(_llama, _keyed, tolerance=2e-6),
    # ... and here in float64
    "hf_gpt2_double": Case(_gpt2, lambda rows: _tokens(rows, 8, 32), _next_token_loss),
    "hf_llama_double": Case(_llama_in_double, lambda rows: _tokens(rows, 8, 32), _next_token_loss),
}
OTHERS = {"packed": Case(Packed, _packed)}  # what only some layouts are for
EVERY = CASES | OTHERS


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same model at every call."""
    torch.manual_seed(0)
    model = EVERY[name].build().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases of zero and scales of one hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def reference(model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the unsplit model."""
    model.zero_grad(set_to_none=True)
    if isinstance(batch, dict):
        out = model(**batch)
    else:
        out = loss_fn(model(*batch[:-1]), batch[-1]) if loss_fn else model(*batch)
    loss = out if isinstance(out, Tensor) else out.loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def worst_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Largest relative gradient error: per-parameter max-norm, with a floor of 1e-3 of the largest gradient."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    floor = 1e-3 * max(float(g.abs().max()) for g in expected.values())
    errors = {
        name: float((found[name] - g).abs().max()) / max(float(g.abs().max()), floor) for name, g in expected.items()
    }
    name = max(errors, key=lambda n: errors[n])
    return errors[name], name
