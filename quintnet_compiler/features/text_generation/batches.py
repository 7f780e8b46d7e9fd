"""A whole batch of prompts, as ``generate`` takes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core.errors import InputError


def prompts_of(ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the tokens of each row of ``ids`` [rows, length], which may be padded on the left.

    Raises:
        InputError: QN102 if they are no prompts.
    """
    if ids.dim() != 2 or ids.dtype is not torch.int64 or not ids.numel():
        raise InputError("QN102", f"prompts are {tuple(ids.shape)} {ids.dtype}", fix="pass int64 ids [rows, length]")
    seen = SHIPPED.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if seen.shape != ids.shape:
        shapes = f"{tuple(seen.shape)} for prompts of {tuple(ids.shape)}"
        raise InputError("QN102", f"attention_mask is {shapes}", fix="pass one number for each id")
    if not bool(seen[:, -1].all()) or bool((seen[:, 1:] < seen[:, :-1]).any()):
        raise InputError("QN102", "a prompt has padding behind tokens", fix='use padding_side="left" in the tokenizer')
    return [row[tokens] for row, tokens in zip(ids, seen, strict=True)]


def joined(ids: Tensor, prompts: Sequence[Tensor], texts: Sequence[Tensor], then: int) -> Tensor:
    """Return ``ids`` with the new tokens of each row appended, and ``then`` after its end."""
    added = [text[len(prompt) :] for prompt, text in zip(prompts, texts, strict=True)]
    most = max(map(len, added))
    new = SHIPPED.stack([F.pad(row, (0, most - len(row)), value=then) for row in added])
    return SHIPPED.cat([ids, new.to(ids.device)], 1)
