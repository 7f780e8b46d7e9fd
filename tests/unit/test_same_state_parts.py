"""When ranks compare what they hold, and what of an optimizer."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from quintnet_compiler.runtime.state.digests import device_digests
from quintnet_compiler.runtime.state.optimizer_settings import OptimizerSettings
from quintnet_compiler.runtime.state.same_state import compares_state


def test_ranks_compare_after_2_4_8_steps_and_then_at_the_interval() -> None:
    assert [run for run in range(1, 320) if compares_state(run, 100)] == [2, 4, 8, 16, 32, 64, 100, 200, 300]
    assert [run for run in range(6) if compares_state(run, 1)] == [2, 3, 4, 5]
    assert not any(compares_state(run, 0) for run in range(300))


def test_settings_are_those_of_optimizers_that_change_a_parameter() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    settings = OptimizerSettings({"weight": weight})
    mine, theirs = torch.optim.Adam([weight], lr=0.5), torch.optim.SGD([other], lr=0.25)
    for optimizer in (mine, theirs):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
        optimizer.step()
    assert "Adam, group 0: lr = 0.5" in settings.of_all().splitlines()
    assert "Adam, group 0: betas = (0.9, 0.999)" in settings.of_stage()
    assert "Adam, group 0: steps = 1.0" in settings.of_stage()
    assert "steps" not in settings.of_all()
    assert "SGD" not in settings.of_stage()
    mine.add_param_group({"params": [other]})
    assert settings.of_all() == ""
    assert "Adam, group 1: lr = 0.5" in settings.of_stage()
    assert "Adam, group 1: lr = 0.5" in settings.of_groups()
    assert "steps" not in settings.of_groups()


def test_settings_leave_no_hook_behind() -> None:
    gc.collect()  # of others
    before = len(torch_optimizer._global_optimizer_post_hooks)
    settings = OptimizerSettings({})
    assert len(torch_optimizer._global_optimizer_post_hooks) == before + 1
    del settings
    gc.collect()
    assert len(torch_optimizer._global_optimizer_post_hooks) == before


def test_digests_on_the_device_tell_one_bit_apart() -> None:
    x = torch.arange(1000.0)
    y = x.clone()
    y[700] = torch.nextafter(y[700], torch.tensor(0.0))
    numbers = device_digests([x, y, x.clone(), torch.empty(0)], torch.device("cpu"))
    assert numbers[0] == numbers[2] != numbers[1]
    assert device_digests([], torch.device("cpu")).shape == (0,)
