"""runtime.execute, .state and .backends, part by part: gradients, digests, losses, what is not finite."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quintnet_compiler.core.errors import RunError
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.runtime.backends import backends, processes
from quintnet_compiler.runtime.backends.split_parameters import leave_out_others, refuse_call
from quintnet_compiler.runtime.execute.finite import WORDS, badness
from quintnet_compiler.runtime.execute.interpreter_trace import run_watched
from quintnet_compiler.runtime.execute.loss_scale import LossScale
from quintnet_compiler.runtime.execute.run_options import Run
from quintnet_compiler.runtime.launch import world
from quintnet_compiler.runtime.state.buckets import GradientSlice, by_rank
from quintnet_compiler.runtime.state.computed_loss import SettledLoss
from quintnet_compiler.runtime.state.digests import BLOCK, digests, together
from quintnet_compiler.runtime.state.grad_handoff import HandOver
from quintnet_compiler.runtime.state.module_parameters import (
    ReplacedParameter,
    WholeParameter,
    has_values,
    like,
    local_of,
    whole_parameter,
)
from quintnet_compiler.runtime.state.same_values import EVERY, ValueDifference, compares_batch
from quintnet_compiler.runtime.state.true_part import StoredPart, TruePart


def test_how_bad_a_value_is() -> None:
    x = torch.zeros(3)
    assert WORDS[badness(x)] == "finite"
    assert WORDS[badness([x, torch.tensor([1.0, -torch.inf])])] == "-inf"
    assert WORDS[badness(torch.tensor([torch.inf, -torch.inf]))] == "inf"
    assert WORDS[badness((torch.tensor(torch.inf), torch.tensor(torch.nan)))] == "nan"
    assert badness(torch.tensor(5)) == 0


def test_every_value_of_a_function_is_shown() -> None:
    class Comm:
        def double(self, x: Tensor) -> Tensor:
            return 2 * x

    graph = fx.Graph()
    comm, x = graph.placeholder("comm"), graph.placeholder("x")
    y = graph.call_function(torch.add, (x, 1))
    z = graph.call_method("double", (comm, y))
    graph.output((z, y))
    seen: dict[str, Any] = {}
    made = run_watched(
        fx.GraphModule({}, graph), [Comm(), torch.tensor(3.0)], lambda node, value: seen.update({node.name: value})
    )
    assert [v.item() for v in made] == [8, 4] and seen["add"].item() == 4 and seen["double"].item() == 8


def test_a_bad_step_halves_the_scale_and_good_ones_double_it() -> None:
    scale, how = LossScale(8.0, patience=2), Run(scale=8.0)
    scale.update(how, False)
    assert (scale.scale, scale.skipped) == (4.0, True)
    scale.update(how, True)
    scale.update(how, True)
    assert (scale.scale, scale.skipped, scale.good) == (8.0, False, 0)
    scale.update(Run(), False)  # without a scale nothing is learned
    assert scale.scale == 8.0
    program = SimpleNamespace(precision=SimpleNamespace(scale=None))
    assert scale.with_scale(program, how) is how  # type: ignore[arg-type]


def test_slices_of_a_gradient_by_rank() -> None:
    x = torch.arange(12).view(6, 2)
    rows = by_rank(x, [GradientSlice("dp", 3, 0, 1)], ["dp"])
    assert rows.shape == (3, 2, 2) and torch.equal(rows[1], x[2:4]) and rows.data_ptr() == x.data_ptr()
    fused = by_rank(x, [GradientSlice("dp", 3, 0, 2)], ["dp"])  # two runs, of which each rank has a third
    assert torch.equal(fused[1], x[[1, 4]])
    both = by_rank(x, [GradientSlice("dp", 3, 0, 1), GradientSlice("ep", 2, 1, 1)], ["ep", "dp"])
    assert torch.equal(both[1, 2], x[4:6, 1:])


def test_gradients_are_handed_over_and_added_to_those_there_are() -> None:
    parameter, gradient = nn.Parameter(torch.zeros(2)), torch.zeros(2)
    hand = HandOver([parameter], [gradient])
    assert hand.take_gradients() is None and not hand.kept
    gradient.copy_(torch.tensor([1.0, 2.0]))
    hand.give(None)
    assert parameter.grad is gradient
    old = hand.take_gradients()  # the step before is not over: its gradients stay
    assert parameter.grad is None
    gradient.fill_(5)
    seen: list[Tensor] = []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))  # type: ignore[union-attr]
    hand.give(old)
    assert parameter.grad.tolist() == [6, 7] and seen[0].tolist() == [6, 7]


def test_whoever_keeps_a_gradient_is_noticed() -> None:
    parameter, gradient = nn.Parameter(torch.zeros(2)), torch.zeros(2)
    hand = HandOver([parameter], [gradient])
    del gradient
    before = hand._references()
    kept = hand.gradients[0].view(1, 2)
    assert hand._references() != before
    del kept
    assert hand._references() == before


def test_a_loss_says_what_to_do_instead_of_backward() -> None:
    loss = torch.tensor(2.0).as_subclass(SettledLoss)
    assert f"{loss:.1f}" == "2.0" and type(loss * 3) is SettledLoss and type(loss.detach()) is Tensor
    for call in (loss.backward, (loss / 2).backward, lambda: torch.autograd.grad(loss, [loss])):
        with pytest.raises(RunError, match="step computed the gradients"):
            call()
    assert type(copy.deepcopy(loss)) is type(pickle.loads(pickle.dumps(loss))) is Tensor


def test_digests_tell_bits_shapes_and_dtypes_apart() -> None:
    x = torch.arange(2 * BLOCK + 3, dtype=torch.float32)
    flipped = x.clone()
    flipped[BLOCK] = -flipped[BLOCK]
    swapped = x.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    found = digests([x, x.clone(), flipped, swapped, x.view(1, -1), x.double()])
    assert found[0] == found[1] and len(set(found)) == 5
    assert digests([]) == [] and together(1, "a") == together(1, "a") != together("a", 1)
    assert digests([x], 128) == digests([x.clone()], 128)


def test_when_batches_are_compared_and_what_is_told() -> None:
    assert [run for run in range(1, 250) if compares_batch(run)] == [1, 2, 4, 8, 16, 32, 64, EVERY, 2 * EVERY]
    told = str(ValueDifference("parameter", ((0, 1, 3), (2,)), ["a", "b"]))
    assert "2" in told and told.endswith("parameters a, b")


def test_a_parameter_that_was_replaced_has_no_gradient_to_ask_for() -> None:
    x = nn.Parameter(torch.ones(2))
    x.__class__ = ReplacedParameter
    with pytest.raises(RunError, match="make the optimizer after"):
        _ = x.grad


def test_whole_parameters_offer_what_parts_do() -> None:
    x = nn.Parameter(torch.ones(2))
    assert whole_parameter(x, torch.device("cpu"), trainable=True) is x and type(x) is WholeParameter
    assert x.full_tensor().tolist() == [1, 1] and local_of(x) is x and has_values(x)
    made = whole_parameter(torch.ones(2, device="meta"), torch.device("cpu"), trainable=False)
    assert not made.is_meta and not made.requires_grad
    assert type(like(torch.ones(1), WholeParameter)) is WholeParameter


def test_other_things_than_whole_tensors_are_stored_as_they_are() -> None:
    part = StoredPart((4,), (), (), (), TruePart.on_rank((4,), (), (), {}))
    assert part("text", None) == "text"  # type: ignore[arg-type]
    x = torch.ones(3)
    assert part(x, None) is x  # type: ignore[arg-type]


def test_a_module_with_parts_is_not_called_and_saves_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(RunError, match="call the program"):
        refuse_call(model, None)
    refuse_call(model[0], None)
    state = model[1].state_dict()
    leave_out_others(model[1], state, "", None)
    assert state == {} and leave_out_others(model[0], model[0].state_dict(), "", None) is None


def test_where_ranks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(backends, "tune_malloc", lambda: made.append("malloc"))
    monkeypatch.setattr(backends, "LocalBackend", lambda *_: made.append("here"))
    monkeypatch.setattr(processes, "ProcessBackend", lambda *_, **__: made.append("processes"))
    for several in (False, True):
        monkeypatch.setattr(backends, "many", lambda several=several: several)
        backends.open_backend(Mesh(dp=2), None, {}, torch.device("cpu"), tune_process=several)  # type: ignore[arg-type]
    assert made == ["here", "malloc", "processes"]


def test_one_rank_is_a_process_where_accelerators_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, accelerator = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(world.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(world.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(world, "group_accelerator", lambda: accelerator)
    assert world.has_process(Mesh(dp=1), accelerator)
    assert not world.has_process(Mesh(dp=1), cpu)
    assert not world.has_process(Mesh(dp=2), accelerator)  # all ranks in this process
    monkeypatch.setattr(world, "group_accelerator", lambda: None)  # gloo
    assert not world.has_process(Mesh(dp=1), cpu)
