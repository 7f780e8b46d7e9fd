"""Sizes that do not divide their axis: the last ranks have fewer, all results are exact, and padding is counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.ir.program import Axis
from quintnet_compiler.passes.frontend.normalize import Normalize

from .beside_plain import train_beside
from .models import GPT, MLP, Mixture, reference, worst_error
from .random_plans import gradients, random_program
from .zoo import GROUPED, Entry, InDouble

torch.set_num_threads(1)
EXACT = 1e-12


def _tokens(vocab: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[0, : length // 2] = -100
    return ids, labels


def _features(rows: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, dtype=torch.float64, generator=dice)
    return x, torch.randint(0, classes, (rows,), generator=dice)


def _exact(model: nn.Module, axes: dict[str, int], batch: Any, loss_fn: Any = None, **options: Any) -> Any:
    """One step equals the module's, in loss and every gradient. Returns the program."""
    loss, expected = reference(model, batch, loss_fn)
    model.zero_grad(set_to_none=True)
    program = quintnet.compile(model, Mesh(**axes), batch, loss_fn=loss_fn, **options)
    found = program.step(batch)
    assert abs(found - loss) <= EXACT * abs(loss)
    error, worst = worst_error({n: p.grad.full_tensor() for n, p in program.named_parameters()}, expected)  # type: ignore[union-attr]
    assert error < EXACT, (worst, error)
    return program


def _gpt(**sizes: int) -> nn.Module:
    torch.manual_seed(0)
    return GPT(**{"vocab": 33, "width": 24, "heads": 3, "depth": 2, "length": 20, **sizes}).double()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "axes", "rows", "length", "options"),
    [
        ({}, {"tp": 2}, 4, 8, {}),  # 3 heads, 33 tokens
        ({"heads": 4, "width": 32, "vocab": 31}, {"tp": 3}, 3, 7, {}),
        ({}, {"cp": 2, "dp": 2, "tp": 2}, 3, 17, {}),
        ({}, {"pp": 2}, 5, 8, {"microbatches": 2}),
        ({"heads": 9, "width": 36}, {"tp": 2}, 3, 7, {}),
        ({}, {"dp": 2}, 5, 8, {"zero": 3}),
        ({}, {"dp": 4, "tp": 2}, 3, 8, {"zero": 1}),  # of four data ranks one has no row
        ({}, {"cp": 3}, 4, 17, {"context": "ulysses"}),
        ({}, {"cp": 2}, 4, 17, {"context": "ring"}),
        ({}, {"dp": 2, "pp": 2, "tp": 2}, 6, 8, {"microbatches": 2, "zero": 2}),
        ({"depth": 5}, {"pp": 4}, 8, 8, {"microbatches": 2}),
        ({"heads": 6, "width": 36}, {"tp": 4}, 7, 7, {"recompute": "full"}),
    ],
    ids=str,
)
def test_a_transformer_whose_sizes_do_not_divide(
    model: dict[str, int], axes: dict[str, int], rows: int, length: int, options: dict[str, Any]
) -> None:
    program = _exact(_gpt(**model), axes, _tokens({"vocab": 33, **model}["vocab"], rows, length), **options)
    assert not any(axis in line for line in program.unsplit for axis in ("tp=", "cp="))


def test_the_last_batch_of_a_data_set_is_smaller() -> None:
    torch.manual_seed(0)
    model = MLP().double()
    program = quintnet.compile(
        model, Mesh(dp=2, tp=2), _features(8, 16, 8), loss_fn=F.cross_entropy, microbatches=2, check="off"
    )
    program.step(_features(8, 16, 8))
    for rows in (6, 7):  # 3 rows of each rank, in microbatches of 2 and 1; 4 and 3, in microbatches of 2, 2 and 2, 1
        batch = _features(rows, 16, 8)
        program.zero_grad()
        loss, expected = reference(copy.deepcopy(model), batch, F.cross_entropy)
        assert abs(program.step(batch) - loss) < EXACT
        error, worst = worst_error({n: p.grad.full_tensor() for n, p in program.named_parameters()}, expected)  # type: ignore[union-attr]
        assert error < EXACT, worst
    x = _features(7, 16, 8)[0]
    torch.testing.assert_close(program(x), model(x), rtol=EXACT, atol=EXACT)


# -- random plans


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "mlp": (lambda: MLP(7, 9, 5), _features(7, 7, 5), F.cross_entropy),
    "gpt": (lambda: GPT(vocab=33, width=24, heads=3, depth=1, length=8), _tokens(33, 5, 7), None),
    "mixture": (Mixture, _features(7, 16, 8), None),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("axes", "stages"), [((2,), 1), ((3,), 2), ((2, 3), 1)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_random_plans_of_sizes_that_do_not_divide(name: str, axes: tuple[int, ...], stages: int, seed: int) -> None:
    """Any legal strategy at every operator, most of them with padding."""
    build, batch, loss_fn = CASES[name]
    torch.manual_seed(0)
    model = build().double()
    captured = capture(model, batch, loss_fn)
    normal = Normalize(len(batch[0]), torch.device("cpu"))(captured)
    mesh = Mesh(pp=stages, **dict(zip(("dp", "tp"), axes, strict=False)))
    kinds = tuple(Axis(n, k, role) for n, k, role in zip(("dp", "tp"), axes, ("data", "model"), strict=False))  # type: ignore[arg-type]
    program = random_program(normal, mesh, kinds, 1, seed)
    loss, found = gradients(program, mesh, dict(captured.tensors), batch)
    expected_loss, expected = reference(model, batch, loss_fn)
    error, worst = worst_error(found, expected)
    assert abs(loss - expected_loss) < 1e-10 and error < 1e-10, (worst, error)


# -- processes


def _train() -> None:
    """Three steps of AdamW with clipped gradients, as plain PyTorch; parts of parameters have no padding."""
    model, batch = _gpt(), _tokens(33, 3, 9)
    plain = copy.deepcopy(model)
    program = quintnet.compile(model, Mesh(tp=2), batch, plan={"parameters": {"wte.weight": {"tp": "S(0)"}}})
    train_beside(program, plain, batch, 3)
    table = dict(program.named_parameters())["wte.weight"]
    assert tuple(table.to_local().shape) in ((17, 24), (16, 24)), table.to_local().shape  # type: ignore[attr-defined]


@pytest.mark.slow
def test_processes_train_with_sizes_that_do_not_divide() -> None:
    quintnet.launch(_train, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "groups", "ranks"), [(4, 1, 2), (4, 2, 4), (6, 3, 2), (6, 2, 4)])
def test_key_heads_that_do_not_divide(heads: int, groups: int, ranks: int) -> None:
    pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": 8 * heads}
    entry = Entry("LlamaForCausalLM", {**GROUPED, **sizes})
    with InDouble():
        program = quintnet.compile(entry.build(), quintnet.Mesh(tp=ranks), entry.batch(8))
        assert program.verify().ok


class Means(nn.Module):
    """Means over the rows of each node, whose index is broadcast over features: the last rank's padding has an index,
    too."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 5)
        self.register_buffer("node", torch.tensor([0, 2, 2, 1, 2, 0]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.lin(x)
        where = self.node[:, None].expand_as(h)
        return (torch.zeros_like(y).scatter_reduce(0, where, h, "mean", include_self=False) - y).square().sum()


def test_an_index_that_is_broadcast_over_a_padded_dim() -> None:
    torch.manual_seed(0)
    batch = torch.randn(6, 4).double(), torch.randn(3, 5).double()
    _exact(Means().double(), {"tp": 2}, batch, plan={"parameters": {"lin.weight": {"tp": "S(0)"}}})
