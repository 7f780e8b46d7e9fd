"""Hooks of all modules: those of torch's own tools only watch, and are left out."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.module_tracker import ModuleTracker

from quintnet_compiler.guards.hooks import global_hooks, unwatched


def parents_inside(tracker: ModuleTracker) -> set[str]:
    found: list[set[str]] = []

    class Asks(nn.Module):
        def forward(self) -> None:
            found.append(set(tracker.parents))

    Asks()()
    return found[0]


def test_those_of_tools_are_left_out() -> None:
    calls: list[str] = []
    nothing = global_hooks()
    with register_module_forward_pre_hook(lambda module, inputs: calls.append("mine")):
        mine = global_hooks()
        assert mine != nothing
        with ModuleTracker() as tracker:  # type: ignore[no-untyped-call]
            assert global_hooks() == mine
            with unwatched():
                assert parents_inside(tracker) == {"Global"}
            assert len(parents_inside(tracker)) == 2
    assert calls == ["mine", "mine"]
    assert global_hooks() == nothing
