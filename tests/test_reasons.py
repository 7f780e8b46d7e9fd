"""What QN111 says is established, and the fix that it offers works."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quintnet
import quintnet_compiler.capture.capture as tracing
from quintnet import Mesh
from quintnet_compiler.compat.torch_checkpoints import without_checkpoints
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.equivalence.module_check import ModuleCheck
from quintnet_compiler.equivalence.module_step import Owner
from quintnet_compiler.ops.rules.table import RULES

BATCH = (torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(8) % 4)


class Normed(nn.Module):
    """A BatchNorm, with or without a checkpoint around it."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = self.norm(h) if self.reentrant is None else checkpoint(self.norm, h, use_reentrant=self.reentrant)
        return self.b(h)  # type: ignore[no-any-return]


def difference(model: nn.Module, traced: nn.Module) -> CompileError | None:
    """What is said of a module where ``traced`` was captured instead of it."""
    captured = tracing.capture(traced, BATCH, F.cross_entropy)
    own = model.state_dict(keep_vars=True)
    tensors = {name: own.get(name, x) for name, x in captured.tensors.items()}
    owner = Owner(model, F.cross_entropy, tensors, "loss", training=True)
    return ModuleCheck(owner, captured, BATCH, RULES, 0, torch.device("cpu")).difference()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_is_named_where_it_is_the_cause(reentrant: bool) -> None:
    found = difference(Normed(reentrant).double(), Normed(None).double())
    assert found is not None and "torch.utils.checkpoint is the cause" in found.message
    assert found.fix == 'leave torch.utils.checkpoint out, and compile with recompute="full"'


def test_a_checkpoint_is_not_named_where_it_is_not_the_cause() -> None:
    other = Normed(None).double()
    with torch.no_grad():
        other.b.weight.mul_(1)
    other.b.forward = lambda x: 2 * F.linear(x, other.b.weight, other.b.bias)  # type: ignore[method-assign, assignment]
    found = difference(Normed(False).double(), other)
    assert found is not None and "checkpoint" not in str(found)
    assert found.fix == "write that part so that tracing can follow it"


def test_without_the_checkpoint_it_compiles_and_is_the_plain_module() -> None:
    model, plain = Normed(None).double(), Normed(None).double()
    program = quintnet.compile(model, Mesh(dp=2), BATCH, loss_fn=F.cross_entropy, recompute="full")
    loss = program.step(BATCH)
    expected = F.cross_entropy(plain(BATCH[0]), BATCH[1])
    expected.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    for (_, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    for held, right in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(held, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_without_checkpoints_each_part_runs_once(reentrant: bool) -> None:
    model = Normed(reentrant).double()
    with without_checkpoints(lambda ours, theirs: ours):
        model(BATCH[0]).sum().backward()
    assert model.norm.state_dict()["num_batches_tracked"] == 1
    model(BATCH[0]).sum().backward()
    assert model.norm.state_dict()["num_batches_tracked"] == 3


class Scaled(nn.Module):
    """Draws a number in Python, or takes it from the batch."""

    def __init__(self, drawn: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.drawn = nn.Linear(4, 4), drawn

    def forward(self, x: Tensor, scale: Any = None) -> Tensor:
        return self.a(x) * (1 + random.random() if self.drawn else 1 if scale is None else scale)  # type: ignore[no-any-return]


def test_random_numbers_are_to_be_passed_in_the_batch() -> None:
    found = difference(Scaled(drawn=True).double(), Scaled(drawn=False).double())
    assert found is not None and "Python's random" in found.message
    assert found.fix == "draw them outside and pass them in the batch"
    model, scale = Scaled(drawn=False).double(), torch.full((8, 1), 1.5, dtype=torch.float64)
    program = quintnet.compile(model, Mesh(dp=2), (BATCH[0], scale, BATCH[1]), loss_fn=F.cross_entropy)
    expected = F.cross_entropy(Scaled(drawn=False).double()(BATCH[0], scale), BATCH[1])
    assert float(program.step((BATCH[0], scale, BATCH[1])).detach()) == pytest.approx(float(expected.detach()))
