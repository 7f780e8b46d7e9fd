"""loops.handed_gradients, loops.joined_optimizers, loops.together, loops.trainer_loss, training.schedulers,
training.validation, training.buckets: what other libraries' loops are given."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quintnet_compiler.core.errors import CheckpointError, CompileError
from quintnet_compiler.ir.containers import LossOfNames, loss_inputs, model_inputs, takes_labels_of
from quintnet_compiler.loops.handed_gradients import differentiable, without_parameter_hooks
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


def test_gradients_are_those_that_autograd_is_asked_for() -> None:
    p, q = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    p.register_hook(lambda gradient: gradient.clamp(max=1.5))
    loss = differentiable(torch.tensor(3.0), [(p, torch.ones(2)), (q, torch.full((2,), 5.0))])
    found = torch.autograd.grad(2 * loss, [q], retain_graph=True)
    assert found[0].tolist() == [10.0, 10.0] and p.grad is None and q.grad is None
    (2 * loss).backward(inputs=[p])
    assert p.grad is not None and p.grad.tolist() == [1.5, 1.5] and q.grad is None
    differentiable(torch.tensor(3.0), []).backward()


def test_hooks_of_parameters_are_away_for_a_while() -> None:
    p, q = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    calls = []
    p.register_hook(lambda gradient: calls.append("gradient"))
    removed = p.register_post_accumulate_grad_hook(lambda x: calls.append("accumulated"))
    with without_parameter_hooks([p, q]):
        (p + q).sum().backward()
        assert not calls
    (p + q).sum().backward()
    removed.remove()
    (p + q).sum().backward()
    assert sorted(calls) == ["accumulated", "gradient", "gradient"]


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


def test_what_of_a_dict_is_for_the_loss() -> None:
    loss, batch = LossOfNames(), {"x": 1, "labels": 2}
    assert takes_labels_of(batch, loss) and model_inputs(batch, loss) == {"x": 1}
    assert loss_inputs(batch, loss) == {"labels": 2}
    assert not takes_labels_of({"x": 1}, loss) and model_inputs({"x": 1}, loss) == {"x": 1}
    assert not takes_labels_of(batch, F.mse_loss) and model_inputs(batch, F.mse_loss) == batch
    assert takes_labels_of((1, 2), F.mse_loss) and not takes_labels_of((1, 2), None)
    assert model_inputs((1, 2), F.mse_loss) == (1,) and model_inputs((1, 2), None) == (1, 2)
    assert loss_inputs((1, 2), F.mse_loss) == 2


def test_the_loss_of_smoothed_labels() -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer
    from transformers.trainer_pt_utils import LabelSmoother

    from quintnet_compiler.loops.trainer_loss import COUNT, SmoothedLoss, loss_owner, smoothed_loss, training_count

    smoother, logits, labels = LabelSmoother(0.1), torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    labels[0, :3] = -100
    wanted = smoother({"logits": logits.clone()}, labels, shift_labels=True)
    torch.testing.assert_close(SmoothedLoss(smoother, True)({"logits": logits.clone()}, {"labels": labels}), wanted)
    trainer = Trainer.__new__(Trainer)
    trainer.label_smoother, trainer.model = None, nn.Linear(1, 1)
    assert smoothed_loss(trainer) is None and loss_owner(trainer) is Trainer
    assert training_count(trainer, 3).tolist() == 3.0 and SmoothedLoss.names == ("labels", COUNT)
    trainer.label_smoother = smoother
    loss = smoothed_loss(trainer)
    assert loss is not None and not loss.shifted


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
