"""What a phase takes whose kernels run on a device while the host launches them."""

from __future__ import annotations

import numpy as np
import pytest

from quintnet_compiler.cost_models.kernels import with_host


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8, 0.9, 1.0, 1.2, 1.5, 3.0])
def test_host_and_device_that_each_vary_by_a_fifth(ratio: float) -> None:
    """The mean of the longer one over many draws, within 2%."""
    draws = np.random.default_rng(0).normal(1.0, 0.2, (2, 1_000_000))
    assert with_host(1.0, ratio) == pytest.approx(np.maximum(draws[0], ratio * draws[1]).mean(), rel=0.02)


def test_one_that_takes_no_time_leaves_the_other() -> None:
    assert with_host(3.0, 0.0) == pytest.approx(3.0, rel=1e-15) and with_host(0.0, 3.0) == pytest.approx(3.0, rel=1e-15)
    assert with_host(0.0, 0.0) == 0.0


def test_arrays_are_joined_place_by_place() -> None:
    device, host = np.array([1.0, 2.0, 0.0]), np.array([3.0, 2.0, 0.0])
    assert with_host(device, host).tolist() == [with_host(*each) for each in zip(device, host, strict=True)]
