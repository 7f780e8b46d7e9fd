"""Loss functions that are modules, whose parameters have several places: among themselves, or in the model too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

IDS = torch.randint(5, (4, 3), generator=torch.Generator().manual_seed(0))


class Language(nn.Module):
    """A model of five words, whose head is its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.table(ids))
        return found


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.language, self.last = Language(), nn.Linear(5, 5)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.last(self.language(ids))
        return found


class Beside(nn.Module):
    """Cross entropy, and the distance from another model."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other, self.scale = other, nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, ids: Tensor) -> Tensor:
        apart = F.kl_div(logits.log_softmax(-1), self.other(ids).log_softmax(-1), log_target=True, reduction="sum")
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()) + self.scale * apart


def _frozen_copy(model: Policy) -> Beside:
    return Beside(copy.deepcopy(model.language).requires_grad_(False))


def _trained(model: Policy) -> Beside:
    return Beside(Language().double())


def _the_models_own(model: Policy) -> Beside:
    return Beside(model.language)


CASES = [
    (_frozen_copy, {"dp": 2}, {"zero": 3}),
    (_frozen_copy, {"pp": 2, "tp": 2}, {"microbatches": 2}),
    (_trained, {"tp": 2}, {}),
    (_the_models_own, {"dp": 2}, {"zero": 3}),
    (_the_models_own, {"pp": 2}, {"microbatches": 2}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("build", "axes", "options"), CASES)
def test_a_parameter_of_a_loss_function_may_have_several_places(
    build: Callable[[Policy], Beside], axes: dict[str, int], options: dict[str, int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Policy().double()
    loss_fn = build(model).double()
    plain, plain_loss = copy.deepcopy((model, loss_fn))
    program = quintnet.compile(model, Mesh(**axes), (IDS, IDS), loss_fn=loss_fn, **options)
    theirs = list(dict.fromkeys(p for p in (*plain.parameters(), *plain_loss.parameters()) if p.requires_grad))
    ours = [p for p in program.parameters() if p.requires_grad]
    assert len(ours) == len(theirs)
    optimizers = torch.optim.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = plain_loss(plain(IDS), IDS)
        expected.backward()
        torch.testing.assert_close(program.step((IDS, IDS)).detach(), expected.detach())
        for optimizer in optimizers:
            optimizer.step()
    wanted = {**plain.state_dict(), **{f"loss_fn.{name}": x for name, x in plain_loss.state_dict().items()}}
    found = program.state_dict()
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(found[name].full_tensor(), x)
    program.save(tmp_path, step=1)
    program.load(tmp_path)
    assert program.verify(float64=False).ok
