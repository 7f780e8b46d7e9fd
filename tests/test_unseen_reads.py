"""What forward or a loss reads past the methods of a class, or by names in unusual places, may change between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quintnet

from .changes_between_steps import Net
from .unseen_reads import UNSEEN_READS

BATCH = (torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4)


def _losses(name: str, place: str, mesh: dict[str, int] | None) -> list[float]:
    """Losses before and after two changes; of a program, if there is a mesh."""
    holder = UNSEEN_READS[name]
    torch.manual_seed(0)
    held = holder.make(1.5)
    model = Net(held, holder.get, float, inside=place == "forward")

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, labels)
        return loss * holder.get(held) if place == "loss" else loss

    step: Any = lambda: loss_fn(model(BATCH[0]), BATCH[1])  # noqa: E731
    if mesh is not None:
        program = quintnet.compile(model, quintnet.Mesh(**mesh), BATCH, loss_fn=loss_fn, check="off")
        step = lambda: program.step(BATCH)  # noqa: E731
    losses = [float(step().detach())]
    for value in (2.5, 0.5):
        holder.put(held, value)
        losses.append(float(step().detach()))
    return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", UNSEEN_READS)
def test_what_is_read_unseen_may_change(name: str) -> None:
    expected = _losses(name, "forward", None)
    assert len(set(expected)) == 3
    assert _losses(name, "forward", {"dp": 2}) == pytest.approx(expected, abs=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}])
@pytest.mark.parametrize("name", list(UNSEEN_READS)[::4])
def test_what_a_loss_reads_unseen_may_change(name: str, mesh: dict[str, int]) -> None:
    assert _losses(name, "loss", mesh) == pytest.approx(_losses(name, "loss", None), abs=1e-5)
