"""Which token follows, and when a text ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.torch_codegen import SHIPPED
from ...core.errors import CompileError
from ...core.rng import Key, uniform

SAMPLES = 2**32  # the operator whose random numbers these are: a model's own operators count from 0


@dataclass(frozen=True)
class Sampling:
    """The way in which the next token is chosen.

    Raises:
        CompileError: QN108 for values that mean nothing.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        wrong = None
        if not self.temperature > 0:
            wrong = f"temperature={self.temperature}", "use a number above 0, or do_sample=False"
        if self.top_k is not None and self.top_k < 1:
            wrong = f"top_k={self.top_k}", "use 1 or more"
        if self.top_p is not None and not 0 < self.top_p <= 1:
            wrong = f"top_p={self.top_p}", "use a number above 0, at most 1"
        if wrong:
            raise CompileError("QN108", wrong[0], fix=wrong[1])

    def choose(self, logits: Tensor, rows: Sequence[int], draws: Sequence[float]) -> list[int]:
        """Return the next token of each of these rows of logits [all, vocabulary].

        ``draws``: a number in [0, 1) for each row, where tokens are sampled.
        """
        if not self.do_sample:
            largest = logits.argmax(-1).tolist()
            return [largest[row] for row in rows]
        scores = logits[list(rows)].to("cpu", torch.float64) / self.temperature
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p is not None:
            ordered, order = scores.sort(descending=True)
            cumulative = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            dropped = SHIPPED.zeros_like(scores, dtype=torch.bool).scatter(1, order, cumulative >= self.top_p)
            scores = scores.masked_fill(dropped, -torch.inf)
        below = scores.softmax(-1).cumsum(-1)
        wanted = torch.tensor(draws, dtype=torch.float64)[:, None] * below[:, -1:]
        return SHIPPED.searchsorted(below, wanted, right=True).squeeze(1).tolist()


def draws_of(seed: int, text: int, count: int) -> list[float]:
    """The numbers in [0, 1) that decide the tokens of a text: no other text and no layout plays a part in them."""
    return uniform([SHIPPED.arange(count)], [count], Key(seed, text, SAMPLES), torch.float64).tolist()


@dataclass(frozen=True)
class Ends:
    """Tokens that end a text, and the one that follows."""

    ends: frozenset[int]
    then: int


def ends_of(model: nn.Module, eos: int | Sequence[int] | None, pad: int | None = None) -> Ends:
    """As given, or as the model's generation_config says."""
    config: Any = getattr(model, "generation_config", None)
    eos = getattr(config, "eos_token_id", None) if eos is None else eos
    pad = getattr(config, "pad_token_id", None) if pad is None else pad
    ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return Ends(frozenset(ends), pad if pad is not None else ends[0] if ends else 0)
