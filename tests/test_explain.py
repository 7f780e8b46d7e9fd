"""Explanations: what is done, what else could be done, and what that would cost."""

from __future__ import annotations

import json

import pytest
import torch

import quintnet
from quintnet import Mesh

from .models import CASES, GPT

pytestmark = pytest.mark.usefixtures("shared_captures")


def _compiled(mesh: Mesh, **plan: object) -> quintnet.CompiledProgram:
    torch.manual_seed(0)
    return quintnet.compile(GPT(depth=3), mesh, CASES["gpt"].batch(8), **plan)  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_is_done_and_what_it_costs() -> None:
    program = _compiled(Mesh(dp=2, tp=2))
    text = str(program.explain("blocks.1.up"))
    assert "blocks.1.up.weight [128, 32], on a rank [64, 32]: dp: R, tp: S(0)" in text
    assert (
        "models.py" in text and "forward: all_gather over tp" in text and "one microbatch on one rank computes" in text
    )
    assert "blocks.1.up" not in str(program.explain("wte.weight"))
    with pytest.raises(
        quintnet.CompileError, match=r"QN204(?s:.*)nothing is called 'blocks.9'(?s:.*)did you mean blocks"
    ):
        program.explain("blocks.9")


@pytest.mark.slow
@pytest.mark.parametrize(("why_not", "kind"), [("row", "S(1)"), ("replicated", "I"), ({"tp": "S(1)"}, "S(1)")])
def test_another_way_is_compiled_and_compared(why_not: object, kind: str) -> None:
    program = _compiled(Mesh(dp=2, tp=2))
    found = program.explain("blocks.1.up.weight", why_not=why_not).otherwise  # type: ignore[arg-type]
    assert found is not None and found.after.seconds > found.before.seconds
    assert found.parameters["blocks.1.up.weight"] == ("dp: R, tp: S(0)", f"dp: R, tp: {kind}")
    assert "blocks.0.up.weight" not in found.parameters and "blocks.2.up.weight" not in found.parameters
    assert json.loads(found.to_json())["after"]["seconds"] == found.after.seconds
    same = program.explain("blocks.1.up", why_not="column").otherwise
    assert same is not None and not same.parameters and same.before == same.after


def test_ways_that_cannot_be_are_refused_with_the_reason() -> None:
    program = _compiled(Mesh(dp=2, tp=2))
    assert "QN203" in program.explain("blocks.1.up.weight", why_not={"tp": "S(0,3)"}).refused
    with pytest.raises(quintnet.CompileError, match=r"QN204(?s:.*)'diagonal'"):
        program.explain("blocks.1.up", why_not="diagonal")
    with pytest.raises(quintnet.CompileError, match="there is no tp axis"):
        _compiled(Mesh(dp=2)).explain("blocks.1.up", why_not="row")


def test_two_programs_of_a_model_side_by_side() -> None:
    one, two = _compiled(Mesh(dp=2, tp=2)), _compiled(Mesh(pp=2, tp=2), microbatches=2, recompute="full")
    found = one.diff(two)
    assert found.plan["recompute"] == ("none", "full") and found.plan["microbatches"] == (1, 2)
    assert found.after.memory_bytes < found.before.memory_bytes and "pp" in found.after.waiting
    assert one.diff(one).plan == {} and "step" in str(found)


def test_a_report_says_why_not() -> None:
    torch.manual_seed(0)
    model, batch = GPT(depth=2), CASES["gpt"].batch(8)
    report = quintnet.plan(model, quintnet.Cluster("h100", nodes=1, gpus_per_node=2), batch)
    other = report.why_not(mesh={"pp": 2})
    assert other.other is not None and other.other.layout.pp == 2 and other.best is report.found.ranked[0]
    assert "bubble" in str(other) and json.loads(other.to_json())["refused"] == ""
    assert "no such layout" in str(report.why_not(mesh={"pp": 64}))
    with pytest.raises(quintnet.CompileError, match="QN207"):
        report.why_not(colour="red")
