"""One model of prices: what `estimate` says of a real module, and the closed form of the same model."""

from __future__ import annotations

import pytest

from benchmarks.closed_forms.kernel_set import MEGATRON, QUINTNET
from benchmarks.graph_prices import CASES, LAYOUTS, applies, pair
from quintnet_compiler.cost_models.hardware import A100_80, H100

PAIRS = [(name, layout) for layout in LAYOUTS for name in CASES if applies(name, layout)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_a_graph_costs_what_its_closed_form_costs(name: str, layout: str) -> None:
    gpu = "a100" if PAIRS.index((name, layout)) % 2 else "h100"
    found = pair(name, layout, gpu)
    assert abs(found.error) < 0.03
    step = found.closed.step()
    assert found.graph.optimizer == pytest.approx(step.optimizer, rel=0.02)
    assert found.graph.gradients + found.graph.pipeline == pytest.approx(step.data_parallel + step.pipeline, rel=0.035)


def test_ten_models_have_a_closed_form() -> None:
    assert len(CASES) == 10 and {name for name, _ in PAIRS} == set(CASES)


def test_kernels_are_facts_of_software_and_not_of_devices() -> None:
    """What kernels reach of memory's bandwidth is the same share on either GPU, as what they move is listed."""
    assert A100_80.efficiency.memory == H100.efficiency.memory
    assert QUINTNET.rotary.forward > MEGATRON.rotary.forward and not QUINTNET.joined
