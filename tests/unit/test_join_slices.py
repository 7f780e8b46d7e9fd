"""passes.lowering.join_slices, checks.rewrites.joined: sums of gradients of slices, and the proof that they are
joins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quintnet_compiler.checks.rewrites.joined import check_joined
from quintnet_compiler.core.absent_gpu import CPU
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.driver import pipeline
from quintnet_compiler.ir.builder import GraphBuilder, aten
from quintnet_compiler.ir.program import DifferentiatedProgram
from quintnet_compiler.passes.lowering.join_slices import JoinSlices

from .graphs import builder, leaf
from .unsplit import check_step

SIZE = 8
Make = Callable[[GraphBuilder, fx.Node, fx.Node], tuple[fx.Node, ...]]


def _slice(to: GraphBuilder, x: fx.Node, start: int, end: int, dim: int = 1, step: int = 1) -> fx.Node:
    """The gradient of a slice of [4, 8] (or [8, 4]), of which ``x`` is a part."""
    part = to.call(aten.slice.Tensor, x, dim, 0, -(-(end - start) // step))
    return to.call(aten.slice_backward.default, part, [4, SIZE], dim, start, end, step)


def _add(to: GraphBuilder, *terms: fx.Node) -> fx.Node:
    total = terms[0]
    for term in terms[1:]:
        total = to.call(aten.add.Tensor, total, term)
    return total


def _program(make: Make) -> DifferentiatedProgram:
    to = builder()
    x, y = leaf(to, "input", "x", 4, SIZE), leaf(to, "input", "y", 4, SIZE)
    to.backward = True
    made = make(to, x, y)
    to.output(made)
    stage = {node: 0 for node in to.graph.nodes if node.op == "call_function"}
    local: Any = type("Local", (), {"mode": to.mode})
    return DifferentiatedProgram(local, to.graph, made, stage, frozenset(), {}, {}, {})


def _values(program: DifferentiatedProgram) -> list[Tensor]:
    dice = torch.Generator().manual_seed(0)
    graph = fx.Graph()
    made = graph.graph_copy(program.graph, {})
    graph.output(made)
    given = [torch.randn(4, SIZE, generator=dice, dtype=torch.float64) for _ in range(2)]
    found: list[Tensor] = list(fx.Interpreter(fx.GraphModule({}, graph)).run(*given))
    return found


JOINED: dict[str, Make] = {
    "halves": lambda to, x, y: (_add(to, _slice(to, x, 0, 4), _slice(to, y, 4, 8)),),
    "in another order, with another": lambda to, x, y: (_add(to, _slice(to, x, 4, 8), _slice(to, y, 0, 4), x),),
    "another between": lambda to, x, y: (_add(to, _slice(to, x, 0, 4), y, _slice(to, y, 4, 8)),),
    "three": lambda to, x, y: (_add(to, _slice(to, x, 2, 3), _slice(to, y, 3, 8), _slice(to, y, 0, 2)),),
    "rows": lambda to, x, y: (_add(to, _slice(to, x, 0, 1, 0), _slice(to, y, 1, 4, -2)),),
    "a sum of sums": lambda to, x, y: (
        _add(to, _add(to, x, _slice(to, x, 0, 4)), _add(to, y, _slice(to, y, 4, 8))), y
    ),
    "two dims": lambda to, x, y: (
        _add(to, _slice(to, x, 0, 4), _slice(to, x, 0, 1, 0), _slice(to, y, 4, 8), _slice(to, y, 1, 4, 0)),
    ),
}  # fmt: skip


def _count(program: DifferentiatedProgram, target: Any) -> int:
    return len(program.graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize("name", JOINED)
def test_what_covers_a_value_is_joined(name: str) -> None:
    before = _program(JOINED[name])
    after = JoinSlices()(before)
    assert _count(after, aten.slice_backward.default) == 0
    assert _count(after, aten.cat.default) == (2 if name == "two dims" else 1)
    assert {after.stage[node] for node in after.graph.nodes if node.op == "call_function"} == {0}
    for a, b in zip(_values(before), _values(after), strict=True):
        assert torch.allclose(a, b, rtol=1e-15, atol=1e-15)
    check_joined(before, after)


def _read(to: GraphBuilder, x: fx.Node, y: fx.Node) -> tuple[fx.Node, ...]:
    a, b = _slice(to, x, 0, 4), _slice(to, y, 4, 8)
    return _add(to, a, b), to.call(aten.relu.default, a)


def _partial(to: GraphBuilder, x: fx.Node, y: fx.Node) -> tuple[fx.Node, ...]:
    some = _add(to, _slice(to, x, 0, 4), y)
    return _add(to, some, _slice(to, y, 4, 8)), to.call(aten.relu.default, some)


KEPT: dict[str, Make] = {
    "a gap": lambda to, x, y: (_add(to, _slice(to, x, 0, 4), _slice(to, y, 5, 8)),),
    "an overlap": lambda to, x, y: (_add(to, _slice(to, x, 0, 5), _slice(to, y, 4, 8)),),
    "the same twice": lambda to, x, y: (
        _add(to, _slice(to, x, 0, 4), _slice(to, y, 0, 4), _slice(to, y, 4, 8), _slice(to, x, 4, 8)),
    ),
    "not the end": lambda to, x, y: (_add(to, _slice(to, x, 0, 4), _slice(to, y, 4, 7)),),
    "every second": lambda to, x, y: (
        _add(to, _slice(to, x, 0, 4, step=2), _slice(to, y, 4, 8, step=2)),
    ),
    "two dims": lambda to, x, y: (_add(to, _slice(to, x, 0, 4), _slice(to, y, 2, 4, 0)),),
    "a term is read": _read,
    "a partial sum is read": _partial,
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_does_not_is_added_up(name: str) -> None:
    before = _program(KEPT[name])
    assert JoinSlices()(before) is before


def test_sums_of_two_stages_or_that_somebody_asks_for_stay() -> None:
    before = _program(JOINED["in another order, with another"])
    inner, total = before.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    moved = replace(before, stage={**before.stage, inner: 1})
    assert JoinSlices()(moved) is moved
    (part, *_) = before.graph.find_nodes(op="call_function", target=aten.slice_backward.default)
    asked = replace(before, cotangents={(part, 0): part})
    assert JoinSlices()(asked) is asked
    assert total is before.outputs[0]


def test_a_wrong_join_is_found() -> None:
    before = _program(JOINED["in another order, with another"])

    def changed(position: int, given: Callable[[fx.Node], Any]) -> DifferentiatedProgram:
        after = JoinSlices()(before)
        (cat,) = after.graph.find_nodes(op="call_function", target=aten.cat.default)
        cat.update_arg(position, given(cat))
        return after

    for wrong in (
        changed(0, lambda cat: list(reversed(cat.args[0]))),  # type: ignore[arg-type]
        changed(1, lambda cat: 0),
        changed(0, lambda cat: [cat.args[0][0]]),  # type: ignore[index]
    ):
        with pytest.raises(CompileError, match="slices check"):
            check_joined(before, wrong)
    after = JoinSlices()(before)
    (cat,) = after.graph.find_nodes(op="call_function", target=aten.cat.default)
    for stray in ({"stage": {}}, {"outputs": (cat,)}, {"outputs": ()}, {"once": frozenset({cat})}):
        with pytest.raises(CompileError, match="slices check"):
            check_joined(before, replace(after, **stray))
    with pytest.raises(CompileError, match="slices check"):
        check_joined(before, _program(JOINED["halves"]))
    with pytest.raises(CompileError, match="slices check"):  # what would be missing
        check_joined(_program(lambda to, x, y: (to.call(aten.relu.default, _add(to, x, y)),)), before)


class Rotary(nn.Module):
    """Two layers with rotary embeddings between, as models of transformers write them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).view(-1, 2, 8)
        angle = torch.arange(1, 9, dtype=x.dtype)
        turned = torch.cat((-y[..., 4:], y[..., :4]), dim=-1)
        z: Tensor = self.down((y * angle.cos() + turned * angle.sin()).flatten(1))
        return z


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_it_trains_as_the_model_does(axes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU is taken for a GPU."""
    monkeypatch.setattr(pipeline, "CUDA", CPU)
    torch.manual_seed(0)
    batch = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    program = check_step(Rotary().double(), axes, batch)
    source = program._primary().program.source
    assert _count(source, aten.cat.default) == 2 and _count(source, aten.slice_backward.default) == 0
    assert any(name == "check_joined" for name in program.compile_seconds)
