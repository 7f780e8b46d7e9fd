"""Mixtures of experts in 8 bits: on every layout those of one rank, which are those that this file writes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.features.fp8.eight_bits import RECIPES, Recipe

from .test_eight_bits import assert_equal, otherwise_exact

pytestmark = pytest.mark.usefixtures("shared_captures")

WIDTH, ROWS, EXPERTS = 32, 16, 4
NAMES = sorted(RECIPES)


class Mixture(nn.Module):
    """Top-2 routing. The second weight is [E, I, O]. ``skew`` sends most rows to the first expert, none to the last."""

    def __init__(self, layer: Any = quintnet.expert_linear, skew: float = 0.0, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, scale = layer, 0.2 * (WIDTH / width) ** 0.5
        self.first, self.head = nn.Linear(width, width), nn.Linear(width, 8)
        self.router = nn.Linear(width, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * width, width) * scale)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * width) * scale)
        self.down = nn.Parameter(torch.randn(EXPERTS, width, width) * scale)
        self.register_buffer("skew", skew * torch.tensor([2.0, 1.0, 0.0, -2.0]))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        weights, chosen = torch.topk(torch.softmax(self.router(x) + self.skew, -1), 2)
        rows, ids = x.repeat_interleave(2, 0), chosen.flatten()
        gate, up = self.layer(rows, ids, self.up, self.bias).chunk(2, -1)
        made = self.layer(F.silu(gate) * up, ids, self.down, transposed=True)
        x = x + (made.view(-1, 2, x.shape[-1]) * weights.unsqueeze(-1)).sum(1)
        return F.cross_entropy(self.head(x), labels)


def batch(rows: int = ROWS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, width).double(), torch.randint(0, 8, (rows,))


def width_of(recipe: str) -> int:
    """Two blocks at least, where there are blocks."""
    return 2 * (RECIPES[recipe].along or WIDTH // 2)


# -- the same layers in plain PyTorch


E4M3 = torch.float8_e4m3fn


def _rounded(x: Tensor, largest: Tensor, recipe: Recipe, dtype: torch.dtype = E4M3) -> Tensor:
    """``x`` as 8-bit numbers stand for it, of which the largest is ``largest``."""
    most = torch.finfo(dtype).max
    scale = largest.float().double().clamp(min=1e-12) / most
    scale = (torch.exp2(torch.log2(scale).ceil()) if recipe.power_of_two else scale).float()
    return (x / scale).clamp(-most, most).to(dtype).double() * scale


def _in_blocks(x: Tensor, rows: int, columns: int, recipe: Recipe, dtype: torch.dtype = E4M3) -> Tensor:
    """``x``, one matrix of such blocks after the other rounded by its own largest number."""
    out = torch.empty_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = slice(i, i + rows), slice(j, j + columns)
            out[block] = _rounded(x[block], x[block].abs().amax(), recipe, dtype)
    return out


def plain_layer(recipe: Recipe) -> Any:
    """One row after the other."""
    row, kind, along = recipe.along is not None, recipe.gradient, recipe.along

    def of_rows(x: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
        if not row:
            return _rounded(x, x.abs().amax(), recipe, dtype)
        return _in_blocks(x, 1, along or x.shape[1], recipe, dtype)

    def of_columns(x: Tensor, ids: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
        if not row:
            return of_rows(x, dtype)
        each = [x[ids == one].abs().amax(0) for one in ids.tolist()]
        return _rounded(x, torch.stack(each), recipe, dtype)

    def of_matrices(w: Tensor, summed: int) -> Tensor:
        if not row:
            return _rounded(w, w.abs().amax((1, 2), keepdim=True), recipe)
        block = [along or w.shape[summed]] * 2 if recipe.square else [1, 1]
        block[summed - 1] = along or w.shape[summed]
        return torch.stack([_in_blocks(one, *block, recipe) for one in w])

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, ids, weight)
            return torch.einsum("ri,roi->ro", of_rows(x), of_matrices(weight, 2)[ids])

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
            x, ids, weight = ctx.saved_tensors
            back = torch.einsum("ro,roi->ri", of_rows(grad, kind), of_matrices(weight, 1)[ids])
            left, right = grad, x
            if recipe.of_weight:
                left, right = of_columns(grad, ids, kind), of_columns(x, ids)
            return back, None, torch.einsum("re,ro,ri->eoi", F.one_hot(ids, EXPERTS).double(), left, right)

    def layer(x: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Any:
        made: Any = Product.apply(x, ids, weight.transpose(1, 2) if transposed else weight)
        return made if bias is None else made + bias[ids]

    return layer


def step(
    mesh: dict[str, int], recipe: str, given: tuple[Tensor, Tensor] | None = None, skew: float = 0.0, **plan: Any
) -> dict[str, Tensor]:
    """The loss and all gradients of one step, in float64 but for what is rounded to 8 bits."""
    width = width_of(recipe)
    given = batch(width=width) if given is None else given
    with otherwise_exact():
        decisions = {"precision": "fp8", "fp8_recipe": recipe, "fp8_skip": ("first",), **plan}
        model = Mixture(skew=skew, width=width).double()
        program = quintnet.compile(model, quintnet.Mesh(**mesh), given, plan=decisions)
        loss = program.step(given)
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in program.named_parameters()}}


@pytest.mark.sample(1)
@pytest.mark.parametrize("skew", [0.0, 3.0])
@pytest.mark.parametrize("recipe", NAMES)
def test_one_rank_computes_what_the_recipe_says(recipe: str, skew: float) -> None:
    width = width_of(recipe)
    layers = plain_layer(RECIPES[recipe]), quintnet.expert_linear
    model, exact = (Mixture(layer, skew, width).double() for layer in layers)
    expected: list[dict[str, Tensor]] = []
    for one in (model, exact):
        loss = one(*batch(width=width))
        loss.backward()
        expected.append({"loss": loss.detach(), **{n: p.grad for n, p in one.named_parameters() if p.grad is not None}})
    made = step({}, recipe, skew=skew)
    assert_equal(made, expected[0])
    off = max(float((made[n] - expected[1][n]).norm() / expected[1][n].norm()) for n in ("up", "down"))
    assert 1e-3 < off < 0.2  # it is rounded, and no more than that


LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {}),
    ({"tp": 2}, {}),
    ({"ep": 4}, {}),
    ({"dp": 2, "ep": 2}, {}),
    ({"ep": 2, "tp": 2}, {}),
    ({"dp": 4}, {"experts": ["dp"]}),
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"dp": 2, "ep": 2}, {"zero": 2, "recompute": "full"}),
    ({"dp": 2, "ep": 2, "tp": 2}, {"experts": ["dp", "ep"], "zero": 3}),
    ({"pp": 2, "ep": 2}, {}),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("skew", [0.0, 3.0])
@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize(("mesh", "plan"), LAYOUTS, ids=str)
def test_every_layout_rounds_to_the_same_numbers(
    mesh: dict[str, int], plan: dict[str, Any], recipe: str, skew: float
) -> None:
    assert_equal(step(mesh, recipe, skew=skew, **plan), step({}, recipe, skew=skew))


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        ({"ep": 3}, {}),  # 2, 2 and no experts, and rows that do not divide
        ({"ep": 3}, {"zero": 1, "zero_axes": ("ep",)}),
        ({"dp": 3}, {"experts": ["dp"], "zero": 2}),
        ({"tp": 3}, {}),
    ],
    ids=str,
)
def test_experts_that_do_not_divide(mesh: dict[str, int], plan: dict[str, Any], recipe: str) -> None:
    given = batch(11, width_of(recipe))
    assert_equal(step(mesh, recipe, given, **plan), step({}, recipe, given))


def test_tensor_ranks_split_the_matrices_of_experts() -> None:
    x, y = batch()
    program = quintnet.compile(Mixture(), quintnet.Mesh(tp=2), (x.float(), y), precision="fp8", fp8_recipe="rowwise")
    assert all(program.plan.parameters[name]["tp"].startswith("S") for name in ("up", "down"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "recipe"),
    [({"dp": 2}, "tensorwise"), ({"ep": 2}, "rowwise"), ({"pp": 2}, "rowwise"), ({"ep": 2}, "mxfp8")],
)
def test_a_microbatch_has_scales_of_its_own(mesh: dict[str, int], recipe: str) -> None:
    """As if the model were called with one microbatch after the other."""
    (x, y), many = batch(width=width_of(recipe)), 2
    ways = mesh.get("dp", 1) * mesh.get("ep", 1)
    rows = torch.arange(ROWS).reshape(ways, many, -1)
    parts = [step({}, recipe, (x[rows[:, i].flatten()], y[rows[:, i].flatten()])) for i in range(many)]
    expected = {name: sum(part[name] for part in parts) / many for name in parts[0]}
    assert_equal(step(mesh, recipe, microbatches=many), expected)  # type: ignore[arg-type]


def test_what_stays_in_16_bits_is_said() -> None:
    x, y = batch()

    def kept(**plan: Any) -> list[str]:
        program = quintnet.compile(Mixture(), quintnet.Mesh(), (x.float(), y), precision="fp8", **plan)
        return [line for line in program.kept_in_16_bits if line.startswith(("up", "down"))]

    assert kept() == []
    assert kept(fp8_skip=("down",)) == ["down: the plan keeps 'down' wide"]
    assert kept(fp8_recipe="mxfp8") == []
    up, down = kept(fp8_recipe="blockwise")
    assert up == "up: in_features 32 and out_features 64 is no multiple of 128" and down[:5] == "down:"


@pytest.mark.slow
def test_weights_of_experts_are_cast_once_a_step() -> None:
    x, y = batch()
    options = {"precision": "fp8", "fp8_recipe": "rowwise", "fp8_skip": ("first",), "microbatches": 2}
    program = quintnet.compile(Mixture(), quintnet.Mesh(ep=2), (x.float(), y), **options)
    (stage,) = program.ranks[0].stages
    assert stage.once is not None and stage.once.code.count("scaled_cast.default(") == 4  # two layers, two directions
    assert stage.forward.code.count("scaled_cast.default(") == 2  # rows
    assert program.verify((x.float(), y)).ok
