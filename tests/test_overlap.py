"""Communication beside computing: the same bits, within the stated memory, and nothing is read before it is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

import quintnet
from quintnet import CompileError, Mesh
from quintnet_compiler.checks.code import check_code
from quintnet_compiler.checks.rewrites.overlap import check_overlap
from quintnet_compiler.core.annotations import has_facts
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts
from quintnet_compiler.cost_models.hardware import H100
from quintnet_compiler.equivalence.dry_run import check_ranks
from quintnet_compiler.ir.distributed_program import DistributedProgram
from quintnet_compiler.ir.repeated_blocks import block_of
from quintnet_compiler.ops.collectives import STARTS, wait
from quintnet_compiler.ops.rules.work import takes_long
from quintnet_compiler.simulation.program import simulate_program
from quintnet_compiler.simulation.work import ActionWork, WorkPart

from .models import CASES, build
from .mutations import as_mutant, copied, piece_copied, rebuilt

pytestmark = pytest.mark.usefixtures("shared_captures")

torch.set_num_threads(1)


def _compile(name: str, axes: dict[str, int], **options: Any) -> quintnet.CompiledProgram:
    case = CASES[name]
    return quintnet.compile(build(name), Mesh(**axes), case.batch(8), loss_fn=case.loss_fn, **options)


def _starts(program: quintnet.CompiledProgram) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in program._primary().program.source.graph.nodes:
        if node.target in STARTS.values():
            name = str(node.target._opname)
            found[name] = found.get(name, 0) + 1
    return found


LAYOUTS: list[tuple[str, dict[str, int], dict[str, Any], str]] = [
    ("gpt", {"tp": 2}, {"sequence_parallel": False}, "start_all_reduce_"),
    ("gpt", {"pp": 2, "tp": 2}, {"microbatches": 2, "schedule": "zb-h1", "recompute": "full"}, "start_reduce_scatter"),
    ("gpt", {"dp": 2}, {"microbatches": 2, "zero": 3, "recompute": "selective"}, "start_gather_together"),
    ("gpt", {"dp": 2}, {"microbatches": 2, "zero": 3, "reshard_after_forward": False}, "start_scatter_together"),
    ("mixture", {"ep": 2}, {}, "start_dispatch"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "axes", "options", "kind"), LAYOUTS, ids=str)
def test_the_order_changes_no_bit(name: str, axes: dict[str, int], options: dict[str, Any], kind: str) -> None:
    found = []
    for overlap in (True, False):
        program = _compile(name, axes, overlap=overlap, **options)
        assert (kind in _starts(program)) == overlap
        loss = program.step(CASES[name].batch(8))
        gradients = [p.grad.full_tensor() for p in program.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        found.append([loss, *gradients])
    assert len(found[0]) >= 10 and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_parameters_are_gathered_one_block_ahead_of_their_use(recompute: str) -> None:
    program = _compile("gpt", {"dp": 2}, microbatches=2, zero=3, recompute=recompute)
    stage = program.ranks[0].stages[0]
    for piece in (stage.forward, stage.backward):
        ahead: set[object] = set()  # the blocks whose gathers have started and whose products have not
        beside: dict[object, set[object]] = {}  # what was ahead when a block's first product ran
        for node in piece.module.graph.nodes:
            block = block_of(node) if has_facts(node) else None
            if block is not None and "gather_together" in str(node.target):
                ahead.add(block)
            elif block is not None and takes_long(node):
                ahead.discard(block)
                beside.setdefault(block, set(ahead))
            assert len(ahead) <= 2  # of two, one is whole, and its first product comes next
        blocks = list(beside)
        assert [beside[block] for block in blocks] == [*({following} for following in blocks[1:]), set()]
        assert len(blocks) == 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_block_of_gradients_is_under_way(recompute: str) -> None:
    program = _compile("gpt", {"dp": 2}, microbatches=2, zero=3, recompute=recompute)
    open_now, started = set[fx.Node](), 0
    for node in program.ranks[0].stages[0].backward.module.graph.nodes:
        if node.target == "start_scatter_together":
            open_now.add(node)
            started += 1
        elif node.target == "wait":
            open_now.discard(node.args[1])
        assert len(open_now) <= 1
    assert started >= 3


def test_products_hide_what_tensor_parallelism_sends() -> None:
    """Between a start and its wait there is a product: the weight's gradient beside that of the input."""
    program = _compile("gpt", {"tp": 2}, sequence_parallel=False)
    nodes = list(program._primary().program.source.graph.nodes)
    waits = [node for node in nodes if node.target is wait]
    assert len(waits) == 7  # two for each of three blocks, and one for the head
    for node in waits:
        between = nodes[nodes.index(node.args[0]) + 1 : nodes.index(node)]
        assert any(takes_long(one) for one in between)
        assert len({block_of(one) for one in [node.args[0], node, *between]} - {None}) <= 1


