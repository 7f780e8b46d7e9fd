"""What the feature of losses in parts gives to the compiler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quintnet_compiler.features import FEATURES
from quintnet_compiler.features.chunked_losses.chunk_losses import ChunkLosses
from quintnet_compiler.features.chunked_losses.early_loss_gradients import EarlyLossGradients
from quintnet_compiler.features.chunked_losses.feature import CHUNKED_LOSSES, most_microbatches
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.schedules.kinds import gpipe, one_f_one_b

from ..feature_settings import setting_of

CHUNK, EARLY = CHUNKED_LOSSES.rewrites


def test_it_is_listed_and_a_plan_asks_for_parts() -> None:
    assert CHUNKED_LOSSES in FEATURES
    assert CHUNK.make(setting_of(Plan(loss_chunks=4)), None) == ChunkLosses(4)
    assert CHUNK.make(setting_of(Plan()), None) is None


@pytest.mark.parametrize("stage, most", [(0, 2), (1, 1)])
def test_stages_hold_as_many_microbatches_as_the_schedule_runs_ahead(stage: int, most: int) -> None:
    assert most_microbatches(one_f_one_b(2, 4), stage) == most
    assert most_microbatches(gpipe(2, 4), stage) == 4


def test_gradients_are_early_where_one_microbatch_is_live() -> None:
    """And where there is a backward, a loss in parts, and no budget of saved values."""
    program = SimpleNamespace(again=("logits",), stage={"logits": 1})
    without_parts = SimpleNamespace(again=(), stage={})
    one, several = one_f_one_b(2, 4), gpipe(2, 4)
    assert EARLY.make(setting_of(Plan(), one), program) == EarlyLossGradients()
    assert EARLY.make(setting_of(Plan(), several), program) is None
    assert EARLY.make(setting_of(Plan(), one), without_parts) is None
    assert EARLY.make(setting_of(Plan(), one, training=False), program) is None
    budget = Plan(recompute="auto", activation_memory_budget=1.0)
    assert EARLY.make(setting_of(budget, one), program) is None
