"""guards: what a trace took from Python is compared before each step, and told with the value before and now."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import nn

from quintnet_compiler.compat.torch_hooks import MODULE_HOOKS
from quintnet_compiler.guards.attribute_reads import Reads
from quintnet_compiler.guards.columns import Flags
from quintnet_compiler.guards.function_reads import Walk, trainable
from quintnet_compiler.guards.guards import TraceReads, global_modes, guards_of
from quintnet_compiler.guards.hooks import Trained, hook_guards
from quintnet_compiler.guards.namespaces import MISSING
from quintnet_compiler.guards.python_state import AttributeSnapshot, Generators, copied, is_plain, same, short_text
from quintnet_compiler.guards.reach import is_observable


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.sizes = nn.Linear(2, 2), 2.0, [1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_plain_data() -> None:
    assert is_plain([1, "a", {"b": (2.0, None)}]) and not is_plain([nn.Identity()])
    inner = [1]
    found = copied({"a": inner, "b": inner})
    inner.append(2)
    assert found == {"a": [1], "b": [1]}
    assert same([1, float("nan")], [1, float("nan")]) and not same(1, 1.0) and not same([1], (1,))
    module = nn.Identity()
    assert same([module], [module]) and not same([module], [nn.Identity()])
    assert short_text(torch.zeros(2, 3)) == "a tensor of shape [2, 3]" and short_text(MISSING) == "nothing"
    assert short_text("x" * 100).endswith("...") and len(short_text("x" * 100)) == 60


def test_what_changed_is_told_and_put_back() -> None:
    model, state = Scaled(), AttributeSnapshot()
    state.add("", model)
    linear = model.linear
    model.scale, model.linear = 3.0, nn.Linear(2, 2)
    model.sizes.append(3)
    model.extra = 1
    assert sorted(map(str, state.changes())) == [
        "the attribute 'extra' (from nothing to 1)",
        "the attribute 'scale' (from 2.0 to 3.0)",
        "the attribute 'sizes' (from [1, 2] to [1, 2, 3])",
        "the module 'linear'",
    ]
    state.restore()
    assert model.scale == 2.0 and model.linear is linear and model.sizes == [1, 2] and not hasattr(model, "extra")


def test_generators_are_put_back() -> None:
    random.seed(3)
    before = Generators.now()
    first = random.random()
    assert any("random" in str(change) for change in before.changes())
    before.restore()
    assert random.random() == first


class Settings:
    width = 4

    def __init__(self) -> None:
        self.depth = 2


def test_attributes_that_are_read_are_recorded() -> None:
    model, settings = Scaled(), Settings()
    model.settings = settings
    reads = Reads(AttributeSnapshot())
    reads.meet("model", model)
    with reads.recording():
        model(torch.zeros(1, 2))
        _ = model.settings.depth
    found = {read.label for read in reads.found}
    assert {"model.scale", "model.settings", "model.settings.depth"} <= found and "model.sizes" not in found
    assert is_observable(settings) and not is_observable(model) and not is_observable(3)
    assert "__getattribute__" not in vars(Settings)  # nothing stays behind


FACTOR = 3


def _helper(x: Any) -> Any:
    return x * FACTOR


def test_variables_of_functions_that_are_called() -> None:
    offset = 1

    def loss(x: Any, head: Any = None) -> Any:
        return _helper(x) + offset

    walk = Walk()
    walk.follow(functools.partial(loss))
    assert {"offset", "FACTOR"} <= {variable.name for variable in walk.variables}
    values = {variable.name: variable.value for variable in walk.variables}
    assert values["offset"] == 1 and values["FACTOR"] == 3


def test_modules_that_a_loss_function_brings() -> None:
    head, model = nn.Linear(2, 2), nn.Linear(2, 2)

    def loss(x: Any) -> Any:
        return head(model(x)).sum()

    found = trainable(loss, model)
    assert found == {"head": head}  # what the model has already is not new
    assert list(trainable(functools.partial(_helper, head), model).values()) == [head]
    assert trainable(None, model) == {}


def test_hooks_are_the_same_ones() -> None:
    model = Scaled()
    kept = model.linear.register_forward_hook(lambda *_: None)
    parameters = list(model.parameters())
    names = tuple(name for name, _ in model.named_parameters())
    spaces, keys = (vars(model.linear)["_parameters"],) * len(names), tuple(name.split(".")[-1] for name in names)
    flags = Flags(names, spaces, keys, [True] * len(names))
    guards = Trained(flags, hook_guards([("", model)], parameters, names))
    assert guards.hold()
    added = model.register_forward_hook(lambda *_: None)
    assert not guards.hold() and guards.broken() == ["the model has other hooks than it had"]
    added.remove()
    assert guards.hold()
    parameters[0].register_hook(lambda g: g)
    assert not guards.hold() and guards.broken() == ["linear.weight has other hooks than it had"]
    kept.remove()
    assert "linear has other hooks than it had" in guards.broken()


@pytest.mark.parametrize("change", ["scale", "part", "frozen"])
def test_guards_notice_a_change(change: str) -> None:
    model = Scaled()
    reads = Reads(AttributeSnapshot())
    reads.meet("", model)
    with reads.recording():
        model(torch.zeros(1, 2))
    guards = guards_of(TraceReads([("", model)], reads.found, modes=global_modes()))
    assert guards.hold() and guards.broken() == []
    if change == "scale":
        model.scale = 3.0
        assert guards.broken() == ["scale is 3.0 and was 2.0"]
    elif change == "part":
        model.linear = nn.Linear(2, 2)
        assert guards.broken() == ["the model has other parts than it had"]
    else:
        model.linear.bias.requires_grad_(False)
        assert any("linear.bias" in line for line in guards.broken())
    assert not guards.hold()


@pytest.mark.parametrize("kind", MODULE_HOOKS)
def test_each_kind_of_hooks_is_looked_for(kind: str) -> None:
    layer = nn.Sequential(nn.Linear(2, 2))
    guards = guards_of(TraceReads([("", layer)], modes=global_modes()))
    assert guards.hold() and guards.hold()
    vars(layer[0])[kind][0] = print
    assert not guards.hold() and guards.broken() == ["0 has other hooks than it had"]
