"""Check of attention and random numbers on ranks: they are the program's, of the positions that a rank's slice has."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import fx

from ..compat.torch import schema
from ..core.annotations import origin, shape, tensor_inputs, value
from ..core.sharding import Shard
from ..ir.program import Axis, LocalProgram
from ..ops.attention.operator import IDS
from ..ops.attention.ring_plan import ring_plan
from ..ops.catalog import op_spec
from ..ops.collectives import return_runs, send_runs
from ..ops.rank_local import keep_mask, local_noise
from .failure import check_failure

_fail = partial(check_failure, "positions check")
aten = torch.ops.aten


def check_positions(local: LocalProgram) -> None:
    """Check every attention, dropout and draw of random numbers.

    Raises:
        CompileError: QN209 with what a rank would compute otherwise than the unsplit model.
    """
    for node in local.staged.sharded.program.graph.nodes:
        attends = _splits_positions(node)
        if not (attends or op_spec(node).random) or (node, 0) not in local.parts:
            continue
        result = local.parts[node, 0]
        if attends and result.target is return_runs:
            result = result.all_input_nodes[0]
        call, _ = origin(result)
        if _positions(call) is not None:
            _compare(node, call, _attention_arguments(local, node, call))
        elif not attends:
            _check_random(local, node, call)


def _splits_positions(node: fx.Node) -> bool:
    kind = op_spec(node).attention
    return kind is not None and kind.splits_positions


def _positions(node: fx.Node) -> str | None:
    """Return how a rank attends to positions of other ranks: in a ring, or in tiles; None if it does not."""
    kind = op_spec(node).attention
    return None if kind is None else kind.positions


def _attention_arguments(local: LocalProgram, node: fx.Node, call: fx.Node) -> dict[str, Any]:
    """Return the arguments that ``call``, which stands for the attention ``node``, must have, by name."""
    sharded = local.staged.sharded
    reads = iter(local.reads[node])
    expected = {name: next(reads) if isinstance(x, fx.Node) else x for name, x in _arguments(node).items()}
    if _positions(call) == "ring":
        (axis,) = (a for a, s in zip(sharded.axes, sharded.strategies[node], strict=True) if s.exchanges)
        return expected | _ring_operands(local, node, call, axis) | {"axis": axis.name, "size": axis.size}
    layout = _layout(local, node)
    query_cuts = [i for i, dim in enumerate(layout.pop("dims")) if dim == 2]
    del layout["units"]  # tiles count on after the last position
    count = shape(local.reads[node][0])[2] * math.prod(layout["sizes"][i] for i in query_cuts)
    return expected | {"whole": count} | {name: [column[i] for i in query_cuts] for name, column in layout.items()}


def _ring_operands(local: LocalProgram, node: fx.Node, call: fx.Node, axis: Axis) -> dict[str, fx.Node]:
    """Return what a ring reads.

    Where a plan assigns runs of positions to ranks, the operands are sent by that plan, and the result returns by it.
    """
    plan, result = _arguments(call)["plan"], local.parts[node, 0]
    operands = dict(zip("qkv", tensor_inputs(call), strict=False))
    moves = [(result, return_runs), *((x, send_runs) for x in operands.values())]
    for x, move in moves:
        moved = x.target is move
        if moved is (plan is None) or (moved and x.args[1:] != (axis.name, axis.size, 2, plan)):
            raise _fail(f"{x.name} does not have the positions that {call.name} takes it for", node)
    if plan is not None:
        _check_ring_plan(local, node, plan, axis)
    sources = {name: x.all_input_nodes[0] if plan is not None else x for name, x in operands.items()}
    for (name, source), expected in zip(sources.items(), local.reads[node], strict=False):
        if source is not expected:
            raise _fail(f"{call.name} has {name}={source} where {node.name} has {expected}", node)
    return operands


def _check_ring_plan(local: LocalProgram, node: fx.Node, plan: Any, axis: Axis) -> None:
    _check_target(node, plan, ring_plan)
    arguments, count = _arguments(node), shape(local.reads[node][0])[2]
    names = [name for name, x in arguments.items() if isinstance(x, fx.Node)]
    ids = {name: x for name, x in zip(names, local.reads[node], strict=True) if name in IDS}
    runs = _arguments(plan)["runs"]
    if runs < 1 or count % runs:
        raise _fail(f"{plan.name} has runs={runs} of {count} positions", node)
    layout = {"whole": axis.size * count, "ranks": axis.size, "mask": arguments["mask"]}
    _compare(node, plan, {name: arguments[name] for name in IDS} | ids | layout)


def _check_random(local: LocalProgram, node: fx.Node, call: fx.Node) -> None:
    arguments, layout = _arguments(node), {"whole": list(shape(node)), **_layout(local, node)}
    if op_spec(node).random == "numbers":
        _check_target(node, call, local_noise)
        draw = {"kind": arguments["kind"], "op": arguments["op"], "dtype": value(node).dtype}
        _compare(node, call, draw | layout)
        return
    _check_target(node, call, aten.native_dropout_backward.default)
    x, mask, scale = tuple[Any, ...](call.args)
    _check_target(node, mask, keep_mask)
    _compare(node, mask, {"x": x, "p": arguments["p"], "op": arguments["op"], **layout})
    if x is not local.reads[node][0] or scale != (0.0 if arguments["p"] == 1 else 1 / (1 - arguments["p"])):
        raise _fail(f"{call.name} is not {node.name} with its mask", node)


def _layout(local: LocalProgram, node: fx.Node) -> dict[str, list[Any]]:
    """Return names and sizes of the axes that split a result, and the dim, parts and unit of each."""
    sharded = local.staged.sharded
    kinds = zip(sharded.axes, sharded.produced(node), strict=True)
    cuts = [(axis.name, axis.size, kind.dim, kind.parts, kind.unit) for axis, kind in kinds if isinstance(kind, Shard)]
    names = "axes", "sizes", "dims", "parts", "units"
    return {name: [cut[i] for cut in cuts] for i, name in enumerate(names)}


def _check_target(node: fx.Node, call: Any, target: Any) -> None:
    if not isinstance(call, fx.Node) or call.target is not target:
        raise _fail(f"{call} stands for {node.name}", node)


def _compare(node: fx.Node, call: fx.Node, expected: dict[str, Any]) -> None:
    """Check the arguments of ``call`` that ``expected`` has; a tensor of ids may be copied to the host."""
    arguments = _arguments(call)
    for name, wanted in expected.items():
        actual = arguments[name]
        if name in IDS and isinstance(actual, fx.Node) and _is_host_copy(actual, wanted):
            actual = wanted
        same = actual is wanted if isinstance(wanted, fx.Node) else actual == wanted
        if not same:
            raise _fail(f"{call.name} has {name}={actual} where {node.name} has {wanted}", node)


def _is_host_copy(x: fx.Node, source: Any) -> bool:
    copied = op_spec(x).casts and x.args == (source,)
    return copied and x.kwargs == {"device": torch.device("cpu")}


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments by the names that the operator's schema gives them, with defaults."""
    defaults = {argument.name: argument.default_value for argument in schema(node.target).arguments}
    return defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs
