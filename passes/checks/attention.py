"""Check of attention that ranks run by their places: that it is the program's own attention, of the positions that the
sharding gives this rank."""

from __future__ import annotations

from typing import Any

from torch import fx

from ...compat.torch import schema
from ...core.annotations import facts, origin, shape
from ...core.errors import REPORT, CompileError
from ...core.sharding import Shard
from ...ir.program import LocalProgram
from ...ops.attention import attention
from ...ops.collectives import ring_attention
from ...ops.tiled_attention import tiled_attention


def check_attention(local: LocalProgram) -> None:
    """Raises: CompileError QN209 with what a rank would see otherwise than the unsplit model."""
    for node in local.staged.sharded.program.graph.nodes:
        if node.target is not attention or (node, 0) not in local.parts:
            continue
        made, _ = origin(local.parts[node, 0])
        if made.target is ring_attention or made.target is tiled_attention:
            _compare(node, made, _expected(local, node, made))


def _expected(local: LocalProgram, node: fx.Node, made: fx.Node) -> dict[str, Any]:
    """The arguments of ``made`` by their names."""
    sharded = local.staged.sharded
    reads, own = iter(local.reads[node]), _arguments(node)
    found = {name: next(reads) if isinstance(given, fx.Node) else given for name, given in own.items()}
    if made.target is ring_attention:
        (axis,) = (a for a, s in zip(sharded.axes, sharded.strategies[node], strict=True) if s.exchanges)
        return found | {"axis": axis.name, "size": axis.size}
    kinds = zip(sharded.axes, sharded.produced(node), strict=True)
    split = [(axis, kind.parts) for axis, kind in kinds if isinstance(kind, Shard) and kind.dim == 2]
    return found | {
        "whole": shape(node)[2],
        "axes": [axis.name for axis, _ in split],
        "sizes": [axis.size for axis, _ in split],
        "parts": [parts for _, parts in split],
    }


def _compare(node: fx.Node, made: fx.Node, expected: dict[str, Any]) -> None:
    found = _arguments(made)
    for name, wanted in expected.items():
        same = found[name] is wanted if isinstance(wanted, fx.Node) else found[name] == wanted
        if not same:
            what = f"{made.name} has {name}={found[name]} where {node.name} has {wanted}"
            raise CompileError("QN209", f"attention check: {what}", where=facts(node).where, fix=REPORT)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """By the names that the operator's schema gives them."""
    known = schema(node.target).arguments
    defaults = {one.name: one.default_value for one in known}
    return defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs
