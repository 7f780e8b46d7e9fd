"""Settings of passes, for tests that ask a feature's rewrites whether a plan has a use for them."""

from __future__ import annotations

import torch

from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.cost_models.roofline import Roofline
from quintnet_compiler.driver.pipeline import PassSetting, Request
from quintnet_compiler.features.feature import RewriteSetting
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.passes.autodiff.differentiate import Differentiate
from quintnet_compiler.schedules.schedule import Schedule


def setting_of(plan: Plan, schedule: Schedule | None = None, *, training: bool = True) -> RewriteSetting:
    """Return the setting of a plan on one rank, on which no operator takes any time."""
    request = Request(Mesh(), plan, 4, torch.device("cpu"))
    return PassSetting(
        request, 1, Roofline(), lambda node: 0.0, Differentiate(training), schedule=schedule
    ).for_rewrites
