"""checks.positions: what attention in tiles and in a ring, and random operators, are told, compared with the
program's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from quintnet_compiler.checks.positions import check_positions
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.sharding import I, S
from quintnet_compiler.ir.program import Axis, LocalProgram, ShardedProgram, StagedProgram, Strategy
from quintnet_compiler.ops.attention.operator import attention
from quintnet_compiler.ops.attention.ring_plan import ring_plan
from quintnet_compiler.ops.attention.tiled import tiled_attention
from quintnet_compiler.ops.collectives import ring_attention
from quintnet_compiler.ops.rank_local import dropout, keep_mask, local_noise, noise
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.lowering.insert_communication import InsertCommunication

from ..one_operator import as_program
from .graphs import builder, leaf

aten = torch.ops.aten
CP = Axis("cp", 2, "context")
KEYS = (I, I)
GATHERED = Strategy((S(2), *KEYS, I), (S(2),), "split s 1")
RING = Strategy((S(2), S(2), S(2), I), (S(2),), "split s+t 1")


def _lowered(strategy: Strategy, mask: str = "causal_window_3") -> LocalProgram:
    """Attention with documents, of which each rank has half of the queries."""
    to = builder()
    given = [leaf(to, "input", name, 1, 2, 8, 4) for name in "qkv"]
    given.append(leaf(to, "input", "segments", 1, 8, dtype=torch.int64))
    node = to.call(attention, *given[:3], None, given[3], scale=0.5, mask=mask)
    to.output((node,))
    program = as_program(to)
    strategies: dict[fx.Node, Any] = {
        x: (Strategy((), (kind,)),) for x, kind in zip(given, strategy.inputs, strict=True)
    }
    strategies |= {node: (strategy,), program.graph.output_node(): (Strategy(strategy.outputs, ()),)}
    staged = StagedProgram(ShardedProgram(program, (CP,), strategies), 1, {node: 0})
    return InsertCommunication(dict(RULES), attention_tile_bytes=16)(staged)


def _made(local: LocalProgram) -> fx.Node:
    return next(n for n in local.graph.nodes if n.target in (ring_attention, tiled_attention))


@pytest.mark.parametrize(("strategy", "target"), [(GATHERED, tiled_attention), (RING, ring_attention)], ids=str)
def test_attention_that_is_the_programs_own_passes(strategy: Strategy, target: Any) -> None:
    local = _lowered(strategy)
    assert _made(local).target is target
    check_positions(local)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k", "v"), ("q", "k"), ("padding", "segments"), ("segments", None), ("groups", "segments"), ("scale", 0.25),
        ("mask", "causal"), ("mask", "causal_window_4"), ("whole", 16), ("axes", []), ("axes", ["tp"]), ("sizes", [4]),
        ("parts", [2]), ("axis", "tp"),
        ("size", 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("strategy", [GATHERED, RING], ids=["tiles", "ring"])
def test_each_argument_that_is_another_one_is_told(strategy: Strategy, name: str, value: Any) -> None:
    local = _lowered(strategy)
    made = _made(local)
    names = [one.name for one in made.target._schema.arguments]  # type: ignore[union-attr]
    if name not in names:
        return
    given = dict(zip(names, made.args, strict=True))
    made.args = tuple((given | {name: given.get(value, value) if isinstance(value, str) else value}).values())
    with pytest.raises(CompileError, match=rf"QN209[^!]*{name}="):
        check_positions(local)


def _given(node: fx.Node) -> dict[str, Any]:
    return dict(zip([one.name for one in node.target._schema.arguments], node.args, strict=True))  # type: ignore[union-attr]


@pytest.mark.parametrize("change", ["", "q", "v", "out", "plan", "axis", "dim", "another"])
def test_a_ring_reads_and_makes_the_runs_that_a_plan_assigns(change: str) -> None:
    local = _lowered(RING, "causal")
    made = _made(local)
    given = _given(made)
    plan = given["plan"]
    assert plan.target is ring_plan
    if change in ("q", "v"):
        made.args = tuple((given | {change: given[change].args[0]}).values())
    elif change == "plan":
        made.args = tuple((given | {"plan": None}).values())
    elif change in ("axis", "dim"):
        x, axis, size, dim, by = given["k"].args
        given["k"].args = (x, "tp", size, dim, by) if change == "axis" else (x, axis, size, 1, by)
    elif change == "another":  # the same, but of another call
        with local.graph.inserting_before(given["k"]):
            again = local.graph.node_copy(plan)
        given["k"].args = (*given["k"].args[:4], again)
    elif change == "out":
        node = next(key for key in local.parts if key[0].target is attention)
        local.parts[node] = local.parts[node].all_input_nodes[0]  # type: ignore[index]
    if not change:
        check_positions(local)
        return
    with pytest.raises(CompileError, match="does not have the positions"):
        check_positions(local)


@pytest.mark.parametrize(
    ("name", "value"),
    [("segments", None), ("padding", "segments"), ("mask", "all"), ("whole", 16), ("ranks", 4), ("runs", 3)],
)
def test_a_plan_of_other_work_is_told(name: str, value: Any) -> None:
    local = _lowered(RING, "causal")
    plan = _given(_made(local))["plan"]
    given = _given(plan)
    plan.args = tuple((given | {name: given.get(value, value) if isinstance(value, str) else value}).values())
    with pytest.raises(CompileError, match=rf"QN209[^!]*{name}="):
        check_positions(local)


def _drawn() -> LocalProgram:
    """Noise and a dropout of rows that two axes split."""
    to = builder()
    x = leaf(to, "input", "x", 8, 4)
    made = to.call(noise, [8, 4], "normal", 0, dtype=torch.float32, device=torch.device("cpu"))
    kept = to.call(dropout, to.call(aten.add.Tensor, x, made), 0.25, op=1)
    to.output((kept,))
    program = as_program(to)
    axes = (Axis("dp", 2, "data"), Axis("mb", 2, "time"))
    strategies: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        inputs = len(node.all_input_nodes)
        strategies[node] = (Strategy((S(0),) * inputs, () if node.op == "output" else (S(0),), "split"),) * 2
    staged = StagedProgram(ShardedProgram(program, axes, strategies), 1, {})
    return InsertCommunication(dict(RULES))(staged)


def test_random_operators_that_are_the_programs_own_pass() -> None:
    check_positions(_drawn())


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [
        (local_noise, "kind", "uniform"), (local_noise, "op", 1), (local_noise, "whole", [4, 4]),
        (local_noise, "axes", ["mb", "dp"]), (local_noise, "dims", [0, 1]), (local_noise, "parts", [2, 1]),
        (local_noise, "dtype", torch.float64), (keep_mask, "p", 0.5), (keep_mask, "op", 0), (keep_mask, "axes", ["dp"]),
        (keep_mask, "sizes", [2, 4]),
    ],
    ids=str,
)  # fmt: skip
def test_each_argument_of_a_random_operator_that_is_another_one_is_told(target: Any, name: str, value: Any) -> None:
    local = _drawn()
    (made,) = (node for node in local.graph.nodes if node.target is target)
    names = [one.name for one in target._schema.arguments]
    made.args = tuple((dict(zip(names, made.args, strict=True)) | {name: value}).values())
    with pytest.raises(CompileError, match=rf"QN209[^!]*{name}="):
        check_positions(local)


def test_a_dropout_without_its_mask_is_told() -> None:
    local = _drawn()
    (made,) = (node for node in local.graph.nodes if node.target is aten.native_dropout_backward.default)
    made.args = (*made.args[:2], 1.0)
    with pytest.raises(CompileError, match=r"QN209[^!]*is not dropout with its mask"):
        check_positions(local)
