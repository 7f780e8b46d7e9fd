"""A Hugging Face GPT-2 on Shakespeare's bytes, for a training run described in YAML: see gpt2_shakespeare.yaml.

With ``model_args: {folder: PATH}`` it begins with the weights of a checkpoint on this disk instead of new ones.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset

import quintnet

TEXT = Path(__file__).parent / "data" / "shakespeare.txt"


class Windows(Dataset[dict[str, Tensor]]):
    """Runs of ``length`` tokens, one after the other. GPT-2 shifts the labels itself."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def build(length: int = 64, layers: int = 4, folder: str | None = None) -> quintnet.TrainTask:
    """The model on the meta device, its text in two parts, and its first values."""
    tokens = torch.tensor(list(TEXT.read_bytes()))
    held_out = len(tokens) // 10
    if folder is None:
        config = transformers.GPT2Config(
            vocab_size=256, n_positions=length, n_embd=128, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0
        )
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    else:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    config.use_cache = False
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)

    def start(program: quintnet.CompiledProgram) -> None:
        if folder is not None:
            program.load_pretrained(folder)
            return
        program.initialize(
            {
                "*.weight": quintnet.Normal(0.02),
                "*.c_proj.weight": quintnet.Normal(0.02 / math.sqrt(2 * layers)),
                "*.ln_*.weight": quintnet.Constant(1.0),
                "*.bias": quintnet.Constant(0.0),
            }
        )

    return quintnet.TrainTask(
        model, Windows(tokens[:-held_out], length), Windows(tokens[-held_out:], length), perplexity=True, start=start
    )
