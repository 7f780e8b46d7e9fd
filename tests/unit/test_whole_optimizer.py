"""Optimizers of whole parameters, and those of parts that are refused: groups, options, errors."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn, optim

from quintnet_compiler.core.errors import RunError
from quintnet_compiler.runtime.backends.whole_parameters import AllHere, AllOnHost
from quintnet_compiler.runtime.state import split_updates
from quintnet_compiler.runtime.state.plain_update import PlainUpdate, plain_updates
from quintnet_compiler.runtime.state.whole_optimizer import Pairs, WholeOptimizer


class Apart(AllHere):
    """Whole parameters beside those of the program, the second of which is elsewhere."""

    def stand_ins(self, parameters):  # type: ignore[no-untyped-def]
        first = parameters[0].detach().clone()
        return {id(p): nn.Parameter(first if i == 0 else p.detach().to("meta")) for i, p in enumerate(parameters)}

    def collect(self, pairs: Pairs) -> None:
        for p, whole in pairs:
            whole.grad = None if whole.is_meta else p.grad

    def spread(self, pairs: Pairs) -> None:
        for p, whole in pairs:
            if not whole.is_meta:
                p.copy_(whole)

    def here(self, parameter: nn.Parameter) -> bool:
        return parameter.shape == (2,)


def _parameters() -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    for p in made:
        p.grad = torch.ones_like(p)
    return made


def test_options_go_in_and_out() -> None:
    given = _parameters()
    optimizer = WholeOptimizer(given, lambda p: optim.SGD(p, 1.0, momentum=0.5), Apart())
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    optimizer.step()
    assert optimizer.inner.param_groups[0]["lr"] == 0.5 and torch.equal(given[0], torch.full((2,), 1 - 1 - 0.75))
    assert torch.equal(given[1], torch.ones(3)) and given[1] not in optimizer.state  # where it is whole, it is changed
    assert optimizer.here(given[0]) and not optimizer.here(given[1])
    assert torch.equal(optimizer.state[given[0]]["momentum_buffer"], torch.full((2,), 1.5))
    optimizer.restore(given[0], {"momentum_buffer": torch.zeros(2)})
    optimizer.step()
    assert torch.equal(given[0], torch.full((2,), -0.75 - 0.5))


def test_state_of_now_is_read_in_each_step() -> None:
    """A loop may replace it, or begin anew; some optimizers have it before their first step."""
    given = _parameters()
    optimizer = WholeOptimizer(given, lambda p: optim.SGD(p, 1.0, momentum=0.5), AllHere())
    optimizer.step()
    optimizer.state[given[0]] = {"momentum_buffer": torch.full((2,), 4.0)}
    optimizer.state.pop(given[1])
    optimizer.step()
    assert torch.equal(given[0], torch.full((2,), -3.0)) and torch.equal(given[1], torch.full((3,), -1.0))
    optimizer.state = defaultdict(dict)
    optimizer.step()
    assert torch.equal(given[0], torch.full((2,), -4.0)) and len(optimizer.state_dict()["state"]) == 2
    adagrad = WholeOptimizer(given, optim.Adagrad, AllHere())
    assert torch.equal(adagrad.state[given[0]]["sum"], torch.zeros(2))
    adagrad.step()


class TwoModes(optim.SGD):
    """Notes its mode in an option, and moves parameters by its rate in evaluation mode, as schedule-free ones do."""

    def eval(self) -> None:
        (group,) = self.param_groups
        group["evaluates"] = True
        group["params"][0].add_(group["lr"])


@pytest.mark.parametrize("tensors", [AllHere(), Apart()])
def test_options_of_now_are_read_and_written_between_steps(tensors: AllHere) -> None:
    given = _parameters()
    optimizer = WholeOptimizer(given, lambda p: TwoModes(p, 1.0), tensors)
    optimizer.param_groups[0]["lr"] = 0.25  # by a scheduler
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.25
    optimizer.eval()
    assert torch.equal(given[0], torch.full((2,), 1.25)) and optimizer.param_groups[0]["evaluates"]


def test_groups_are_kept() -> None:
    first, second = _parameters()
    groups = [{"params": [first], "lr": 1.0}, {"params": [second]}]
    optimizer = WholeOptimizer(groups, lambda p: optim.SGD(p, 0.5), AllHere())
    assert [g["lr"] for g in optimizer.param_groups] == [1.0, 0.5] and len(groups[0]) == 2
    optimizer.step()
    assert not first.any() and torch.equal(second, torch.full((3,), 0.5))
    optimizer.zero_grad()
    assert first.grad is None


def test_copies_on_the_host() -> None:
    """What somebody loads into the program's parameters counts; the copies' gradients do not stay."""
    given = _parameters()
    optimizer = WholeOptimizer(given, lambda p: optim.SGD(p, 1.0, momentum=0.5), AllOnHost())
    copies = [copy for _, copy in optimizer._pairs]
    assert all(copy is not p and torch.equal(copy, p) for copy, p in zip(copies, given, strict=True))
    given[1].grad = None
    with torch.no_grad():
        given[0].fill_(5.0)
    optimizer.step()
    assert torch.equal(given[0], torch.full((2,), 4.0)) and torch.equal(given[1], torch.ones(3))
    assert all(copy.grad is None for copy in copies)
    assert optimizer.home(given[0]).type == "cpu" and optimizer.state[given[0]]["momentum_buffer"].shape == (2,)


def test_what_it_refuses() -> None:
    optimizer = WholeOptimizer(_parameters(), optim.SGD, AllHere())

    def closure() -> Tensor:
        return torch.ones(())

    for call in (
        lambda: optimizer.step(closure),  # type: ignore[arg-type]
        lambda: optimizer.add_param_group({"params": _parameters()}),
    ):
        with pytest.raises(RunError, match="QN113"):
            call()


def test_an_update_is_compared_with_that_of_a_plain_copy() -> None:
    small, large, other = (nn.Parameter(torch.ones(n)) for n in (2, 5, 3))
    for p in (small, large, other):
        p.grad = torch.ones_like(p)
    inner = optim.SGD([{"params": [large, small]}, {"params": [other], "lr": 0.5}], lr=1.0)
    groups = [{"params": [large, small]}, {"params": [other], "lr": 0.5}]
    inner.param_groups[1]["lr"] = 0.25  # by a scheduler
    updates = plain_updates(lambda p: optim.SGD(p, lr=1.0), groups, inner, lambda p: p is not large)
    assert [update.parameter for update in updates] == [small, other]
    assert updates[1].after.tolist() == [0.75] * 3 and small.tolist() == [1.0, 1.0]
    inner.step()
    assert [update.describe_difference() for update in updates] == ["", ""]
    with torch.no_grad():
        other.sub_(0.1)
    assert (
        "changed by at most 0.35, and a plain copy with an optimizer of its own by 0.25"
        in updates[1].describe_difference()
    )

    def both(parameters: list[nn.Parameter]) -> optim.Optimizer:
        first, second = parameters
        return optim.SGD([first, second], lr=1.0)

    assert plain_updates(both, None, inner, lambda p: True) == []  # it is not made for one alone


@pytest.mark.parametrize("split", [False, True])
def test_muon_is_asked_for_whole_matrices(monkeypatch: pytest.MonkeyPatch, split: bool) -> None:
    parameter = nn.Parameter(torch.ones(4, 2))
    monkeypatch.setattr(split_updates, "local_of", lambda p: p[:2] if split else p)
    muon = optim.Muon([parameter], 0.1)
    split_updates.refuse_split_update(muon, (), {})  # nothing has a gradient
    parameter.grad = torch.ones(4, 2)
    split_updates.refuse_split_update(optim.SGD([parameter]), (), {})
    if split:
        with pytest.raises(RunError, match=r"QN113[\s\S]*\[2, 2\] of a parameter \[4, 2\]"):
            split_updates.refuse_split_update(muon, (), {})
    else:
        split_updates.refuse_split_update(muon, (), {})


def test_small_updates_are_compared_beside_large_parameters() -> None:
    before = torch.ones(3)
    parameter = torch.nn.Parameter(before + 5e-5)
    assert PlainUpdate(parameter, before, before + 1e-5).describe_difference()  # smaller than 1e-4 of the parameter
    assert not PlainUpdate(parameter, before, before + 5e-5).describe_difference()
