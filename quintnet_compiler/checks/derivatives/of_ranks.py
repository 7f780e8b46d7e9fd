"""Transposes of operators that no single process can run, and the dtype in which a lookup adds up gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import fx

from ...core.annotations import value
from ...ops.attention.tiled import tiled_attention, tiled_attention_backward
from ...ops.catalog import op_spec
from ...ops.collectives import combine, dispatch, return_runs, ring_attention, ring_attention_backward, send_runs
from ...ops.cross_entropy import nll_terms, nll_terms_backward
from ...ops.extensions import extension
from ...ops.rank_local import embedding_rows, embedding_rows_backward
from ..extensions import ExpectedGradients
from .calls import OperatorCall, Pattern, wrong


def check_sums(call: OperatorCall, pattern: Pattern) -> None:
    """Check that the gradient of a table has the dtype in which its rows are added up."""
    term = pattern.gradients[0]
    if term is not None and value(term).dtype is not call.sums:
        raise wrong(call, f"rows are added up in {value(term).dtype}, not {call.sums}")


def expected_gradients(target: Any) -> ExpectedGradients | None:
    """Return what the backward of an operator that depends on the rank must be; None for other operators."""
    calls = _RANKED.get(target)
    return extension(target, ExpectedGradients) if calls is None else ExpectedGradients(calls)


def check_ranked(call: OperatorCall, pattern: Pattern, expected: ExpectedGradients) -> None:
    """Check the backward of an operator that depends on the rank against its transpose."""
    args, _ = call.with_operands(pattern.inputs)
    if call.target in (embedding_rows, nll_terms) and pattern.outputs[0] is None:
        return
    for position, (op, wanted) in expected.calls(args, pattern).items():
        term = pattern.gradients[position]
        if term is None and not call.grads[position]:
            continue
        if term is not None and op in (ring_attention_backward, tiled_attention_backward):  # one call gives three
            source, index = term.args
            if index != position or not isinstance(source, fx.Node):
                raise wrong(call, f"gradient {position} is the gradient of another operand")
            term = source
        if term is None or term.target is not op or repr(tuple(term.args)) != repr(tuple(wanted)):
            raise wrong(call, f"gradient {position} is not the transpose")


def _rows_of_table(args: Any, pattern: Pattern) -> dict[int, tuple[Any, Any]]:
    table, ids, *layout = args
    (rows,), term = pattern.tangents, pattern.gradients[0]
    cast = term.args[0] if term is not None and term.args else None
    if isinstance(cast, fx.Node) and op_spec(cast).casts and cast.args == (rows,):
        rows = cast  # to the dtype that :func:`check_sums` checks
    return {0: (embedding_rows_backward, (rows, ids, value(table).shape[0], *layout))}


def _ring(args: Any, pattern: Pattern) -> dict[int, tuple[Any, Any]]:
    q, axis, size, k, v, *options = args
    saved = (q, k, v, *pattern.outputs)
    return dict.fromkeys(range(3), (ring_attention_backward, (pattern.tangents[0], axis, size, *saved, *options)))


def _tiles(args: Any, pattern: Pattern) -> dict[int, tuple[Any, Any]]:
    return dict.fromkeys(
        range(3), (tiled_attention_backward, (pattern.tangents[0], *args[:3], *pattern.outputs, *args[3:]))
    )


_RANKED: Mapping[Any, Callable[[Any, Pattern], dict[int, tuple[Any, Any]]]] = MappingProxyType(
    {
        embedding_rows: _rows_of_table,
        nll_terms: lambda args, pattern: {
            0: (nll_terms_backward, (pattern.tangents[0], args[0], pattern.outputs[0], *args[1:]))
        },
        dispatch: lambda args, pattern: {0: (combine, (pattern.tangents[0], *args[1:]))},
        combine: lambda args, pattern: {0: (dispatch, (pattern.tangents[0], *args[1:]))},
        send_runs: lambda args, pattern: {0: (return_runs, (pattern.tangents[0], *args[1:]))},
        return_runs: lambda args, pattern: {0: (send_runs, (pattern.tangents[0], *args[1:]))},
        ring_attention: _ring,
        tiled_attention: _tiles,
    }
)
