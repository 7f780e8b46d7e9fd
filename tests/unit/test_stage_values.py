"""runtime.execute.stage_values: what a stage reads, keeps and sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quintnet_compiler.ir.distributed_program import Transfer
from quintnet_compiler.runtime.execute.stage_values import StageValues, reader


@pytest.mark.parametrize("names", [(), ("a",), ("b", "a")])
def test_a_reader_returns_a_tuple_of_any_length(names: tuple[str, ...]) -> None:
    values = {"a": torch.ones(1), "b": torch.zeros(2)}
    assert [id(x) for x in reader(names)(values)] == [id(values[name]) for name in names]


def test_a_stage_keeps_what_its_backward_reads_and_what_other_ranks_wait_for() -> None:
    transfers = (
        Transfer(0, 1, ("x",), ("x_grad",)),
        Transfer(1, 2, ("y",), ("y_grad",)),
        Transfer(1, 3, ("z",), ("z_grad",)),
    )
    once, forward = SimpleNamespace(static=("w",)), SimpleNamespace(static=("w", "b"))
    stage: Any = SimpleNamespace(
        index=1, saved=("s",), state={"w": "layer.weight"}, once=once, pieces={"once": once, "forward": forward}
    )
    program: Any = SimpleNamespace(transfers=transfers)
    names = StageValues.for_stage(program, stage, own_stages=(1, 3))  # what goes to stage 3 is handed over at once
    assert names.kept == {"s", "y"} and names.returned == {"x_grad"} and names.state == ("w",)
    weight, bias = torch.ones(1), torch.zeros(1)
    assert names.read_state({"layer.weight": weight}) == (weight,)
    assert names.read_static["forward"]({"w": weight, "b": bias}) == (weight, bias)
