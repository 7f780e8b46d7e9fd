"""loops.handed_gradients, loops.joined_optimizers, loops.together, training.schedulers, training.validation,
training.buckets: what other libraries' loops are given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quintnet_compiler.core.errors import CheckpointError, CompileError
from quintnet_compiler.loops.handed_gradients import differentiable
from quintnet_compiler.loops.joined_optimizers import joined
from quintnet_compiler.loops.together import wait_for_all
from quintnet_compiler.training.buckets import pad_to_bucket
from quintnet_compiler.training.schedulers import follows_validation, require_steps
from quintnet_compiler.training.validation import LABELS


def test_gradients_that_are_there_are_multiplied_by_what_arrives() -> None:
    p = nn.Parameter(torch.zeros(2))
    first = differentiable(torch.tensor(3.0), [(p, torch.ones(2))])
    second = differentiable(torch.tensor(2.0), [(p, torch.full((2,), 5.0))])
    unused = differentiable(torch.tensor(2.0), [(p, torch.full((2,), 100.0))])
    loss = 0.5 * first + second**2 + unused.detach()
    assert float(loss.detach()) == 7.5
    loss.backward()
    assert p.grad is not None and p.grad.tolist() == [20.5, 20.5]
    differentiable(torch.tensor(3.0), [(p, torch.ones(2))]).backward()
    assert p.grad.tolist() == [21.5, 21.5]


def test_several_optimizers_as_one() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    first, second = torch.optim.SGD([p], lr=0.1), torch.optim.Adam([q], lr=0.2)
    both = joined([first, second])
    assert both is not None and type(both).__name__ == "SGD and Adam" and joined([first]) is first
    assert joined([]) is None
    both.state[q] = {"step": 1}
    both.param_groups[1]["lr"] = 0.3
    assert second.state[q] == {"step": 1} and second.param_groups[0]["lr"] == 0.3 and both.state.get(p, {}) == {}
    assert list(both.state) == [q] and len(both.state) == 1
    del both.state[q]
    assert q not in second.state
    with pytest.raises(CheckpointError, match="two optimizers have the same parameter"):
        joined([first, torch.optim.SGD([p])])


def test_one_process_waits_for_nobody() -> None:
    wait_for_all()


def test_which_schedulers_follow_validation() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    assert follows_validation(plateau) and not follows_validation(restarts)
    require_steps(restarts, validation=False)
    require_steps(None, validation=False)
    with pytest.raises(CompileError, match="no val_loader"):
        require_steps(plateau, validation=False)


def test_labels_are_padded_with_what_does_not_count() -> None:
    ids = torch.ones(1, 3, dtype=torch.int64)
    padded = pad_to_bucket({"input_ids": ids, LABELS: ids}, 4)
    assert padded[LABELS].tolist() == [[1, 1, 1, -100]]  # type: ignore[call-overload]
