"""checks.derivatives, part by part: smaller calls, drawn operands, transposes of ranks, comparisons."""

from __future__ import annotations

import math

import pytest
import torch
from torch import fx

from quintnet_compiler.checks.derivatives.calls import OperatorCall, Pattern
from quintnet_compiler.checks.derivatives.numbers import largest_error_share
from quintnet_compiler.checks.derivatives.of_ranks import check_ranked, expected_gradients
from quintnet_compiler.checks.derivatives.operands import drawn, elements, nested_strides
from quintnet_compiler.checks.derivatives.smaller_calls import smaller_sizes
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.ir.builder import aten
from quintnet_compiler.ops.collectives import combine, dispatch


def _call(*sizes: int) -> OperatorCall:
    x = torch.empty(*sizes)
    return OperatorCall(aten.sin.default, ((fx.Graph().placeholder("x"),), {}), (x,), (True,), (0,), (x,), (0,))


def test_sizes_stay_products_of_others() -> None:
    found = smaller_sizes(_call(64 * 32, 64, 32))
    assert found[64 * 32] == found[64] * found[32] and all(n <= size for size, n in found.items())


def test_drawn_values_have_the_memory_of_what_they_stand_for() -> None:
    like = torch.empty(3, 4, 5).permute(2, 0, 1)
    x = drawn(like, torch.Generator().manual_seed(0), 4, positive=True)
    assert x.stride() == like.stride() and (x > 0).all() and elements(_call(3, 5)) == 30
    assert nested_strides(like, (2, 6, 4)) == [1, 8, 2]


def test_differences_are_of_the_largest_value() -> None:
    x = torch.tensor([1.0, 100.0], dtype=torch.float64)
    assert largest_error_share(x, x + 1e-7) is None
    assert largest_error_share(x, x + 1e-2) == pytest.approx(1e-4, rel=1e-2)
    assert largest_error_share(x, x[:1]) == math.inf and largest_error_share(None, torch.zeros(2)) is None


def test_a_dispatch_is_transposed_to_a_combination() -> None:
    graph = fx.Graph()
    rows, plan, t = (graph.placeholder(name) for name in ("rows", "plan", "t"))
    x = torch.empty(2)
    call = OperatorCall(dispatch, ((rows, "ep", 2, plan), {}), (x, x), (True, False), (0, 1), (x,), (0,))
    back = graph.call_function(combine, (t, "ep", 2, plan))
    expected = expected_gradients(dispatch)
    assert expected is not None
    check_ranked(call, Pattern((rows, plan), (t,), (rows,), (back, None)), expected)
    wrong = graph.call_function(combine, (t, "ep", 4, plan))
    with pytest.raises(CompileError, match="not the transpose"):
        check_ranked(call, Pattern((rows, plan), (t,), (rows,), (wrong, None)), expected)


@pytest.mark.parametrize("size", [(8, 4, 1, 1), (1, 4, 3, 3), (2, 1, 5, 1), (3, 1), (1, 1, 6)], ids=str)
def test_operands_have_the_strides_of_the_program_where_dims_have_size_1(size: tuple[int, ...]) -> None:
    """Another stride of such a dim means channels last to a convolution, which then runs another kernel."""
    for like in (torch.empty(size), torch.empty(size).transpose(0, -1)):
        operand = drawn(like, torch.Generator(), 1, False)
        assert operand.stride() == like.stride()
    if len(size) == 4:
        last = torch.empty(size).to(memory_format=torch.channels_last)
        assert drawn(last, torch.Generator(), 1, False).is_contiguous(memory_format=torch.channels_last)
