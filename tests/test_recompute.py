"""What the backward computes again: exact, in fewer bytes, and never more than its kind allows."""

from __future__ import annotations

import pytest
import torch

import quintnet
from quintnet import Mesh

from .models import CASES, build
from .zoo import ZOO

KINDS = ("none", "selective", "full")
DEAR = ("linear", "mm", "bmm", "attention", "expert_linear", "convolution")


def _compiled(name: str, recompute: str, mesh: Mesh, **plan: object) -> tuple[quintnet.CompiledProgram, object]:
    torch.manual_seed(0)
    if name in ZOO:
        model, batch, loss_fn = ZOO[name].build(), ZOO[name].batch(4), None
    else:
        model, batch, loss_fn = build(name).double(), CASES[name].batch(8), CASES[name].loss_fn
    given = {"recompute": recompute, **plan}
    return quintnet.compile(model, mesh, batch, loss_fn=loss_fn, **given), batch  # type: ignore[arg-type]


def _products(program: quintnet.CompiledProgram) -> int:
    """Calls in functions of rank 0 that take more than a pass over memory."""
    pieces = [piece for stage in program.ranks[0].stages for piece in stage.pieces.values()]
    names = [str(node.target).split(".")[1] for piece in pieces for node in piece.module.graph.nodes
             if node.op == "call_function" and "." in str(node.target)]  # fmt: skip
    return sum(name in DEAR or "attention" in name for name in names)


@pytest.mark.parametrize(
    ("name", "mesh", "plan"),
    [
        ("gpt", Mesh(tp=2), {}),
        ("vit", Mesh(dp=2, pp=2), {"microbatches": 2}),
        ("Llama", Mesh(dp=2, tp=2), {}),
        ("Mixtral", Mesh(dp=2), {"zero": 3, "microbatches": 2}),
    ],
)
def test_every_kind_is_exact_and_selective_keeps_less_for_no_product(
    name: str, mesh: Mesh, plan: dict[str, object]
) -> None:
    held, products, gradients = {}, {}, {}
    for kind in KINDS:
        program, batch = _compiled(name, kind, mesh, **plan)
        loss = program.step(batch)
        found = [p.grad.full_tensor() for p in program.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        held[kind] = max(row.peak_held for row in program.simulate().rows)
        products[kind], gradients[kind] = _products(program), [loss, *found]
    for kind in KINDS[1:]:
        for a, b in zip(gradients["none"], gradients[kind], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    assert held["full"] < held["selective"] < held["none"]
    assert products["selective"] == products["none"] <= products["full"]


def test_masks_are_drawn_again_as_they_were() -> None:
    curves = []
    for kind in KINDS:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Dropout(0.5)) for _ in range(3))
        ).double()
        batch = (torch.randn(8, 16, dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64))
        program = quintnet.compile(model, Mesh(dp=2), batch, loss_fn=torch.nn.functional.mse_loss, recompute=kind)
        optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
        for _ in range(3):
            curves.append(float(program.step(batch)))
            optimizer.step()
    assert curves[:3] == curves[3:6] == curves[6:] and len(set(curves[:3])) == 3
