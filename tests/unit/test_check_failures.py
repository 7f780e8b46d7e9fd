"""Errors of checks."""

from __future__ import annotations

from torch import fx

from quintnet_compiler.checks.failure import check_failure
from quintnet_compiler.core.annotations import Facts, annotate
from quintnet_compiler.core.errors import Where


def test_a_failure_names_the_check_and_the_place_if_the_node_has_one() -> None:
    node = fx.Graph().placeholder("x")
    error = check_failure("type check", "x is partial", node)
    assert error.code == "QN209" and "type check: x is partial" in str(error)
    annotate(node, Facts((), where=Where(module="blocks.3")))
    assert "blocks.3" in str(check_failure("type check", "x is partial", node))
    assert "blocks.3" not in str(check_failure("type check", "x is partial"))
