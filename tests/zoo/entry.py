"""What an entry of the zoo is: a model of transformers, a tiny configuration, and batches that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCAB, LENGTH, IMAGE = 64, 8, 5  # the token that stands for an image


class InDouble(TorchFunctionMode):
    """Norms, softmax, rotary tables and losses that a model casts to float32 stay in float64, so that rounding hides
    nothing. It is entered around programs, too, which is refused for modes that are not torch's."""

    __module__ = "torch.overrides"

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made_meanwhile = func is torch.ops.aten._assert_tensor_metadata.default
        fake = (kwargs or {}).get("device") == "meta"  # made by torch for a tensor that there is
        if made_meanwhile or fake:
            return func(*args, **(kwargs or {}))
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {key: torch.float64 if a is torch.float32 else a for key, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Entry:
    """A model of transformers.

    Attributes:
        config: all of its configuration that is not transformers' default.
        kind: the inputs it takes, of :data:`BATCHES`.
        prepare: what is done to the model before it is compiled: how its parts are called, what is trained.
        rows_apart: whether its loss is a sum over rows, so that it has microbatches.
        brief: whether it is measured on :data:`..layouts.BRIEF` only.
    """

    architecture: str
    config: Mapping[str, Any]
    kind: str = "decoder"
    prepare: Callable[[Any], nn.Module] | None = None
    rows_apart: bool = True
    brief: bool = False

    def build(self) -> nn.Module:
        """The model in float64, without dropout, with all parameters away from zero."""
        import transformers

        model_class = getattr(transformers, self.architecture)
        torch.manual_seed(0)
        config = model_class.config_class(**self.config)
        config._experts_implementation = "eager"  # the others have no float64
        made = model_class(config)
        model: nn.Module = made if self.prepare is None else self.prepare(made)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        return model.double()

    def batch(self, rows: int) -> dict[str, Tensor]:
        return BATCHES[self.kind](rows)


def _ids(rows: int, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def _labels(rows: int, length: int = LENGTH) -> Tensor:
    labels = _ids(rows, length, seed=1)
    labels[0, : length // 2] = -100  # spread unevenly over ranks and microbatches
    labels[-1, 2:] = -100
    return labels


def _padding(rows: int, length: int = LENGTH) -> Tensor:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[1::2, length - 3 :] = 0
    return mask


def _images(rows: int, *shape: int) -> Tensor:
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def _transcripts(rows: int) -> Tensor:
    """Three to five labels in each row, ended by what is ignored."""
    found = _ids(rows, 5, seed=4) % 28 + 3
    for row in range(rows):
        found[row, 3 + row % 3 :] = -100
    return found


def _captioned(rows: int, tokens: int, *more: str) -> dict[str, Tensor]:
    """Text in which the first ``tokens`` after the first one stand for an image."""
    ids = _ids(rows, tokens + 6).clamp(min=8)
    ids[:, 1 : 1 + tokens] = IMAGE
    found = {
        "input_ids": ids, "attention_mask": _padding(rows, tokens + 6), "labels": _labels(rows, tokens + 6),
        "pixel_values": _images(rows, 3, 16, 16),
    }  # fmt: skip
    return {**found, **{name: (ids == IMAGE).long() for name in more}}


def _patches(rows: int) -> dict[str, Tensor]:
    """An image of 4 x 4 patches in each row, of which 2 x 2 become a token, with their places in height and width."""
    found = _captioned(rows, 4)
    text = torch.arange(10).expand(3, 10).clone()
    text[:, 1:5] = torch.tensor([[1, 1, 1, 1], [1, 1, 2, 2], [1, 2, 1, 2]])
    text[:, 5:] -= 2
    places = {"position_ids": text.repeat(rows, 1, 1), "pixel_values": _images(rows, 16, 96)}
    return {**found, **places}


BATCHES: Mapping[str, Callable[[int], dict[str, Tensor]]] = {
    "decoder": lambda rows: {"input_ids": _ids(rows), "attention_mask": _padding(rows), "labels": _labels(rows)},
    "causal": lambda rows: {"input_ids": _ids(rows), "labels": _labels(rows)},
    "classes": lambda rows: {
        "input_ids": _ids(rows), "attention_mask": _padding(rows), "labels": torch.arange(rows) % 5,
    },
    "seq2seq": lambda rows: {"input_ids": _ids(rows), "attention_mask": _padding(rows), "labels": _labels(rows)},
    "image": lambda rows: {"pixel_values": _images(rows, 3, 16, 16), "labels": torch.arange(rows) % 5},
    "picture": lambda rows: {"pixel_values": _images(rows, 3, 32, 32), "labels": torch.arange(rows) % 5},
    "segments": lambda rows: {
        "pixel_values": _images(rows, 3, 32, 32), "labels": _ids(rows, 32 * 32, seed=3).view(rows, 32, 32) % 5,
    },
    "video": lambda rows: {"pixel_values": _images(rows, 2, 3, 16, 16), "labels": torch.arange(rows) % 5},
    "image and text": lambda rows: _captioned(rows, 16),
    "pooled image and text": lambda rows: _captioned(rows, 4),
    "typed image and text": lambda rows: _captioned(rows, 4, "token_type_ids"),
    "patches and text": _patches,
    "sound": lambda rows: {"input_values": _images(rows, 400), "labels": torch.arange(rows) % 5},
    "transcribed": lambda rows: {"input_values": _images(rows, 400), "labels": _transcripts(rows)},
    "spectrogram": lambda rows: {"input_values": _images(rows, 32, 16), "labels": torch.arange(rows) % 5},
    "series": lambda rows: {"past_values": _images(rows, 16, 3), "future_values": _images(rows, 4, 3)},
    "speech": lambda rows: {"input_features": _images(rows, 16, 32), "labels": _labels(rows)},
    "pairs": lambda rows: {
        "input_ids": _ids(rows), "pixel_values": _images(rows, 3, 16, 16), "attention_mask": _padding(rows),
        "return_loss": True,
    },
}  # fmt: skip

COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
