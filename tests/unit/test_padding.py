"""Sizes that do not divide: core.sharding and core.slices with padding, passes.lowering.padding, checks.padding,
runtime.state.true_part. Which masks are put where, and that the check misses each one that is taken away."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from quintnet_compiler.checks.padding import check_padding
from quintnet_compiler.checks.padding_nodes import Fill, Resize, dims_with_padding, local_shapes, peel
from quintnet_compiler.core import slices
from quintnet_compiler.core.annotations import shape
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.sharding import AxisType, I, P, R, S, Shard, local_shape, parse_type
from quintnet_compiler.ir.builder import aten
from quintnet_compiler.ir.program import Axis, LocalProgram, ShardedProgram, StagedProgram, Strategy
from quintnet_compiler.ops.rank_local import padding_of
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.lowering.insert_communication import InsertCommunication
from quintnet_compiler.passes.lowering.padding import Padding
from quintnet_compiler.runtime.state.true_part import TruePart
from quintnet_compiler.strategies.cuts import find_cuts
from quintnet_compiler.strategies.padding_fills import padded_dims, padding_fills
from quintnet_compiler.strategies.rule_book import RuleBook, factor_splits, strategies

from .graphs import TP, builder, factors_of, leaf, program

BOOK = RuleBook(RULES)


@pytest.mark.parametrize(
    ("size", "kind", "ranks", "chunk"),
    [
        (7, S(0), 2, 4),
        (5, S(0), 4, 2),
        (2, S(0), 4, 1),
        (24, S(0, 1, 8), 2, 16),
        (18, S(0, 2, 3), 2, 12),
        (8, S(0), 2, 4),
    ],
)
def test_every_index_is_on_one_rank(size: int, kind: Shard, ranks: int, chunk: int) -> None:
    """Ranks hold full chunks first, then what is left, then nothing, as torch.chunk gives units."""
    assert local_shape((size,), (kind,), (ranks,)) == (chunk,) and parse_type(str(kind)) == kind
    x = torch.arange(1, size + 1)
    parts = {(i,): slices.take_all(x, (kind,), (ranks,), (i,)) for i in range(ranks)}
    assert torch.equal(slices.assemble(parts, (kind,), (ranks,), (size,)), x)
    whole = x.view(kind.parts, -1, kind.unit)
    per_rank = chunk // kind.parts // kind.unit
    for i, part in enumerate(parts.values()):
        mine = whole[:, i * per_rank : (i + 1) * per_rank].flatten()
        assert part[part > 0].tolist() == mine.tolist()
        (where,) = slices.positions((size,), (kind,), (ranks,), (i,))
        assert torch.equal(where + 1, part)  # -1: padding, which is 0
        if (kind.parts, kind.unit) == (1, 1):
            true = TruePart.on_rank((size,), (kind,), (Axis("tp", ranks, "model"),), {"tp": i})
            assert true.of_padded(part).tolist() == mine.tolist() == (true.positions[0] + 1).tolist()
            chunks = torch.chunk(x, ranks)
            assert mine.tolist() == (chunks[i].tolist() if i < len(chunks) else [])


def test_how_ranks_may_split_what_does_not_divide() -> None:
    to = builder()
    x = leaf(to, "input", "x", 4, 24)
    heads = to.reshape(x, [4, 3, 8])
    made = program(to, heads)
    factors = factors_of(made.graph)
    inside = find_cuts(made.graph, factors)[x]
    assert inside["d1"] == {3}
    assert list(factor_splits(factors[x], "d1", inside, 2)) == [
        (1, 0),
        (3, 0),
        (1, 8),
    ]  # rows; of each head; whole heads
    kinds = {s.label: (s.inputs[0], s.outputs[0], s.part) for s in strategies(heads, factors[heads], {}, 2)}
    assert kinds["split v1 1 1"] == (S(1, 1, 8), S(1), 2 / 3)
    assert "split v1 1" not in kinds


def test_dims_with_padding() -> None:
    assert padded_dims((7, 4), (S(0),), (TP,)) == dims_with_padding((7, 4), (S(0),), (TP,)) == {0}
    assert padded_dims((8, 4), (S(0),), (TP,)) == dims_with_padding((8, 4), (S(0),), (TP,)) == frozenset()
    assert local_shapes((24, 2), (S(0, 1, 8),), (TP,)) == [(24, 2), (16, 2)]


def _local(shapes: dict[str, tuple[int, ...]], label: str) -> LocalProgram:
    """linear(x, w, b), summed, with ``label`` over tp; everything else replicated."""
    to = builder()
    x, w, b = (leaf(to, "parameter", name, *size) for name, size in shapes.items())
    y = to.call(aten.linear.default, x, w, b)
    loss = to.call(aten.sum.default, to.call(aten.relu.default, y))
    made = program(to, loss)
    factors = factors_of(made.graph)
    chosen = {}
    for node, found in factors.items():
        options = strategies(node, found, {}, 2) if node.op == "call_function" else ()
        wanted = label if node is y else "replicated"
        chosen[node] = tuple(s for s in options if s.label == wanted)[:1] or (Strategy((), (R,), "replicated R"),)
    chosen[made.graph.output_node()] = (Strategy((I,), (), "leave"),)
    sharded = ShardedProgram(made, (TP,), chosen)
    calls = [n for n in made.graph.nodes if n.op == "call_function"]
    return InsertCommunication(dict(RULES))(StagedProgram(sharded, 1, dict.fromkeys(calls, 0)))


SIZES = {"x": (4, 6), "w": (5, 6), "b": (5,)}


@pytest.mark.parametrize(
    ("sizes", "label", "fills"),
    [
        (SIZES, "split o 1 1", 1),  # the gradient of the result is summed over o for that of x; weights were cut to it
        ({"x": (3, 6), "w": (5, 6), "b": (5,)}, "split b0 1 1", 1),  # rows: for the gradient of w
        ({"x": (4, 7), "w": (5, 7), "b": (5,)}, "split i 1 1", 0),  # both were made longer by zeros
        (SIZES, "split i 1", 0),
    ],
    ids=str,
)
def test_what_is_filled(sizes: dict[str, tuple[int, ...]], label: str, fills: int) -> None:
    local = _local(sizes, label)
    found = [n for n in local.graph.nodes if n.target is aten.masked_fill.Scalar]
    assert len(found) == fills
    check_padding(local, BOOK)
    for node in found:  # without it
        node.replace_all_uses_with(node.args[0])
        with pytest.raises(CompileError, match="padding check"):
            check_padding(_renamed(local, node), BOOK)


def _renamed(local: LocalProgram, gone: fx.Node) -> LocalProgram:
    """The program where what ``gone`` was filled in stands for it."""
    x = gone.args[0]
    parts = {key: x if n is gone else n for key, n in local.parts.items()}
    reads = {key: tuple(x if n is gone else n for n in found) for key, found in local.reads.items()}
    sharding = {**local.sharding, x: local.sharding.get(gone, ())}
    return replace(local, parts=parts, reads=reads, sharding=sharding)  # type: ignore[arg-type]


def test_fills_of_other_places_and_sizes_are_noticed() -> None:
    for wrong in ((1, 4), (1, 6)):  # another size of the whole
        local = _local(SIZES, "split o 1 1")
        (where,) = (n for n in local.graph.nodes if n.target is padding_of)
        where.update_arg(*wrong)
        with pytest.raises(CompileError, match="replaces"):
            check_padding(local, BOOK)
    local = _local(SIZES, "split o 1 1")
    longer = next(n for n in local.graph.nodes if n.target is aten.constant_pad_nd.default)
    longer.update_arg(1, [1, 0, *list(longer.args[1])[2:]])
    with pytest.raises(CompileError, match="QN209"):
        check_padding(local, BOOK)


def test_nodes_of_padding() -> None:
    to = builder()
    x = leaf(to, "input", "x", 2, 9)
    padding = Padding(to, (TP,))
    longer = padding.extended(x, 1, 3, 12, padded=False)
    shorter = padding.trimmed(longer, 1, 3, 9)
    assert shape(longer) == (2, 12) and shape(shorter) == (2, 9)
    assert peel(longer) == (x, Resize(1, 3, 9, 12)) and peel(shorter) == (longer, Resize(1, 3, 12, 9))
    assert padding.extended(x, 1, 1, 9, padded=False) is x and padding.trimmed(x, 0, 1, 2) is x
    kind: AxisType = S(1)
    filled = padding.filled(longer, (2, 23), (kind,), frozenset({1}))
    assert padding.filled(longer, (2, 23), (kind,), frozenset({1})) is filled
    found = peel(filled)
    assert found == (longer, Fill(1, 0.0, 12, (23, ["tp"], [2], [1], [1])))
    assert peel(to.reshape(x, [18])) is None and peel(to.call(aten.slice.Tensor, x, 1, 1, 3)) is None


def test_an_operator_that_works_on_each_index_alone_mixes_nothing() -> None:
    to = builder()
    x, y = leaf(to, "parameter", "x", 3, 4), leaf(to, "input", "y", 3, 4)
    made = to.call(aten.mul.Tensor, x, y)
    ratio = to.call(aten.div.Tensor, leaf(to, "parameter", "z", 1, 4), to.call(aten.exp.default, x))
    graph = program(to, made, ratio).graph
    factors = factors_of(graph)
    (rows,) = [s for s in strategies(made, factors[made], {}, 2) if s.label == "split b1 1 1"]
    alone = padding_fills(made, factors[made], [rows], [TP])
    assert not alone.any and alone.parameters == (frozenset({0}), frozenset({0}))  # a parameter's gradient there
    (rows,) = [s for s in strategies(ratio, factors[ratio], {}, 2) if s.label == "split b1 1 1"]
    broadcast = padding_fills(ratio, factors[ratio], [rows], [TP])
    assert broadcast.ones == (frozenset(), frozenset({0})) and broadcast.outputs == (frozenset({0}),)
    assert P not in rows.outputs


def test_code_names_no_device_by_its_number() -> None:
    """Wherever an operator takes a device: all ranks of a node run one program."""
    node = builder().call(padding_of, 3, 5, ["tp"], [2], [1], [1], torch.device("cpu", 0))
    assert node.args[-1] == torch.device("cpu") and node.args[-1].index is None
