"""Frozen models, of which small additional parts are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .decoders import GPT
from .entry import COMMON, GROUPED, NO_DROPOUT, Entry

SPLIT = ("q_proj", "v_proj", "query", "value")  # linear layers that get additions


class LowRank(nn.Module):
    """A linear layer and a product of two narrow ones (Hu et al. 2021, LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.layer, self.scale = layer, alpha / rank
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + self.scale * self.up(self.down(x))
        return found


class Scaled(nn.Module):
    """A linear layer whose results are scaled, each by a number of its own (Liu et al. 2022, IA3)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * self.scale
        return found


class Prompted(nn.Module):
    """A frozen model, before whose text are vectors that are trained (Lester et al. 2021, prompt tuning)."""

    def __init__(self, model: Any, tokens: int = 4) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.prompt = nn.Parameter(torch.zeros(tokens, model.config.n_embd))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        rows, tokens = len(input_ids), len(self.prompt)
        text = self.model.get_input_embeddings()(input_ids)
        return self.model(
            inputs_embeds=torch.cat([self.prompt.expand(rows, -1, -1), text], 1),
            attention_mask=torch.cat([attention_mask.new_ones(rows, tokens), attention_mask], 1),
            labels=torch.cat([labels.new_full((rows, tokens), -100), labels], 1),
        )


def _with(addition: type[nn.Module], model: Any) -> Any:
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if name in SPLIT:
                setattr(parent, name, addition(layer))
    return model


def low_rank(model: Any) -> Any:
    return _with(LowRank, model)


def scaled(model: Any) -> Any:
    return _with(Scaled, model)


ADAPTERS: Mapping[str, Entry] = {
    "LoRA of Llama": Entry("LlamaForCausalLM", GROUPED, prepare=low_rank, brief=True),
    "LoRA of BERT": Entry("BertForMaskedLM", {**COMMON, **NO_DROPOUT}, prepare=low_rank, brief=True),
    "IA3 of Llama": Entry("LlamaForCausalLM", GROUPED, prepare=scaled, brief=True),
    "prompt tuning of GPT-2": Entry("GPT2LMHeadModel", GPT, prepare=Prompted, brief=True),
}
