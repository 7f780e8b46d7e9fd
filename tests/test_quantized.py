"""Frozen weights that are stored as integers: what torchao and bitsandbytes compute, on any layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.core.annotations import value

WIDTH = 64


class Adapted(nn.Module):
    """Two quantised layers, before and between which low-rank additions are trained."""

    def __init__(self, quantise: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False))
        quantise(self.body)
        self.body.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + self.up(self.down(x)))  # type: ignore[no-any-return]


def torchao_int8(body: nn.Module) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(body, torchao.Int8WeightOnlyConfig())


def torchao_int4(body: nn.Module) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(body, torchao.IntxWeightOnlyConfig(torch.int4, torchao.PerGroup(32)))


def bitsandbytes(kind: str, **options: Any) -> Callable[[nn.Module], None]:
    def quantise(body: Any) -> None:
        bnb = pytest.importorskip("bitsandbytes")
        for name, layer in list(body.named_children()):
            if isinstance(layer, nn.Linear):
                made = bnb.nn.Linear4bit(
                    layer.in_features, layer.out_features, layer.bias is not None, quant_type=kind, **options
                )
                made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type=kind, module=made)
                if layer.bias is not None:
                    made.bias = layer.bias
                setattr(body, name, made.to("cpu"))

    return quantise


KINDS = {
    "torchao int8": torchao_int8,
    "torchao int4 in groups": torchao_int4,
    "nf4": bitsandbytes("nf4"),
    "fp4": bitsandbytes("fp4", compute_dtype=torch.float32),
}
LAYOUTS: list[tuple[quintnet.Mesh, dict[str, Any]]] = [
    (quintnet.Mesh(dp=2), {"zero": 3}),
    (quintnet.Mesh(tp=2), {}),
    (quintnet.Mesh(pp=2, tp=2), {"microbatches": 2}),
    (quintnet.Mesh(pp=2, dp=2), {"microbatches": 2, "zero": 2, "recompute": "full"}),
]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def check(kind: str, mesh: quintnet.Mesh, **options: Any) -> quintnet.CompiledProgram:
    model = Adapted(KINDS[kind])
    expected = F.mse_loss(model(batch()[0]), batch()[1])
    expected.backward()
    gradients = [p.grad.clone() for p in (model.down.weight, model.up.weight) if p.grad is not None]
    model.zero_grad()
    program = quintnet.compile(quintnet.unpack_quantized(model), mesh, batch(), loss_fn=F.mse_loss, **options)
    torch.testing.assert_close(program.step(batch()).detach(), expected.detach(), rtol=1e-6, atol=1e-7)
    for p, known in zip((model.down.weight, model.up.weight), gradients, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), known, rtol=1e-5, atol=1e-7)  # type: ignore[union-attr]
    return program


@pytest.mark.parametrize("kind", KINDS)
def test_unpacked_layers_compute_the_same_bits(kind: str) -> None:
    model = Adapted(KINDS[kind])
    plain = copy.deepcopy(model)
    known, size = model(batch()[0]), sum(p.numel() * p.element_size() for p in model.body.parameters())
    quintnet.unpack_quantized(model)
    assert torch.equal(model(batch()[0]), known)
    weight = model.body[0].weight
    found = weight if type(weight) is Tensor else weight.dequantize()  # type: ignore[operator]
    assert found.shape == (2 * WIDTH, WIDTH)
    assert all(p.dtype in (torch.int8, torch.uint8, torch.float32) for p in model.body.parameters()) and size > 0
    with pytest.raises(quintnet.CompileError, match=r"QN105[\s\S]*body.0.weight[\s\S]*unpack_quantized"):
        quintnet.compile(plain, quintnet.Mesh(dp=2), batch(), loss_fn=F.mse_loss)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "layout"), [("torchao int8", 1), ("nf4", 2)])
def test_quantised_layers_on_layouts(kind: str, layout: int) -> None:
    mesh, options = LAYOUTS[layout]
    check(kind, mesh, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_all_quantised_layers_on_all_layouts(kind: str, layout: int) -> None:
    mesh, options = LAYOUTS[layout]
    check(kind, mesh, **options)


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_ranks_gather_bytes_and_keep_no_weight_for_the_backward(zero: int) -> None:
    program = check("nf4", quintnet.Mesh(dp=2), zero=zero)
    backward = program.ranks[0].stages[0].backward.module
    weights = WIDTH * 2 * WIDTH
    kept = [value(n) for n in backward.graph.nodes if n.op == "placeholder" and n.name != "comm"]
    assert not any(x.is_floating_point() and x.numel() >= weights for x in kept), "a weight was kept"
    assert any(x.dtype == torch.uint8 for x in kept)
    gathers = [line for line in backward.code.splitlines() if "gather" in line and "comm." in line]
    assert any("packed" in line for line in gathers) == (zero == 3)
    assert bool(gathers) == (zero == 3)


def test_blocks_that_do_not_divide_rows_are_followed() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(24, 16, quant_type="nf4").to("cpu")  # 384 values in 6 blocks of 64
    x, known = torch.randn(4, 24), None
    known = layer(x)
    model = quintnet.unpack_quantized(nn.Sequential(layer))
    assert torch.equal(model(x), known)
    model = nn.Sequential(model, nn.Linear(16, 16))
    unsplit = copy.deepcopy(model)
    program = quintnet.compile(model, quintnet.Mesh(tp=2), (x, torch.ones(4, 16)), loss_fn=F.mse_loss)
    torch.testing.assert_close(
        program.step((x, torch.ones(4, 16))).detach(), F.mse_loss(unsplit(x), torch.ones(4, 16)).detach()
    )


def test_other_quantised_weights_are_refused_and_nothing_is_changed() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    eight = nn.Sequential(bnb.nn.Linear8bitLt(8, 8, has_fp16_weights=False).to("cpu"))
    before = eight[0]
    for refused in (quintnet.unpack_quantized, lambda m: quintnet.compile(m, quintnet.Mesh(dp=2), batch())):
        with pytest.raises(quintnet.CompileError, match=r"QN105[\s\S]*0.weight[\s\S]*8 bits"):
            refused(eight)  # type: ignore[operator]
    assert eight[0] is before
    torchao = pytest.importorskip("torchao.quantization")
    floats = nn.Sequential(nn.Linear(16, 16))
    torchao.quantize_(floats, torchao.Float8WeightOnlyConfig())
    with pytest.raises(quintnet.CompileError, match=r"QN105[\s\S]*without integers"):
        quintnet.unpack_quantized(floats.requires_grad_(False))
    table = nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 8))
    torchao.quantize_(
        table, torchao.IntxWeightOnlyConfig(torch.int8), lambda module, name: isinstance(module, nn.Embedding)
    )
    with pytest.raises(quintnet.CompileError, match=r"QN105[\s\S]*0.weight"):
        quintnet.unpack_quantized(table.requires_grad_(False))


@pytest.mark.slow
def test_peft_on_quantised_layers() -> None:
    """QLoRA as it is written: quantise, add adapters, unpack."""
    peft = pytest.importorskip("peft")
    model = Adapted(KINDS["nf4"])
    targets = peft.LoraConfig(r=4, target_modules=["body.0", "body.2"], use_dora=True)
    wrapped = peft.get_peft_model(model, targets)
    for p in wrapped.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.1)
    expected = F.mse_loss(wrapped(batch()[0]), batch()[1])
    expected.backward()
    known = {name: p.grad.clone() for name, p in wrapped.named_parameters() if p.grad is not None}
    wrapped.zero_grad()
    quintnet.unpack_quantized(wrapped)
    assert torch.equal(F.mse_loss(wrapped(batch()[0]), batch()[1]), expected)
    program = quintnet.compile(wrapped, quintnet.Mesh(tp=2), batch(), loss_fn=F.mse_loss)
    program.step(batch())
    found = {name: p.grad.full_tensor() for name, p in wrapped.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, known, rtol=1e-5, atol=1e-7)
