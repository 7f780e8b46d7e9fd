"""Sizes that do not divide their axis: nothing is dropped, nothing is wrong, and what runs whole is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quintnet

from .models import GPT
from .zoo import GROUPED, Entry, InDouble

torch.set_num_threads(1)


def _tokens(vocab: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, vocab, (8, length))
    return ids, ids.roll(-1, 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "axes", "length", "told"),
    [
        ({"heads": 3, "width": 24}, {"tp": 2}, 8, ""),  # attention splits the batch
        ({"vocab": 33}, {"tp": 2}, 8, ""),
        ({"vocab": 33}, {"tp": 2, "pp": 2}, 8, ""),
        ({}, {"cp": 2}, 7, "cp=2: "),
        ({}, {"cp": 3}, 8, "no dim of a sequence divides"),
        ({"depth": 5}, {"pp": 2}, 8, ""),
        ({"depth": 5}, {"pp": 4}, 8, ""),
        ({"depth": 1}, {"pp": 3}, 8, ""),
        ({"heads": 6, "width": 36}, {"tp": 4}, 7, ""),
    ],
    ids=str,
)
def test_sizes_that_do_not_divide(model: dict[str, int], axes: dict[str, int], length: int, told: str) -> None:
    batch = _tokens(model.get("vocab", 32), length)
    program = quintnet.compile(GPT(**model).double(), quintnet.Mesh(**axes), batch, microbatches=2)
    assert program.verify().ok
    assert told in "\n".join(program.unsplit) and bool(told) == bool(program.unsplit)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("heads", "groups", "ranks"), [(4, 1, 2), (4, 2, 4), (6, 3, 2), (6, 2, 4)])
def test_key_heads_that_do_not_divide(heads: int, groups: int, ranks: int) -> None:
    pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": 8 * heads}
    entry = Entry("LlamaForCausalLM", {**GROUPED, **sizes})
    with InDouble():
        program = quintnet.compile(entry.build(), quintnet.Mesh(tp=ranks), entry.batch(8))
        assert program.verify().ok
