"""flex_attention in compiled programs: gradients of every layout beside a dense formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import quintnet

torch.set_num_threads(1)
ROWS, LENGTH = 4, 16


def _causal(documents: Tensor, lengths: Tensor) -> Callable[..., Any]:
    return lambda b, h, q, k: q >= k


def _packed(documents: Tensor, lengths: Tensor) -> Callable[..., Any]:
    return lambda b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k])


def _chunks(documents: Tensor, lengths: Tensor) -> Callable[..., Any]:
    return lambda b, h, q, k: (q // 6 == k // 6) & (q - k < 4) & (q >= k)


def _prefix(documents: Tensor, lengths: Tensor) -> Callable[..., Any]:
    return lambda b, h, q, k: (q >= k) | (k < lengths[b])


def _padded(documents: Tensor, lengths: Tensor) -> Callable[..., Any]:
    return lambda b, h, q, k: k < lengths[b]


MASKS = {"causal": _causal, "packed": _packed, "chunks": _chunks, "prefix": _prefix, "padded": _padded}


class Flex(nn.Module):
    """One layer with two heads of queries for each of keys; ``dense``: all scores, without flex_attention."""

    def __init__(self, mask: str, *, dense: bool = False, **options: Any) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(16, 64), nn.Linear(32, 8)
        self.mask, self.dense, self.options = MASKS[mask], dense, options

    def forward(self, x: Tensor, documents: Tensor, lengths: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in self.qkv(x).split([32, 16, 16], -1))
        mask = self.mask(documents, lengths)
        if self.dense:
            seen = create_mask(mask, rows, 1, length, length, device="cpu")
            k, v = (y.repeat_interleave(2, 1) for y in (k, v))
            scores = (q @ k.mT / 8**0.5).masked_fill(~seen, float("-inf"))
            y = scores.softmax(-1) @ v
        else:
            blocks = create_block_mask(mask, rows, None, length, length, device=str(x.device))
            y = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True, **self.options)
        return self.head(y.transpose(1, 2).flatten(2)).square().mean()


def _batch() -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, LENGTH, 16, generator=dice, dtype=torch.float64)
    return x, (torch.rand(ROWS, LENGTH, generator=dice) < 0.2).cumsum(1), torch.tensor([5, 16, 1, 9])


LAYOUTS: dict[str, tuple[quintnet.Mesh, dict[str, Any]]] = {
    "ring": (quintnet.Mesh(cp=2), {"context": "ring"}),
    "tensor and data": (quintnet.Mesh(dp=2, tp=2), {"microbatches": 2, "zero": 3}),
    "gathered": (quintnet.Mesh(cp=2), {"context": "all_gather", "attention_tile_bytes": 256}),
    "ulysses": (quintnet.Mesh(dp=2, cp=2), {"context": "ulysses", "zero": 2}),
    "pipeline": (quintnet.Mesh(pp=2, cp=2), {"microbatches": 4, "context": "ring"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_all_scores(layout: str, mask: str) -> None:
    mesh, options = LAYOUTS[layout]
    torch.manual_seed(0)
    model, dense = Flex(mask).double(), Flex(mask, dense=True).double()
    dense.load_state_dict(model.state_dict())
    program = quintnet.compile(model, mesh, _batch(), **options)
    loss = program.step(_batch())
    expected = dense(*_batch())
    expected.backward()
    assert abs(float(loss) - float(expected)) < 1e-12
    for name, parameter in model.named_parameters():
        wanted, grad = dense.get_parameter(name).grad, parameter.grad
        assert wanted is not None and grad is not None
        found = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_verify_compares_with_the_module_though_it_has_no_backward_here() -> None:
    torch.manual_seed(0)
    program = quintnet.compile(Flex("packed").double(), quintnet.Mesh(cp=2), _batch(), context="ring")
    assert "ring_attention" in program.ranks[0].forward.code and "comm.all_gather" not in program.ranks[0].forward.code
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "reason"),
    [({"score_mod": lambda score, b, h, q, k: score * 2}, "score_mod"), ({"return_lse": True}, "return_lse")],
    ids=["score_mod", "return_lse"],
)
def test_what_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(quintnet.CompileError, match=f"QN105[^!]*{reason}[^!]*test_flex_attention"):
        quintnet.compile(Flex("causal", **options).double(), quintnet.Mesh(cp=2), _batch())


class TwoAhead(Flex):
    def __init__(self) -> None:
        super().__init__("causal")
        self.mask = lambda documents, lengths: lambda b, h, q, k: q + 2 >= k


def test_a_mask_that_is_not_followed_says_what_is() -> None:
    with pytest.raises(quintnet.CompileError, match=r"QN105[^!]*keys that are some places ahead[^!]*q >= k"):
        quintnet.compile(TwoAhead().double(), quintnet.Mesh(cp=2), _batch())
