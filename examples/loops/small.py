"""What the examples of this folder share: a small Llama, texts with a pattern to learn, and the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

import quintnet

VOCABULARY = 32


def language_model() -> Any:
    """A Llama of two layers, the same on every rank."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)
    return transformers.LlamaForCausalLM(config)


class Texts(torch.utils.data.Dataset[Any]):
    """Rows in which each token is the one before plus a step, with a few errors; labels begin at different places."""

    def __init__(self, rows: int, length: int = 16, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(VOCABULARY, (rows, 1), generator=generator)
        step = torch.randint(1, 4, (rows, 1), generator=generator)
        self.ids = (first + step * torch.arange(length)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        labels = self.ids[row].clone()
        labels[: row % 5] = -100
        return {"input_ids": self.ids[row], "labels": labels}


def mesh_of(text: str) -> quintnet.Mesh:
    """``dp=2,tp=2`` as a mesh."""
    return quintnet.Mesh(**{name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))})


def main(description: str | None, run: Callable[..., Any], **flags: Any) -> None:
    """``run(mesh, **flags)`` on a process for each rank, under ``quintnet.launch`` or torchrun."""
    options = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    options.add_argument("--mesh", default="dp=2", help="axes and sizes: dp=2, tp=2, pp=2, dp=2,tp=2")
    for name, value in flags.items():
        options.add_argument(f"--{name}", default=value, type=type(value))
    given = vars(options.parse_args())
    mesh = mesh_of(given.pop("mesh"))
    results = quintnet.launch(run, mesh.size, args=(mesh, *given.values()), timeout=600)
    if os.environ.get("RANK", "0") == "0":  # torchrun runs this on each rank
        print(next(x for x in results if x is not None))
