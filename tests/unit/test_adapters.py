"""Adapters and quantised weights, where neither peft nor torchao is needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quintnet
from quintnet_compiler.checkpoint.adapters import has_adapters
from quintnet_compiler.weights.adapters import is_peft, place_of
from quintnet_compiler.weights.quantized import FourBitLinear


def test_a_plain_module_has_no_adapters(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert not is_peft(nn.Linear(1, 1)) and not has_adapters(tmp_path, nn.Linear(1, 1))
    assert place_of("default") == "" and place_of("second") == "second"


def four_bits(block: int, width: int = 8, rows: int = 6) -> tuple[FourBitLinear, torch.Tensor]:
    """A layer as bitsandbytes stores it, and the weight that its bytes stand for, worked out one value at a time."""
    generator = torch.Generator().manual_seed(0)
    code = torch.linspace(-1, 1, 16)
    packed = torch.randint(256, (rows * width // 2, 1), generator=generator, dtype=torch.uint8)
    absmax = torch.rand(rows * width // block, generator=generator)
    state = SimpleNamespace(absmax=absmax, code=code, blocksize=block, dtype=torch.float32, nested=False)
    layer: Any = nn.Linear(width, rows)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    layer.weight.quant_state = state
    layer.compute_dtype, layer.compute_type_is_set = None, False
    places = [half for byte in packed.flatten().tolist() for half in (byte // 16, byte % 16)]
    values = [code[place] * absmax[i // block] for i, place in enumerate(places)]
    return FourBitLinear(layer), torch.stack(values).reshape(rows, width)


@pytest.mark.parametrize("block", [4, 8, 16])  # two in a row, one, and two rows in one
def test_bytes_are_looked_up_and_scaled_by_block(block: int) -> None:
    layer, weight = four_bits(block)
    assert torch.equal(layer.weight, weight)
    x = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(layer(x), F.linear(x, weight.double(), layer.bias.double()))


@pytest.mark.parametrize(
    ("mesh", "plan"), [({"tp": 2}, {}), ({"dp": 2}, {"zero": 3}), ({"pp": 2}, {"microbatches": 2})]
)
def test_packed_weights_train_what_is_around_them(mesh: dict[str, int], plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), four_bits(4)[0], nn.Tanh(), nn.Linear(6, 8)).double()
    for p in model[1].parameters():
        p.requires_grad_(False)
    x, y = torch.randn(4, 8).double(), torch.randn(4, 8).double()
    F.mse_loss(model(x), y).backward()
    known = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    program = quintnet.compile(model, quintnet.Mesh(**mesh), (x, y), loss_fn=F.mse_loss, **plan)
    program.step((x, y))
    found = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
    torch.testing.assert_close(found, known, rtol=1e-12, atol=1e-13)
