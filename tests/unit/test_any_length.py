"""Programs whose lengths are symbols: what is noted when passes ask, and what is put in their places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.core.annotations import shape
from quintnet_compiler.driver import any_length
from quintnet_compiler.driver.any_length import AnyLength, LengthPrograms
from quintnet_compiler.ir.at_sizes import at_sizes, expressions
from quintnet_compiler.ir.program import outputs
from quintnet_compiler.ir.symbolic_sizes import SymbolicSizes, in_example, sizes_env


def test_what_is_asked_of_a_size_is_a_condition() -> None:
    symbols = SymbolicSizes({"length0": 12})
    size = symbols.sizes["length0"]
    assert in_example(4 * size) == 48 and sizes_env(symbols.sizes) is not None and sizes_env({"length0": 12}) is None
    assert symbols.conditions_hold({"length0": 7}) and not symbols.conditions_hold({"length0": 1}), (
        "one is never like other sizes"
    )
    assert size % 2 == 0
    assert symbols.conditions_hold({"length0": 8}) and not symbols.conditions_hold({"length0": 7})
    assert size < 20
    assert not symbols.conditions_hold({"length0": 22}) and symbols.conditions_hold({"length0": 18}) and symbols.open
    assert symbols.evaluated({"length0": 18})(symbols.expression(size // 4)) == 4


def test_where_the_number_itself_is_needed_there_is_no_other() -> None:
    symbols = SymbolicSizes({"length0": 12})
    assert len(range(symbols.sizes["length0"])) == 12
    assert not symbols.open and not symbols.conditions_hold({"length0": 14})


def test_expressions_are_keys_for_a_while() -> None:
    symbols = SymbolicSizes({"length0": 12})
    size = symbols.sizes["length0"]
    with symbols.used():
        assert {4 * size: "a"}[size * 4] == "a" and size not in {12: "b"}
    assert symbols.hashed_expressions() == {symbols.expression(4 * size), symbols.expression(size)}
    assert symbols.conditions_hold({"length0": 7})
    with pytest.raises(TypeError):
        hash(size)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return (y.softmax(1) - x.cumsum(1)).square().mean()


def _x(length: int) -> tuple[Tensor]:
    return (torch.randn(4, length, 8, dtype=torch.float64),)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> tuple[AnyLength, Any]:
    """For a module on two tensor-parallel ranks, with 10 positions as the example; and the program of 10."""
    kept: list[tuple[Any, ...]] = []

    def learn(self: LengthPrograms, *given: Any, training: bool) -> None:
        kept.append(given)

    monkeypatch.setattr(LengthPrograms, "note_compiled", learn)
    program = quintnet.compile(Positions().double(), Mesh(tp=2), _x(5))
    program.prepare(_x(10))
    captured, request, primary, usual = kept[0]
    made = AnyLength.compile_symbolic(captured, request, primary, training=True)
    assert made is not None
    return made, usual


def test_other_numbers_in_the_same_nodes(found: tuple[AnyLength, Any]) -> None:
    made, usual = found
    one = made.program_for({"length0": 10})
    assert one is not None and any_length._same(one, usual)
    other = made.program_for({"length0": 14})
    assert other is not None and not any_length._same(other, usual) and other.inputs[0].shape == (4, 14, 8)
    assert [n.name for n in other.source.graph.nodes] == [n.name for n in usual.source.graph.nodes]
    graph = at_sizes(made.program, made.symbols, {"length0": 14}).local.staged.sharded.program.graph
    assert {len(shape(n)) and shape(n)[1] for n in graph.nodes if n.op != "output" and len(shape(n)) == 3} == {14}
    assert shape(outputs(graph)[0]) == ()


def test_conditions_and_sizes_that_are_equal_by_chance(found: tuple[AnyLength, Any]) -> None:
    made, _ = found
    assert made.program_for({"length0": 24}) is None, "as many positions as features of the hidden layer"
    assert made.program_for({"length0": 12}) is None, "as many as one rank has of these"
    assert made.program_for({"length0": 8}) is None, "or of the model"
    assert made.program_for({"length0": 1}) is None and made.program_for({"length0": 40}) is not None


def test_a_symbol_in_a_text_is_no_number_to_replace(found: tuple[AnyLength, Any]) -> None:
    made, _ = found
    expressions(made.program, made.symbols)
    node = next(n for n in made.program.graph.nodes if n.op == "call_function")
    before, node.kwargs = node.kwargs, {"what": f"S(1, {made.symbols.names[0]})"}
    with pytest.raises(ValueError, match="part of"):
        expressions(made.program, made.symbols)
    node.kwargs = before


@pytest.mark.slow
def test_a_program_that_differs_is_not_used(found: tuple[AnyLength, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made, usual = found
    monkeypatch.undo()
    monkeypatch.setattr(any_length, "FEW", 1)
    monkeypatch.setattr(AnyLength, "compile_symbolic", lambda *given, **named: made)
    for right in (True, False):
        monkeypatch.setattr(any_length, "_same", lambda one, two, right=right: right)
        programs = LengthPrograms()
        request = replace(made.setting.request, lengths={"length0": 10})
        programs.note_compiled(None, request, None, usual, training=True)  # type: ignore[arg-type]
        assert (programs.program_for({"length0": 14}) is not None) is right and programs.tried == 1
