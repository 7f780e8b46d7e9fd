"""Operators that take functions, part by part."""

from __future__ import annotations

import pytest
import torch

from quintnet_compiler.capture.control_flow import _either, _mapped, _rounds, _unrolled, control_flow_followed
from quintnet_compiler.compat.torch_control_flow import control_flow_by
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.equivalence.plain_control_flow import _run, in_python


def test_only_the_chosen_branch_has_a_gradient() -> None:
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    made = _either(torch.tensor(False), lambda x: x.log(), lambda x: x * 3, (x,))
    assert torch.autograd.grad(made.sum(), x)[0].tolist() == [3, 3]
    made = _either(torch.tensor([True]), lambda x: {"a": x * 2}, lambda x: {"a": x.log()}, (x,))
    assert made["a"].tolist() == [-2, 4] and torch.autograd.grad(made["a"].sum(), x)[0].tolist() == [2, 2]


def test_branches_of_other_kinds_are_refused() -> None:
    with pytest.raises(CompileError, match="QN105"):
        _either(torch.tensor(True), lambda x: x, lambda x: x[:1], (torch.ones(2),))


def test_both_ways_to_run_a_scan_agree() -> None:
    x = torch.randn(3, 4)
    given = (lambda h, row: ([h + row], (h * row, row))), [torch.zeros(4)], [x]
    (one,), outs = _unrolled(*given)
    (other,), again = _run("scan", given, lambda: None)
    assert torch.equal(one, other) and torch.equal(one, x.sum(0)) and torch.equal(outs[0], again[0])


def test_loops_and_maps_are_plain_operators() -> None:
    x = torch.arange(6.0).view(3, 2)
    given = (lambda row, y: {"a": row * y}), [x], [torch.tensor(2.0)]
    assert torch.equal(_mapped(*given)["a"], x * 2) and torch.equal(_run("map", given, lambda: None)["a"], x * 2)
    loop = (lambda i, x, y: i < 3), (lambda i, x, y: (i + 1, x + y)), (0, x), (torch.tensor(1.0),)
    for i, made in (_rounds(*loop), _run("while_loop", loop, lambda: None)):
        assert i == 3 and torch.equal(made, x + 3)


def test_outside_of_a_trace_nothing_is_replaced() -> None:
    with control_flow_followed(), in_python():
        assert torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x, (torch.zeros(1),)).item() == 1
    with control_flow_by(lambda name, arguments, theirs: name, lambda ours, theirs: ours):
        pass
