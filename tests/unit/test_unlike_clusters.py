"""Clusters of several kinds of nodes: links, groups, and prices of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx

import quintnet
from quintnet import Cluster, CompileError, Mesh
from quintnet_compiler.api.cluster_text import read_cluster
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts, FastestCosts
from quintnet_compiler.cost_models.hardware import HARDWARE
from quintnet_compiler.cost_models.links import Rung

from .graphs import builder, leaf

A100, H100 = HARDWARE["a100"], HARDWARE["h100"]
TWIN = replace(H100, name="twin of H100")
MIXED = Cluster.of(Cluster("a100", nodes=2), Cluster("h100"))
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


def _product(rows: int) -> fx.Node:
    to = builder()
    return to.call(torch.ops.aten.mm.default, leaf(to, "input", "x", rows, 512), leaf(to, "parameter", "w", 512, 512))


# -- what there is


def test_nodes_of_one_kind_are_one_cluster() -> None:
    assert Cluster.of(Cluster("h100"), Cluster("h100", nodes=3)) == Cluster("h100", nodes=4)
    assert Cluster(["h100"] * 8, nodes=2) == Cluster("h100", nodes=2)
    racks = Cluster.of(Cluster("gb200", nodes=9), Cluster("gb200", nodes=9))  # half of a domain each
    assert len(racks.parts) == 2 and len(racks.group_of(range(72)).hops) == 2
    assert len(Cluster("gb200", nodes=18).group_of(range(72)).hops) == 1
    assert Cluster.of(MIXED, Cluster("h100")) == Cluster.of(Cluster("a100", nodes=2), Cluster("h100", nodes=2))


def test_ranks_are_numbered_node_by_node() -> None:
    assert (MIXED.size, MIXED.nodes, MIXED.gpus_per_node) == (24, 3, 8)
    assert MIXED.kinds == ((A100, 16), (H100, 8)) and MIXED.name == "16 x A100-SXM-80GB + 8 x H100-SXM-80GB"
    assert [part.device for part in MIXED.devices(range(8, 20))] == [A100, H100]
    pair = Cluster(["rtx-4090", "rtx-3090"], nodes=2)
    assert (pair.size, pair.nodes, pair.gpus_per_node) == (4, 2, 2)
    assert [part.node for part in pair.parts] == [0, 0, 1, 1]
    assert Cluster.of(Cluster("l4", gpus_per_node=4), Cluster("l4", gpus_per_node=6)).gpus_per_node == 2
    assert MIXED.sized(48).kinds == ((A100, 32), (H100, 16)) and pair.sized(8).nodes == 4
    assert not MIXED.has_part(8) and MIXED.has_part(24)


def test_kernels_are_chosen_as_all_devices_can() -> None:
    assert MIXED.gpu == A100.gpu and Cluster("h100").gpu == H100.gpu and Cluster("cpu").gpu is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Cluster.of(), "a cluster of no nodes"),
        (lambda: Cluster.of(Cluster("h100"), "a100"), "is no cluster"),
        (lambda: Cluster.of(Cluster("h100"), Cluster("a101")), "unknown hardware 'a101'"),
        (lambda: Cluster.of(Cluster("h100"), Cluster("a100", nodes=0)), "0 nodes of 8"),
        (lambda: Cluster("h100", 1, 0), "1 nodes of 0"),
        (lambda: Cluster("h100", nodes=1.5), "1.5 nodes of 8"),
        (lambda: Cluster([]), "1 nodes of 0"),
        (lambda: Cluster(["l4", "t4"], 1, 3), "gpus_per_node=3, and a node has 2 devices"),
        (lambda: Cluster.of(Cluster("h100"), Cluster("cpu")), "CPUs beside GPUs"),
        (lambda: MIXED.device, "several kinds of devices"),
        (lambda: MIXED.levels, "several kinds of nodes"),
        (lambda: MIXED.sized(8), "8 devices are not a whole number of times"),
        (lambda: MIXED.group_of([24]), "rank 24 has no device: the cluster has 24"),
    ],
    ids=[
        "none",
        "text",
        "kind",
        "nodes",
        "devices",
        "half",
        "empty",
        "named",
        "cpu",
        "device",
        "levels",
        "sized",
        "rank",
    ],
)
def test_what_is_no_cluster(make, said: str) -> None:
    with pytest.raises(CompileError, match=r"QN(210|216|301)") as caught:
        make()
    assert said in str(caught.value)


# -- links


def test_a_group_goes_at_its_slowest_link() -> None:
    a, h = (one.parts[0].levels for one in (Cluster("a100", 2), Cluster("h100", 2)))
    within_a, within_h, across = (MIXED.group_of(ranks) for ranks in (range(8), range(16, 24), range(8, 24)))
    assert within_a == Cluster("a100").group_of(range(8)) and within_h == Cluster("h100").group_of(range(8))
    assert [hop.level.bytes_per_second for hop in across.hops] == [
        a[Rung.FAST].bytes_per_second, a[Rung.LEAF].bytes_per_second,
    ]  # fmt: skip
    assert a[Rung.LEAF].bytes_per_second < h[Rung.LEAF].bytes_per_second
    assert MIXED.group_of(range(16)) == Cluster("a100", 2).group_of(range(16))


def test_a_ring_has_as_many_adapters_as_its_smallest_node() -> None:
    uneven = Cluster.of(Cluster("h100"), Cluster("h100", gpus_per_node=2))
    far = uneven.group_of(range(10)).hops[-1]
    assert (far.lanes, far.members) == (2, 2)
    slow = Cluster.of(Cluster("h100", gpus_per_node=4), Cluster("a100"))
    assert slow.group_of(range(12)).hops[-1].bytes_per_second == min(
        4 * H100.network_bytes_per_second * H100.efficiency.network,
        8 * A100.network_bytes_per_second * A100.efficiency.network,
    )


def test_cards_of_one_node_meet_at_the_slower_ones_rate() -> None:
    pair = Cluster(["rtx-4090", "rtx-3090"])
    hop = pair.group_of((0, 1)).hops[0]
    rates = [HARDWARE[name].link_bytes_per_second for name in ("rtx-4090", "rtx-3090")]
    assert hop.level.bytes_per_second == min(rates) * HARDWARE["rtx-4090"].efficiency.link and not hop.level.network
    bridged = Cluster(["rtx-3090-nvlink"] * 2 + ["rtx-4090"] * 2)
    assert [hop.level.name for hop in bridged.group_of((0, 1)).hops] == ["bridge"]
    assert bridged.group_of((2, 3)) == Cluster("rtx-4090", 1, 2).group_of((0, 1))
    across = bridged.group_of((0, 1, 2, 3))
    assert min(hop.bytes_per_second for hop in across.hops) == hop.level.bytes_per_second and across.size == 4


# -- prices


@pytest.mark.parametrize("mesh", [Mesh(dp=16), Mesh(pp=2, tp=8), Mesh(pp=4, dp=2, tp=2)], ids=["dp", "pp-tp", "three"])
def test_two_kinds_of_equal_speed_cost_what_one_kind_does(mesh: Mesh) -> None:
    one, two = ClusterCosts(Cluster("h100", 2)), ClusterCosts(Cluster.of(Cluster("h100"), Cluster(TWIN)))
    node = _product(2048)
    for place in range(mesh["pp"]):
        here = two.at(mesh, place)
        assert here.node_seconds(node) == one.node_seconds(node)
        assert here.accumulate_seconds(1e6) == one.accumulate_seconds(1e6)
        assert here.optimizer_seconds(1e6) == one.optimizer_seconds(1e6)
        for axes in (["dp"], ["tp"], ["dp", "tp"], ["pp"]):
            ranks = mesh.peers(0, axes)
            for name in COLLECTIVES if len(ranks) > 1 else ():
                assert here.group_seconds(name, 1e8, ranks) == one.group_seconds(name, 1e8, ranks)
            if len(ranks) > 1:
                assert here.lost_seconds(0.01, ranks) == one.lost_seconds(0.01, ranks)


def test_ranks_cost_what_the_slowest_of_their_devices_does() -> None:
    node, mesh = _product(4096), Mesh(pp=3, tp=8)
    a, h, both = (ClusterCosts(one) for one in (Cluster("a100", 3), Cluster("h100", 3), MIXED))
    assert [both.at(mesh, place).node_seconds(node) for place in range(3)] == [
        a.node_seconds(node), a.node_seconds(node), h.node_seconds(node),
    ]  # fmt: skip
    inner = mesh.peers(0, ["tp"])
    assert both.at(mesh, 2).group_seconds("all_reduce", 1e8, inner) == h.group_seconds("all_reduce", 1e8, inner)
    assert both.at(mesh, 2).at(Mesh(dp=24), 0) == both.at(mesh, 2)  # what is placed stays there
    # tensor parallelism over both kinds
    over = both.at(Mesh(dp=3, tp=8), 0)
    slowest = max(a.node_seconds(node), h.node_seconds(node))
    assert over.node_seconds(node) == slowest == over.only(A100).node_seconds(node)
    assert over.only(H100).node_seconds(node) == h.node_seconds(node)
    assert over.crossed(inner) == (Cluster("a100").group_of(range(8)), Cluster("h100").group_of(range(8)))
    assert over.group_seconds("all_reduce", 1e8, inner) == a.group_seconds("all_reduce", 1e8, inner)
    two = both.at(Mesh(dp=2, tp=12), 0)  # a group of tp over both kinds, beside one of A100
    assert two.crossed(tuple(range(12)))[-1] == MIXED.group_of(range(12, 24))


def test_nothing_undercuts_the_fastest_of_both() -> None:
    node, least = _product(4096), FastestCosts.of_kinds(MIXED, "error")
    assert least.node_seconds(node) == ClusterCosts(Cluster("h100", 3)).node_seconds(node)
    assert least.at(Mesh(dp=24), 0) is least and least.overlaps and least.cores is None and not least.guessed(node)
    ranks = tuple(range(8))
    for price in (
        lambda of: of.group_seconds("all_reduce", 1e8, ranks),
        lambda of: of.send_seconds(1e8, 0, 8),
        lambda of: of.accumulate_seconds(1e8),
        lambda of: of.optimizer_seconds(1e8),
    ):
        assert price(least) <= min(price(ClusterCosts(MIXED)), price(ClusterCosts(Cluster("h100", 3))))


# -- as a person writes it


def test_a_cluster_as_text_and_as_a_file(tmp_path: Path) -> None:
    assert read_cluster("a100:2+h100:1") == MIXED == read_cluster("a100:2+h100")
    assert read_cluster("h100", 2, 4) == Cluster("h100", 2, 4) == read_cluster("h100:2:4")
    assert read_cluster("rtx-4090,rtx-3090") == Cluster(["rtx-4090", "rtx-3090"])
    document = {"parts": [{"gpu": "a100", "nodes": 2}, {"gpu": "h100"}]}
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(document))
    assert read_cluster(document) == read_cluster(path) == MIXED
    cards = {"parts": [{"gpu": ["rtx-4090", "rtx-3090"], "network_gb_per_second": 2.5}]}
    assert read_cluster(cards).kinds[0][0].network_bytes_per_second == 1.25e9
    device = {"name": "own", "tflops": {"bf16": 1, "fp32": 1}, "memory_gb": 1, "memory_gb_per_second": 1,
              "link_gb_per_second": 1, "network_gb_per_second": 1}  # fmt: skip
    assert read_cluster(device, 2) == Cluster(device, 2)
    assert read_cluster({"parts": [{"gpu": device, "gpus_per_node": 2}, {"gpu": "h100"}]}).size == 10


@pytest.mark.parametrize(
    ("given", "nodes", "said"),
    [
        ("a100:2+h101", 1, "unknown hardware 'h101'"),
        ("a100:0+h100", 1, "0 nodes of 8"),
        ("a100+h100", 2, "write NODES behind each kind"),
        ("a100:2", 2, "leave --nodes"),
        ("a100:x", 1, "is not KIND"),
        ("a100:1:8:3+h100", 1, "is not KIND"),
        ({"parts": []}, 1, "parts: List should have at least 1 item"),
        ({"parts": [{"gpu": "h100", "nodes": 0}]}, 1, "greater than or equal to 1"),
        ({"parts": [{"gpu": "h100", "node": 2}]}, 1, "Extra inputs are not permitted"),
        ({"parts": [{"gpu": "h100"}]}, 3, "leave --nodes"),
        ("nowhere.json", 1, "cannot be read"),
    ],
    ids=["kind", "none", "nodes", "twice", "text", "four", "empty", "zero", "extra", "both", "file"],
)
def test_what_describes_no_cluster(given: object, nodes: int, said: str) -> None:
    with pytest.raises(CompileError, match="QN210") as caught:
        read_cluster(given, nodes)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_closed_forms_are_of_one_kind() -> None:
    from benchmarks.closed_forms.step_time import StepModel
    from benchmarks.closed_forms.transformer import Decoder, ParallelLayout

    model = Decoder(4, 1024, 4096, 16, 32000, 1024)
    with pytest.raises(CompileError, match="several kinds of devices"):
        StepModel(model, ParallelLayout(dp=24, global_batch=24), MIXED).step()
    assert quintnet.Cluster is Cluster
