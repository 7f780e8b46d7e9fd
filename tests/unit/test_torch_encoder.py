"""Parts of an encoder layer that torch's kernel of evaluation takes for others: refused, and not computed otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.compat.torch_settings import part_left_out


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def _layer(first: Any = "relu", **parts: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, first, batch_first=True, dtype=torch.float64)
    for name, part in parts.items():
        setattr(layer, name, part)
    return layer


CASES: dict[str, tuple[Callable[[], nn.TransformerEncoderLayer], str]] = {
    "plain": (_layer, ""),
    "gelu": (lambda: _layer("gelu"), ""),
    "a module": (lambda: _layer(nn.ReLU()), ""),
    "no kernel for it": (lambda: _layer(F.silu), ""),
    "no kernel any more": (lambda: _layer(activation=F.silu, activation_relu_or_gelu=0), ""),
    "replaced": (lambda: _layer(activation=F.silu), "activation"),
    "approximate": (lambda: _layer(nn.GELU(approximate="tanh")), "activation"),
    "linear": (lambda: _layer(linear1=Doubled(8, 16, dtype=torch.float64)), "linear1"),
    "method": (lambda: _layer(_ff_block=lambda x: x * 2), "_ff_block"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_kernel_leaves_out(case: str) -> None:
    make, part = CASES[case]
    layer, x = make(), torch.randn(2, 3, 8, dtype=torch.float64)
    assert part_left_out(layer, training=False) == part
    assert part_left_out(layer, training=True) == ""
    layer.eval()
    with torch.no_grad():
        by_kernel = layer(x)
    assert torch.allclose(by_kernel, layer(x), atol=1e-9) == (part == "")


def test_evaluation_is_refused_until_the_layer_computes_with_its_parts() -> None:
    layer, batch = _layer(activation=F.silu), (torch.randn(4, 3, 8).double(), torch.randn(4, 3, 8).double())
    program = quintnet.compile(layer, quintnet.Mesh(dp=2), batch, loss_fn=F.mse_loss)
    program.step(batch)
    with pytest.raises(quintnet.CompileError, match=r"QN105(.|\n)*another 'activation'"):
        program.evaluate(batch)
    layer.activation_relu_or_gelu = 0
    with torch.no_grad():
        expected = F.mse_loss(layer.eval()(batch[0]), batch[1])
    assert abs(float(program.evaluate(batch)) - float(expected)) < 1e-9
    frozen = _layer(activation=F.silu).requires_grad_(False).eval()
    assert part_left_out(frozen, training=True) == "activation"
