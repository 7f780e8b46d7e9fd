"""Plans as the planner makes them: they are exact when they run, and take no more memory than was planned."""

from __future__ import annotations

import pytest

from benchmarks import planned_memory


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gnn", "leaky"])
def test_planned_memory_is_enough(name: str) -> None:
    rows = planned_memory.compare(name, ranks=2, count=3, work=500.0)
    assert len(rows) == 3 and all(row["verified"] for row in rows)
    for row in rows:
        for measured, simulated, planned in zip(row["measured"], row["simulated"], row["planned"], strict=True):
            assert measured <= 1.01 * simulated
            assert measured <= 1.01 * planned
