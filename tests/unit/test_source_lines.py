"""Slices and long tuples in generated code, and what checks that text."""

from __future__ import annotations

import ast

import pytest
import torch
from torch import fx

from quintnet_compiler.checks.source import check_source_slices
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.ir.codegen_allowlist import check_source
from quintnet_compiler.passes.codegen.source_lines import WIDTH, body_lines, in_lines

aten = torch.ops.aten


def test_slices_are_written_as_indices() -> None:
    call = "y = torch.ops.aten.slice.Tensor"
    found = body_lines(
        [f"{call}(x, {args})" for args in ("0, 2, 5", "2, 0, 9, 2", "1, 3, 9223372036854775807", "-1, 0, 5")]
    )
    assert found == ["y = x[2:5]", "y = x[:, :, 0:9:2]", "y = x[:, 3:]", f"{call}(x, -1, 0, 5)"]


@pytest.mark.parametrize("args", [(0, 2, 5), (1, 0, 3), (2, 1, 4, 2), (1, 2, 2**63 - 1), (0, 0, 4)])
def test_an_index_gives_what_the_operator_gives(args: tuple[int, ...]) -> None:
    x = torch.arange(4 * 5 * 6).reshape(4, 5, 6)
    [text] = body_lines([f"y = torch.ops.aten.slice.Tensor(x, {', '.join(map(str, args))})"])
    y, expected = eval(text.removeprefix("y = "), {"x": x}), aten.slice.Tensor(x, *args)
    assert torch.equal(y, expected) and y.stride() == expected.stride() and y.data_ptr() == expected.data_ptr()


def test_long_tuples_take_several_lines() -> None:
    names = [f"value_{i}" for i in range(30)]
    [text] = body_lines([f"return ({', '.join(names)})"])
    assert max(map(len, text.splitlines())) <= WIDTH + 4 and text.splitlines()[0] == "return ("
    assert ast.dump(ast.parse(in_lines(names))) == ast.dump(ast.parse(f"({', '.join(names)})"))
    assert isinstance(ast.parse(in_lines(["x"]), mode="eval").body, ast.Tuple)


def _cut(code: str, *args: int) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.create_node("call_function", aten.slice.Tensor, (x, *args), {}, "y")
    check_source_slices(code, graph)


def test_the_text_of_a_slice_is_compared_with_the_graph() -> None:
    _cut("y = x[:, 2:5]", 1, 2, 5)
    _cut("y = x[2:]", 0, 2, 2**63 - 1, 1)
    _cut("y = z[1]", 1, 2, 5)  # one of several results
    for wrong in ("y = x[2:5]", "y = x[:, 2:6]", "y = x[:, 1:5]", "y = x[:, 2:5:2]", "y = z[:, 2:5]", "w = x[:, 2:5]",
                  "y = x[2:5, 2:5]", "y = x[:, None]"):  # fmt: skip
        with pytest.raises(CompileError, match="QN209"):
            _cut(wrong, 1, 2, 5)


def test_what_may_stand_in_an_index() -> None:
    form = "def forward(self, args):\n  comm, x, = args\n  args.clear()\n  y = {}\n  return (y,)"
    for accepted in ("x[1]", "x[:, 2:5]", "x[2:]", "x[:, :, 0:8:2]"):
        check_source(form.format(accepted))
    for refused in (
        "x[x]",
        "x[:, x]",
        "x[1, 2]",
        "x[()]",
        "x[:, None]",
        "x['a']",
        "x[1.5]",
        "x[:x]",
        "comm[0]",
        "x[...]",
    ):
        with pytest.raises(CompileError, match="QN701"):
            check_source(form.format(refused))
