"""passes.overlap.gather_early, checks.rewrites.early: parameters that arrive while a forward computes."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

import quintnet
from quintnet_compiler.checks.rewrites.early import check_early
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.ir.builder import aten
from quintnet_compiler.ir.program import DifferentiatedProgram
from quintnet_compiler.ops.collectives import gather_early, gather_states
from quintnet_compiler.ops.rank_local import arrived
from quintnet_compiler.passes.overlap.gather_early import GatherEarly
from quintnet_compiler.runtime.execute.comm import Comm
from quintnet_compiler.runtime.transport.local import LocalTransport, LocalWorld

from .graphs import builder, leaf


def _program(*, read_at_start: bool = False) -> DifferentiatedProgram:
    """Two parameters that are gathered when a step begins; each is read twice."""
    to = builder()
    x, v, w = leaf(to, "input", "x", 4, 4), leaf(to, "parameter", "v", 2, 4), leaf(to, "parameter", "w", 2, 4)
    both = to.call(gather_states, [v, w], "dp", 2, [0, 0], [1, 1])
    first, second = (to.getitem(both, i) for i in range(2))
    once = {both, first, second}
    if read_at_start:
        once.add(to.call(aten.relu.default, second))
    y = to.call(aten.mm.default, to.call(aten.mm.default, x, first), second)
    z = to.call(aten.mm.default, to.call(aten.mm.default, y, second), first)
    to.output((z, *(once - {both, first, second})))
    stage = {node: 0 for node in to.graph.nodes if node.op == "call_function"}
    local: Any = None
    return DifferentiatedProgram(local, to.graph, (z,), stage, frozenset(once), {}, {}, {})


def _targets(program: DifferentiatedProgram) -> list[Any]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


def test_each_is_waited_for_where_it_is_first_read() -> None:
    before = _program()
    after = GatherEarly()(before)
    check_early(after)
    mm, get = aten.mm.default, operator.getitem
    assert _targets(after) == [gather_early, get, get, arrived, mm, arrived, mm, mm, mm]
    assert sum(node in after.once for node in after.graph.nodes) == 3


def test_padding_is_taken_off_behind_the_wait() -> None:
    """Of three rows over two ranks the last one is padding: what is read is a view without it."""
    to = builder()
    x, w = leaf(to, "input", "x", 4, 4), leaf(to, "parameter", "w", 2, 4)
    both = to.call(gather_states, [w], "dp", 2, [0], [1])
    first = to.getitem(both, 0)
    true = to.call(aten.slice.Tensor, first, 0, 0, 3)
    y = to.call(aten.linear.default, x, true)
    to.output((y,))
    stage = {node: 0 for node in to.graph.nodes if node.op == "call_function"}
    local: Any = None
    once = frozenset({both, first, true})
    after = GatherEarly()(DifferentiatedProgram(local, to.graph, (y,), stage, once, {}, {}, {}))
    check_early(after)
    names = [gather_early, operator.getitem, arrived, aten.slice.Tensor, aten.linear.default]
    assert _targets(after) == names
    assert [node.target for node in after.graph.nodes if node in after.once] == names[:2]


def test_what_else_a_step_begins_with_needs_it_at_once() -> None:
    before = _program(read_at_start=True)
    assert GatherEarly()(before) is before


def _renamed(program: DifferentiatedProgram, old: Any, new: Any) -> DifferentiatedProgram:
    for node in program.graph.nodes:
        node.target = new if node.target is old else node.target
    return program


def test_whatever_reads_it_on_its_way_is_found() -> None:
    with pytest.raises(CompileError, match="while it is under way") as found:
        check_early(_renamed(_program(), gather_states, gather_early))
    assert found.value.code == "QN209"
    with pytest.raises(CompileError, match="which nothing started"):
        check_early(_renamed(GatherEarly()(_program()), gather_early, gather_states))
    late = GatherEarly()(_program())
    with pytest.raises(CompileError, match="starts in each microbatch"):
        check_early(replace(late, once=frozenset()))
    (wait, _) = (node for node in late.graph.nodes if node.target is arrived)
    with pytest.raises(CompileError, match="in another function"):
        check_early(replace(late, stage={**late.stage, wait: 1}))


def test_a_message_is_waited_for_once() -> None:
    waited: list[int] = []

    class Slow(LocalTransport):
        def begin_gather(self, xs: Any, *how: Any) -> Any:
            return tuple(x + 1 for x in xs), lambda: waited.append(len(xs))

    comm = Comm(Slow(LocalWorld(Mesh(dp=2)), 0), Mesh(dp=2), {"dp": 0})
    first, second = comm.gather_early([torch.zeros(2), torch.ones(2)], "dp", [0, 0], [1, 1], 0)
    assert waited == []
    for x in (first, second, first):
        assert comm.arrived(x, 0) is x and waited == [2]
    (third,) = comm.gather_early([torch.zeros(2)], "dp", [0], [1], 0)
    comm.wait_for_gathers()  # nobody read it
    assert waited == [2, 1] and comm.arrived(third, 0) is third


def _functions(**options: Any) -> dict[str, fx.Graph]:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    batch = (torch.randn(8, 8), torch.randn(8, 8))
    loss = torch.nn.functional.mse_loss
    program = quintnet.compile(model, Mesh(dp=2), batch, loss_fn=loss, check="off", **options)
    return {name: piece.module.graph for name, piece in program.ranks[0].stages[0].pieces.items()}


@pytest.mark.parametrize("zero", [1, 2])
def test_the_first_product_needs_one_parameter(zero: int) -> None:
    made = _functions(zero=zero, microbatches=2, bucket_mib=1e-4)
    assert [n.target for n in made["once"].nodes if n.op == "call_method"] == ["gather_early"] * 3
    names = [
        str(n.target).rpartition(".")[2] for n in made["forward"].nodes if n.op in ("call_method", "call_function")
    ]
    order = [name for name in names if name in ("arrived", "linear") or "linear" in name]
    assert order[:4] == ["arrived", order[1], "arrived", order[1]]
    assert not any(n.target == "arrived" for n in made["backward"].nodes)  # it reads what the forward waited for
    assert "gather_states" in [n.target for n in _functions(zero=zero, overlap=False)["once"].nodes]