# -- what is not so is noticed


def _victim() -> DistributedProgram:
    return _compile("gpt", {"tp": 2}, sequence_parallel=False)._primary().program


def _drop_wait(node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]
    node.graph.erase_node(node)


def _read_early(node: fx.Node) -> None:
    user = next(iter(node.users))
    user.replace_input_with(node, node.args[1])  # type: ignore[arg-type]


def _wait_twice(node: fx.Node) -> None:
    with node.graph.inserting_after(node):
        again = node.graph.node_copy(node)
    next(iter(node.users)).replace_input_with(node, again)


def _drop_start(node: fx.Node) -> None:
    begun = node.args[1]
    assert isinstance(begun, fx.Node)
    node.args = (node.args[0], begun.args[1], node.args[2])


def _hand_out(node: fx.Node) -> None:
    """The wait is left to another function."""
    output = node.graph.output_node()
    output.args = ((*output.args[0], node.args[1]),)  # type: ignore[misc]


@pytest.mark.sample(2)
@pytest.mark.parametrize("change", [_drop_wait, _read_early, _wait_twice, _drop_start, _hand_out])
def test_a_start_without_its_wait_is_refused(change: Callable[[fx.Node], None]) -> None:
    """By the check of generated code; and where a wait or a start is gone, ranks notice when they meet, too."""
    mutant = _changed(_victim(), change)
    for check in (check_code, check_ranks) if change in (_drop_wait, _drop_start) else (check_code,):
        with pytest.raises(CompileError) as caught:
            check(mutant)
        assert caught.value.code == "QN209"


def _changed(program: DistributedProgram, change: Callable[[fx.Node], None]) -> DistributedProgram:
    piece, _ = piece_copied(program.stages[0].backward)
    change(next(n for n in piece.module.graph.nodes if n.target == "wait"))
    piece = rebuilt(piece)
    return as_mutant(program, stages=(replace(program.stages[0], backward=piece), *program.stages[1:]))


def test_the_pass_is_checked_against_what_it_was_given() -> None:
    before, after = (
        _compile("gpt", {"tp": 2}, sequence_parallel=False, overlap=overlap)._primary().program.source
        for overlap in (False, True)
    )
    check_overlap(before, after)
    mutant, new = copied(after)
    first, second = [new[n] for n in after.graph.nodes if n.target in STARTS.values()][:2]
    first.args, second.args = (*second.args[:2], *first.args[2:]), first.args
    with pytest.raises(CompileError, match="reads something else"):
        check_overlap(before, mutant)
    mutant, new = copied(after)
    node = next(new[n] for n in after.graph.nodes if n.target is wait)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    with pytest.raises(CompileError, match="under way"):
        check_overlap(before, mutant)


# -- what it is predicted to bring


def test_a_wait_takes_what_is_left() -> None:
    done = ActionWork(
        (
            WorkPart(1.0),
            WorkPart(2.0),
            WorkPart(5.0, "dp", "a", ahead=1),
            WorkPart(4.0),
            WorkPart(3.0, "dp", "b", ahead=3),
        )
    )
    # both start after the first second; b follows a on the links of dp
    assert [part.seconds for part in done.waited] == [1.0, 2.0, 3.0, 4.0, 0.0]
    assert [(h.offset, h.seconds, h.name) for h in done.hidden] == [(1.0, 5.0, "a"), (6.0, 3.0, "b")]
    slow = done.scaled(1.0, {"dp": 2.0})
    assert [part.seconds for part in slow.waited] == [1.0, 2.0, 8.0, 4.0, 2.0]
    assert done.scaled(2.0, {}).seconds == 2.0 + 4.0 + 1.0 + 8.0


def test_a_simulated_step_is_shorter() -> None:
    case = CASES["gpt"]
    device = replace(H100, efficiency=replace(H100.efficiency, host_seconds=0.0))  # the host hides all in a small model
    costs = ClusterCosts(Cluster(device))
    exposed, seconds, names = {}, {}, {}
    for overlap in (True, False):
        program = quintnet.compile(
            build("gpt"), Mesh(dp=8), case.batch(64), loss_fn=case.loss_fn, zero=3, overlap=overlap
        )
        report = simulate_program(program._primary().program, costs)
        exposed[overlap], seconds[overlap] = report.exposed["dp"], report.seconds
        row = report.rows[0]
        names[overlap] = sum(e.seconds for e in row.events if e.kind == "collective" and not e.exposed)
    assert seconds[True] < seconds[False]
    # what is hidden takes some of computing's multiprocessors and memory traffic
    kept = 1 - costs.cluster.device.efficiency.contention
    assert seconds[False] - seconds[True] == pytest.approx(kept * (exposed[False] - exposed[True]))
    assert names[True] > 0 == names[False]
