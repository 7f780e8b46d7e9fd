"""Linear layers in 8 bits: on every layout those of one rank, which are those that this file writes out in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.core.precision import Precision
from quintnet_compiler.driver import pipeline
from quintnet_compiler.features.fp8.eight_bits import RECIPES, Recipe

pytestmark = pytest.mark.usefixtures("shared_captures")

WIDTH, ROWS, LENGTH = 32, 8, 4
E4M3 = torch.float8_e4m3fn


class Block(nn.Module):
    def __init__(self, layer: type[nn.Linear], width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = layer(width, 2 * width), layer(width, 2 * width, bias=False)
        self.down = layer(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def net(layer: type[nn.Linear] = nn.Linear, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(layer, width), Block(layer, width), nn.Linear(width, 16)).double()


def batch(recipe: str = "") -> tuple[Tensor, Tensor]:
    """With sequences of two blocks, where a recipe has blocks."""
    width, length = sizes_of(recipe)
    torch.manual_seed(1)
    return torch.randn(ROWS, length, width).double(), torch.randn(ROWS, length, 16).double()


def sizes_of(recipe: str) -> tuple[int, int]:
    """The width of the model, one block if there are blocks and two inside, and the length of sequences."""
    along = RECIPES[recipe].along if recipe else None
    return along or WIDTH, 2 * along if along else LENGTH


# -- the same layers in plain PyTorch


def _rounded(x: Tensor, dim: int | tuple[int, ...] | None, recipe: Recipe, dtype: torch.dtype = E4M3) -> Tensor:
    """``x`` as 8-bit numbers with one scale along ``dim`` stand for it."""
    most = torch.finfo(dtype).max
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = largest.float().double().clamp(min=1e-12) / most
    scale = (torch.exp2(torch.log2(scale).ceil()) if recipe.power_of_two else scale).float()
    return (x / scale).clamp(-most, most).to(dtype).double() * scale


def plain_layer(recipe: Recipe) -> type[nn.Linear]:
    row = None if recipe.along is None else -1

    def in_blocks(x: Tensor, rows: int, columns: int) -> Tensor:
        blocks = x.reshape(x.shape[:-1].numel() // rows, rows, x.shape[-1] // columns, columns)
        return _rounded(blocks, (1, 3), recipe).reshape(x.shape)

    class Blocks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            along = recipe.along or 1
            return in_blocks(x, 1, along) @ in_blocks(weight, along if recipe.square else 1, along).T

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            (x, weight), along = ctx.saved_tensors, recipe.along or 1
            back = in_blocks(grad, 1, along) @ in_blocks(weight, along, along if recipe.square else 1)
            return back, torch.einsum("...n,...k->nk", in_blocks(grad, along, 1), in_blocks(x, along, 1))

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return _rounded(x, row, recipe) @ _rounded(weight, row, recipe).T

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            columns, rows = (None, None) if row is None else (0, (0, 1))
            back = _rounded(grad, row, recipe, recipe.gradient) @ _rounded(weight, columns, recipe)
            if recipe.of_weight:
                left, right = _rounded(grad, rows, recipe, recipe.gradient), _rounded(x, rows, recipe)
            else:
                left, right = grad, x
            return back, torch.einsum("...n,...k->nk", left, right)

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made = (Blocks if recipe.along else Product).apply(x, self.weight)
            return made if self.bias is None else made + self.bias

    return Layer


# -- programs, in float64 but for what is rounded to 8 bits


@contextmanager
def otherwise_exact() -> Iterator[None]:
    with mock.patch.object(pipeline, "precision_of", lambda plan: Precision()):
        yield


def step(
    mesh: dict[str, int], recipe: str, given: tuple[Tensor, Tensor] | None = None, **plan: Any
) -> dict[str, Tensor]:
    """The loss and all gradients of one step."""
    with otherwise_exact():
        decisions = {"precision": "fp8", "fp8_recipe": recipe, **plan}
        given, model = batch(recipe) if given is None else given, net(width=sizes_of(recipe)[0])
        program = quintnet.compile(model, quintnet.Mesh(**mesh), given, loss_fn=F.mse_loss, plan=decisions)
        loss = program.step(given)
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in program.named_parameters()}}


def assert_equal(made: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 1e-12) -> None:
    assert made.keys() == expected.keys()
    for name, one in expected.items():
        assert (made[name] - one).abs().max() <= limit * one.abs().max(), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_one_rank_computes_what_the_recipe_says(recipe: str) -> None:
    model = net(plain_layer(RECIPES[recipe]), sizes_of(recipe)[0])
    x, y = batch(recipe)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    expected = {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
    made = step({}, recipe)
    assert_equal(made, expected)
    exact = net(width=sizes_of(recipe)[0])
    F.mse_loss(exact(x), y).backward()
    off = max(float((made[n] - p.grad).norm() / p.grad.norm()) for n, p in exact.named_parameters())
    assert 1e-3 < off < 0.2  # it is rounded, and no more than that


LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {}),
    ({"tp": 2}, {}),
    ({"tp": 4}, {"sequence_parallel": False}),
    ({"cp": 2}, {}),
    ({"pp": 2}, {}),
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"dp": 2, "cp": 2}, {"zero": 2, "recompute": "full"}),
    ({"dp": 2, "tp": 2, "pp": 2}, {"zero": 1}),
    ({"dp": 3}, {}),  # 8 rows do not divide
    ({"tp": 3}, {}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize(("mesh", "plan"), LAYOUTS, ids=str)
def test_every_layout_rounds_to_the_same_numbers(mesh: dict[str, int], plan: dict[str, Any], recipe: str) -> None:
    assert_equal(step(mesh, recipe, **plan), step({}, recipe))


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "recipe"), [({"dp": 2}, "tensorwise"), ({"pp": 2}, "rowwise"), ({"tp": 2}, "mxfp8")])
def test_a_microbatch_has_scales_of_its_own(mesh: dict[str, int], recipe: str) -> None:
    """As if the model were called with one microbatch after the other."""
    x, y = batch(recipe)
    many, ways = 2, mesh.get("dp", 1)
    each = ROWS // many // ways
    rows = torch.arange(ROWS).reshape(ways, many, each)
    parts = [step({}, recipe, (x[rows[:, i].flatten()], y[rows[:, i].flatten()])) for i in range(many)]
    expected = {name: sum(part[name] for part in parts) / many for name in parts[0]}
    assert_equal(step(mesh, recipe, microbatches=many), expected)  # type: ignore[arg-type]


def test_what_stays_in_16_bits_is_said() -> None:
    x, y = (t.float() for t in batch())
    program = quintnet.compile(
        net().float(), quintnet.Mesh(), (x, y), loss_fn=F.mse_loss, plan={"precision": "fp8", "fp8_skip": ("0.*",)}
    )
    lines = program.kept_in_16_bits
    assert [line.partition(":")[0] for line in lines] == ["0.gate", "0.up", "0.down", "2"]
    assert "the plan keeps '0.*' wide" in lines[0] and "head" in lines[-1]
    small = nn.Sequential(nn.Linear(WIDTH, 24), nn.Linear(24, 16), nn.Linear(16, 16))
    found = quintnet.compile(small, quintnet.Mesh(), (x, y), loss_fn=F.mse_loss, precision="fp8").kept_in_16_bits
    assert found[0] == "0: out_features 24 is no multiple of 16" and "in_features 24" in found[1]
    assert quintnet.compile(small, quintnet.Mesh(), (x, y), loss_fn=F.mse_loss).kept_in_16_bits == ()


@pytest.mark.slow
def test_it_is_as_far_from_float64_as_one_rank() -> None:
    given = tuple(t.float() for t in batch())
    program = quintnet.compile(
        net().float(), quintnet.Mesh(dp=2, tp=2), given, loss_fn=F.mse_loss, precision="fp8", zero=3
    )
    assert program.verify(given).ok


def test_sequences_are_gathered_in_8_bits() -> None:
    given = torch.randn(ROWS, 64, WIDTH), torch.randn(ROWS, 64, 16)
    program = quintnet.compile(net().float(), quintnet.Mesh(tp=2), given, loss_fn=F.mse_loss, precision="fp8")
    assert program.ranks[0].forward.code.count("comm.all_gather(scaled_cast") >= 4


def test_weights_are_cast_once_a_step() -> None:
    given = tuple(t.float() for t in batch())
    program = quintnet.compile(
        net().float(), quintnet.Mesh(tp=2), given, loss_fn=F.mse_loss, precision="fp8", microbatches=2
    )
    (stage,) = program.ranks[0].stages
    assert stage.once is not None and stage.once.code.count("scaled_cast.default(") == 6  # three layers of two blocks
    assert stage.forward.code.count("scaled_cast.default(") == 4  # what gate and up read, and what down reads
