"""simulation.host_update: what an optimizer on the host takes of a program whose parameters are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import quintnet
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts
from quintnet_compiler.runtime.backends.whole_parameters import owners_of
from quintnet_compiler.simulation.host_update import GATHERED, MOMENTS, host_updates
from quintnet_compiler.simulation.timeline import Timeline

SIZES = 64 * 32 * 4, 32 * 4, 32 * 8 * 4, 8 * 4  # bytes of the parameters


def program(**plan: Any) -> quintnet.CompiledProgram:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    batch = torch.randn(8, 64), torch.randint(0, 8, (8,))
    mesh = quintnet.Mesh(**plan.pop("mesh"))
    return quintnet.compile(model, mesh, batch, loss_fn=nn.functional.cross_entropy, check="off", **plan)


def test_the_largest_first_to_the_rank_that_has_least() -> None:
    assert owners_of([3, 10, 4, 4, 1], (5, 7)) == [7, 5, 7, 7, 5]
    assert owners_of([], (0,)) == [] and owners_of([2, 2], (3,)) == [3, 3]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_rank_with_the_most_counts(zero: int) -> None:
    made = program(mesh={"dp": 2}, zero=zero, offload=("optimizer",))
    costs = ClusterCosts(Cluster("h100", 1, 2))
    (update,) = host_updates(made._primary().program, [costs])
    own = SIZES[0]  # the other rank has the rest
    assert (update.host_bytes, update.kept_bytes) == ((MOMENTS + 2) * own, (MOMENTS + 1) * own)
    parts = sum(SIZES) // 2 if zero else sum(SIZES)
    assert update.gathering == GATHERED * costs.group_seconds("all_gather", 2 * parts, (0, 1))
    assert update.out == costs.copy_seconds(2 * own) and update.back == costs.copy_seconds(own)
    assert update.update == costs.host_update_seconds(own) == 7 * own / (0.8 * 76.8e9)
    assert update.seconds == pytest.approx(update.gathering + update.out + update.update + update.back)
    # the parts of both ranks, and what they are joined to; without slices, each rank's is whole
    assert update.device_bytes == 2 * own


def test_in_one_process_a_host_has_all_parameters() -> None:
    made = program(mesh={"dp": 2}, offload=("optimizer",))._primary().program
    (update,) = host_updates(made, [ClusterCosts(Cluster("h100", 1, 2))], processes=False)
    assert update.host_bytes == 4 * sum(SIZES) and update.gathering == update.device_bytes == 0


def test_a_timeline_says_it_and_keeps_it(tmp_path: Any) -> None:
    plain = program(mesh={"dp": 2}).simulate()
    found = program(mesh={"dp": 2}, offload=("optimizer",)).simulate()
    assert plain.rows[0].update is None and "optimizer" not in str(plain)
    assert "the optimizer on the host takes" in str(found) and found.seconds == plain.seconds
    assert found.rows[0].host_bytes == 4 * SIZES[0] and found.rows[0].peak == plain.rows[0].peak
    found.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == found
    # where saved values are on the host, too, they are there beside what stays between steps
    both = program(mesh={"dp": 1}, offload=("activations", "optimizer")).simulate().rows[0]
    assert both.update is not None and both.host_bytes >= both.update.host_bytes
    assert not host_updates(program(mesh={"dp": 1})._primary().program, [ClusterCosts(Cluster("h100"))])
