"""Copies between a device and its host: their order in a function, what they do without a device, their prices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from quintnet_compiler.core.annotations import Facts, Leaf, annotate
from quintnet_compiler.core.errors import Where
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts, FastestCosts
from quintnet_compiler.cost_models.hardware import HARDWARE
from quintnet_compiler.features.offload.activations import MIN_OFFLOAD_BYTES
from quintnet_compiler.features.offload.checks.activations import check_offload
from quintnet_compiler.ops.copies import COPIES, WAYS, copy_in, copy_out
from quintnet_compiler.passes.overlap.copies import with_copies
from quintnet_compiler.passes.overlap.items import Start, node_of, stored_in
from quintnet_compiler.runtime.transport.host_copies import HostCopies, host_room

aten = torch.ops.aten


def _function(blocks: int, way: object) -> list[fx.Node]:
    """A product for each block; a copy behind each one, of its result, or before it, for it."""
    graph, nodes = fx.Graph(), list[fx.Node]()
    given = graph.placeholder("x")

    def put(number: int, target: Any, *args: Any) -> fx.Node:
        known = Facts(torch.empty(8, 8, device="meta"), Where(f"layers.{number}"))
        nodes.append(annotate(graph.create_node("call_function", target, args), known))
        return nodes[-1]

    for number in range(blocks):
        if way is copy_in:
            put(number, aten.mm.default, put(number, copy_in, given, torch.device("cpu")), given)
        else:
            put(number, copy_out, put(number, aten.mm.default, given, given))
    return nodes


def _places(nodes: list[fx.Node], copy: float) -> dict[str, int]:
    """How many products there are between the start and the end of each copy."""
    order = with_copies(nodes, lambda node: copy if node.target in COPIES else 1.0)
    products, begun, found = 0, dict[fx.Node, int](), dict[str, int]()
    for item in order:
        if isinstance(item, Start):
            begun[item.node] = products
        elif item.target in COPIES:
            found[item.name] = products - begun.get(item, products)
        products += node_of(item).target is aten.mm.default
    return found


def test_what_leaves_is_waited_for_when_it_is_gone() -> None:
    assert list(_places(_function(5, copy_out), 1.0).values()) == [1, 1, 1, 1, 0]


def test_what_leaves_slowly_is_waited_for_a_block_later() -> None:
    """Else more and more memory would be on its way."""
    assert max(_places(_function(8, copy_out), 5.0).values()) == 1


def test_what_returns_starts_in_time_and_no_sooner() -> None:
    """A price is an estimate: twice as long before it is read. Never two blocks ahead."""
    assert list(_places(_function(5, copy_in), 0.5).values()) == [0, 1, 1, 1, 1]
    assert max(_places(_function(8, copy_in), 5.0).values()) == 1


@pytest.mark.parametrize("held", [None, torch.float64], ids=["as it is", "of more bits"])
def test_gathers_read_parameters_through_copies(held: torch.dtype | None) -> None:
    """A cast is one of a parameter where the program makes it, and the user's own operator otherwise."""
    graph, known = fx.Graph(), Facts(torch.empty(8), leaf=Leaf("parameter", "w", held=held))
    w = annotate(graph.placeholder("w"), known)
    copy = annotate(graph.call_function(copy_in, (w, torch.device("cpu"))), Facts(torch.empty(8)))
    cast = annotate(
        graph.call_function(aten._to_copy.default, (copy,), {"dtype": torch.float16}), Facts(torch.empty(8))
    )
    product = annotate(graph.call_function(aten.mul.Tensor, (copy, 2)), Facts(torch.empty(8)))
    assert stored_in(w) is stored_in(copy) is w and stored_in(product) is None
    assert stored_in(cast) is (None if held is None else w)


def test_without_an_accelerator_a_copy_is_a_plain_one() -> None:
    copies, x = HostCopies(), torch.randn(3, 4).t()
    wait = copies.start_copy_out(x, 0)
    x.zero_()
    out = wait()
    assert out.stride() == x.stride() and bool(out.any()) and not copies.streams
    assert torch.equal(copies.copy_in(out, torch.device("cpu"), 0), out)
    assert copies.copy_out(torch.empty(2, device="meta"), 0).is_meta


def test_what_generated_code_calls_has_a_way() -> None:
    assert {name.removeprefix("start_") for name in WAYS} == {"copy_out", "copy_in", "write_out", "read_in"}
    assert (
        set(WAYS.values()) == {"to host", "from host", "to disk", "from disk"}
        and MIN_OFFLOAD_BYTES == 1024
        and callable(check_offload)
    )


@pytest.mark.parametrize("name", ["a100", "h100", "gh200-96", "gb200"])
def test_a_copy_is_priced_by_the_link_to_the_host(name: str) -> None:
    """NVLink-C2C is much faster than PCIe."""
    device = HARDWARE[name]
    costs = ClusterCosts(Cluster(name))
    rate = {"a100": 32e9, "h100": 64e9, "gh200-96": 450e9, "gb200": 225e9}[name]
    assert device.host_bytes_per_second == rate
    assert costs.copy_seconds(1e9) == pytest.approx(1e9 / (0.8 * rate), rel=1e-3)
    assert FastestCosts((costs,)).copy_seconds(1e9) == costs.copy_seconds(1e9)


def test_memory_of_the_host_is_pinned_for_an_accelerator_alone() -> None:
    plain = host_room((3, 4), torch.float32, torch.device("cpu"))
    assert plain.shape == (3, 4) and not plain.is_pinned()
    assert host_room((3,), torch.float32, torch.device("meta")).is_meta
