"""A small language model and texts for it, which Trainers of other libraries train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WORDS, LENGTH = 32, 12


class Texts(torch.utils.data.Dataset[Any]):
    """Rows of a pattern with noise, of which some labels do not count."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        pattern = (torch.arange(LENGTH) + torch.arange(rows)[:, None]) % WORDS
        noise = torch.randint(WORDS, pattern.shape, generator=generator)
        self.ids = torch.where(torch.rand(pattern.shape, generator=generator) < 0.3, noise, pattern)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        labels = self.ids[row].clone()
        labels[: row % 5] = -100
        return {"input_ids": self.ids[row], "labels": labels}


def language_model() -> Any:
    """Return a Llama of two layers, always the same."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))


def gpt2() -> Any:
    """Return a GPT-2 of two layers, whose loss is of fewer labels than a Trainer counts."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **without))
