"""Programs and generated code as people read them: lists by pattern, and headings."""

from __future__ import annotations

import ast

import torch
from torch import fx

from quintnet_compiler.core.annotations import Facts, annotate
from quintnet_compiler.core.errors import Where
from quintnet_compiler.core.name_patterns import by_pattern, numbers_text
from quintnet_compiler.ir.headings import heading, with_headings

from ..golden.programs import golden_program


def _lines(*names: str) -> list[str]:
    return by_pattern((name, f"%p_model_{name.replace('.', '_')}: {name!r} [8]") for name in names)


def test_numbers_as_a_shell_writes_them() -> None:
    assert [numbers_text(n) for n in ([7], [0, 1], [0, 1, 2], [0, 1, 2, 3, 8, 10])] == [
        "7", "{0,1}", "{0..2}", "{0..3,8,10}",
    ]  # fmt: skip


def test_equal_lines_of_names_that_differ_in_numbers_are_one() -> None:
    assert _lines("h.0.w", "h.0.b", "h.1.w", "h.1.b", "head") == [
        "%p_model_h_{0,1}_w: 'h.{0,1}.w' [8]", "%p_model_h_{0,1}_b: 'h.{0,1}.b' [8]", "%p_model_head: 'head' [8]",
    ]  # fmt: skip
    experts = [f"h.{i}.e.{j}.w" for i in range(3) for j in range(4)]
    assert _lines(*experts) == ["%p_model_h_{0..2}_e_{0..3}_w: 'h.{0..2}.e.{0..3}.w' [8]"]


def test_no_name_is_lost_or_invented() -> None:
    assert _lines("h.0.e.0.w", "h.0.e.1.w", "h.1.e.0.w") == [
        "%p_model_h_0_e_{0,1}_w: 'h.0.e.{0,1}.w' [8]", "%p_model_h_1_e_0_w: 'h.1.e.0.w' [8]",
    ]  # fmt: skip
    said = [("h.0.w", "h.0.w [8]"), ("h.1.w", "h.1.w [4]"), ("norm1.w", "norm1.w"), ("norm2.w", "norm2.w"), ("0", "0")]
    assert by_pattern(said) == [line for _, line in said]


def test_a_heading_where_the_module_changes() -> None:
    one, two = Where("a.norm", "x.py:1: y"), Where("a.norm", "x.py:2: z")
    assert heading(None, one) == "# a.norm  x.py:1: y" and heading(one, one) == ""
    assert heading(one, two) == "#   x.py:2: z" and heading(one, Where("", "x.py:2: z")) == "# (top level)  x.py:2: z"
    assert heading(None, Where("a\nimport os")) == "# a\\nimport os"


def test_code_has_a_heading_where_the_module_changes() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for place in (Where("a"), Where("a"), None, Where("b\nimport os"), Where()):
        x = graph.call_function(torch.neg, (x,))
        if place is not None:
            annotate(x, Facts(torch.empty(1), where=place))
    graph.output((x,))
    text = with_headings(fx.GraphModule({}, graph).code, graph)
    lines = [line.strip() for line in text.splitlines() if "#" in line or "neg" in line]
    assert [line for line in lines if line.startswith("#")] == ["# a", "# b\\nimport os"]
    assert [line.partition(" = ")[0] for line in lines] == [
        "# a", "neg", "neg_1", "neg_2", "# b\\nimport os", "neg_3", "neg_4", "return (neg_4,)",
    ]  # fmt: skip


def test_the_code_that_runs_has_no_names_of_the_user() -> None:
    piece = golden_program("transformer").ranks[0].stages[0].forward
    assert "    # blocks.0.norm1\n" in piece.code and "#" not in piece.module.code
    assert ast.dump(ast.parse(piece.code.strip())) == ast.dump(ast.parse(piece.module.code.strip()))
