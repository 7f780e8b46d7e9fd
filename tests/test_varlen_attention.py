"""varlen_attn in compiled programs: gradients of every layout beside a dense formula in float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintnet

varlen = pytest.importorskip("torch.nn.attention.varlen")  # PyTorch 2.10

torch.set_num_threads(1)
ROWS, LENGTH = 2, 12
WINDOWS: dict[str, tuple[int, int]] = {"all": (-1, -1), "causal": (-1, 0), "window": (3, 0)}


class Packed(nn.Module):
    """Two layers over tokens [length, width], or over rows of them that are one sequence."""

    def __init__(self, window: tuple[int, int], *, dense: bool = False, **options: Any) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.head, self.window, self.dense, self.options = nn.Linear(16, 8), window, dense, options

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        for qkv in self.qkv:
            q, k, v = (y.reshape(-1, 2, 8) for y in qkv(x).chunk(3, -1))
            if self.dense:
                y = self._attend(q, k, v, ends)
            else:
                y = varlen.varlen_attn(q, k, v, ends, ends, LENGTH, LENGTH, window_size=self.window, **self.options)
            x = x + y.reshape(x.shape)
        return self.head(x).square().mean()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        at = torch.arange(len(q))
        documents = (at[:, None] >= ends[1:]).sum(-1)
        seen = documents[:, None] == documents
        left, right = self.window
        if right == 0:
            seen = seen & (at[:, None] >= at)
        if left >= 0:
            seen = seen & (at[:, None] - at <= left)
        scores = torch.einsum("qhd,khd->hqk", q, k) * 8**-0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


LAYOUTS: dict[str, tuple[quintnet.Mesh, dict[str, Any]]] = {
    "tensor": (quintnet.Mesh(tp=2), {}),
    "pipeline": (quintnet.Mesh(pp=2, tp=2), {"microbatches": 1}),
    "ring": (quintnet.Mesh(cp=2), {"context": "ring", "microbatches": 1}),
    "data": (quintnet.Mesh(dp=2), {"microbatches": 1, "zero": 3}),
    "gathered": (quintnet.Mesh(cp=2), {"context": "all_gather", "microbatches": 1}),
}


def _batch(rows: bool) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, LENGTH, 16, generator=dice, dtype=torch.float64)
    return (x if rows else x[0]), torch.tensor([0, 5, 6, 12, *([15, 24] if rows else [])], dtype=torch.int32)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_a_dense_formula(layout: str, window: str, rows: bool) -> None:
    mesh, options = LAYOUTS[layout]
    torch.manual_seed(0)
    model, batch = Packed(WINDOWS[window]).double(), _batch(rows)
    dense = Packed(WINDOWS[window], dense=True).double()
    dense.load_state_dict(model.state_dict())
    program = quintnet.compile(model, mesh, batch, **options)
    loss, expected = program.step(batch), dense(*batch)
    expected.backward()
    assert abs(float(loss - expected)) < 1e-12
    known = dict(dense.named_parameters())
    for name, parameter in program.named_parameters():
        torch.testing.assert_close(parameter.grad, known[name].grad, rtol=0, atol=1e-12)
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


REFUSED: dict[str, tuple[tuple[int, int], dict[str, Any], str]] = {
    "ahead": ((2, 2), {}, "window_size=(2, 2) is not followed"),
    "only behind": ((2, -1), {}, "window_size=(2, -1) is not followed"),
    "logs": ((-1, 0), {"return_aux": varlen.AuxRequest(lse=True)}, "what return_aux asks for is not followed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_followed(case: str) -> None:
    window, options, words = REFUSED[case]
    with pytest.raises(quintnet.CompileError, match=re.escape(f"varlen_attn: {words}")) as caught:
        quintnet.compile(Packed(window, **options), quintnet.Mesh(tp=2), _batch(True))
    assert str(caught.value).startswith("QN105") and "test_varlen_attention.py" in str(caught.value)


def test_other_documents_of_keys() -> None:
    class Cross(nn.Module):
        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            y = varlen.varlen_attn(x, x, x, ends, ends + 0, LENGTH, LENGTH)
            assert isinstance(y, Tensor)
            return y.square().mean()

    batch = torch.randn(LENGTH, 2, 8, requires_grad=True), torch.tensor([0, 5, 12], dtype=torch.int32)
    with pytest.raises(quintnet.CompileError, match="documents of keys that may not be those of queries"):
        quintnet.compile(Cross(), quintnet.Mesh(dp=1), batch, training=False)


def test_microbatches_are_refused() -> None:
    """Documents of several rows are one sequence."""
    with pytest.raises(quintnet.CompileError, match="cannot be split into microbatches"):
        quintnet.compile(Packed((-1, 0)).double(), quintnet.Mesh(dp=1), _batch(True), microbatches=2)
