"""What a checkpoint is found to be while it is traced, and what of it is in the graph twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

from quintnet_compiler.capture.capture import capture
from quintnet_compiler.capture.changes import second_runs
from quintnet_compiler.capture.derivatives import checkpoints
from quintnet_compiler.compat import torch_checkpoints
from quintnet_compiler.compat.torch_checkpoints import CheckpointOptions

X = torch.randn(4, 3)


def _options(monkeypatch: pytest.MonkeyPatch, **options: Any) -> CheckpointOptions | None:
    hooks: list[torch.autograd.graph.saved_tensors_hooks] = []
    enter = torch.autograd.graph.saved_tensors_hooks.__enter__

    def noted(entered: torch.autograd.graph.saved_tensors_hooks) -> None:
        hooks.append(entered)
        enter(entered)

    monkeypatch.setattr(torch.autograd.graph.saved_tensors_hooks, "__enter__", noted)
    checkpoint(torch.tanh, X.clone().requires_grad_(), use_reentrant=False, **options)
    return torch_checkpoints.options_of(hooks[0])


def test_what_a_checkpoint_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _options(monkeypatch) == CheckpointOptions(stops=True, same_numbers=True, selective=False)
    other = _options(monkeypatch, preserve_rng_state=False, early_stop=False)
    assert other == CheckpointOptions(stops=False, same_numbers=False, selective=False)
    chosen = _options(monkeypatch, context_fn=lambda: create_selective_checkpoint_contexts([]))
    assert chosen == CheckpointOptions(stops=True, same_numbers=True, selective=True)
    with set_checkpoint_early_stop(False):
        every = _options(monkeypatch)
    assert every is not None
    assert not every.stops
    assert torch_checkpoints.options_of(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)) is None


def test_nodes_of_autograd() -> None:
    x = torch.ones(3, requires_grad=True)
    before = torch_checkpoints.sequence_number()
    total, product = x + 1, x * x
    assert torch_checkpoints.sequence_number_of(total.grad_fn) == before
    assert not torch_checkpoints.saves_tensors(total.grad_fn)
    assert torch_checkpoints.saves_tensors(product.grad_fn)


class _Counts(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.linear, self.checkpointed = nn.Linear(3, 3), checkpointed
        self.register_buffer("count", torch.zeros(()))

    def body(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.linear(x).tanh()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        made = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        return made.square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("checkpointed", "times"), [(True, 2), (False, 1)])
def test_what_changes_is_in_the_graph_twice_and_nothing_else(checkpointed: bool, times: int) -> None:
    graph = capture(_Counts(checkpointed=checkpointed), (X,)).graph
    targets = [node.target for node in graph.nodes]
    assert targets.count(torch.ops.aten.add.Tensor) == times
    assert targets.count(torch.ops.aten.linear.default) == 1
    assert not any(checkpoints.CHECKPOINTS in node.meta for node in graph.nodes)


def test_nothing_is_looked_for_where_there_is_no_checkpoint() -> None:
    exported = torch.export.export(_Counts(checkpointed=False), (X,))
    before = str(exported.graph)
    second_runs.run_again(exported, checkpoints.Checkpoints())
    assert str(exported.graph) == before
