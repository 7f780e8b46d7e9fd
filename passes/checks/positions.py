"""Check of what ranks compute by their places: attention and random numbers are the program's own, of the positions
that the sharding gives this rank."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...compat.torch import schema
from ...core.annotations import facts, origin, shape, tensor_inputs, value
from ...core.errors import REPORT, CompileError
from ...core.sharding import Shard
from ...ir.program import Axis, LocalProgram
from ...ops.attention.operator import IDS, attention
from ...ops.attention.ring_plan import ring_plan
from ...ops.attention.tiled import tiled_attention
from ...ops.collectives import return_runs, ring_attention, send_runs
from ...ops.rank_local import dropout, keep_mask, local_noise, noise

aten = torch.ops.aten


def check_positions(local: LocalProgram) -> None:
    """Raises: CompileError QN209 with what a rank would compute otherwise than the unsplit model."""
    for node in local.staged.sharded.program.graph.nodes:
        if node.target not in (attention, dropout, noise) or (node, 0) not in local.parts:
            continue
        made, _ = origin(_before_return(node, local.parts[node, 0]))
        if made.target is ring_attention or made.target is tiled_attention:
            _compare(node, made, _attention(local, node, made))
        elif node.target is not attention:
            _random(local, node, made)


def _before_return(node: fx.Node, x: fx.Node) -> fx.Node:
    """What ranks of a ring have made before its runs return."""
    return x.all_input_nodes[0] if x.target is return_runs and node.target is attention else x


def _attention(local: LocalProgram, node: fx.Node, made: fx.Node) -> dict[str, Any]:
    """The arguments of ``made`` by their names."""
    sharded = local.staged.sharded
    reads, own = iter(local.reads[node]), _arguments(node)
    found = {name: next(reads) if isinstance(given, fx.Node) else given for name, given in own.items()}
    if made.target is ring_attention:
        (axis,) = (a for a, s in zip(sharded.axes, sharded.strategies[node], strict=True) if s.exchanges)
        return found | _assigned(local, node, made, axis) | {"axis": axis.name, "size": axis.size}
    places = _places(local, node)
    queries = [i for i, dim in enumerate(places.pop("dims")) if dim == 2]
    del places["units"]  # tiles count on behind the last position
    queries_here = shape(local.reads[node][0])[2]
    count = queries_here * math.prod(places["sizes"][i] for i in queries)
    return found | {"whole": count} | {name: [x[i] for i in queries] for name, x in places.items()}


def _assigned(local: LocalProgram, node: fx.Node, made: fx.Node, axis: Axis) -> dict[str, fx.Node]:
    """What a ring reads. Where a plan assigns runs to ranks, these are sent by it, and what it makes returns."""
    plan, result = _arguments(made)["plan"], local.parts[node, 0]
    read = dict(zip("qkv", tensor_inputs(made), strict=False))
    how = (axis.name, axis.size, 2, plan)
    for x, move in ((result, return_runs), *((x, send_runs) for x in read.values())):
        if (x.target is move) is (plan is None) or (plan is not None and x.args[1:] != how):
            raise _fail(node, f"{x.name} does not have the positions that {made.name} takes it for")
    if plan is not None:
        _is(node, plan, ring_plan)
        own, count = _arguments(node), shape(local.reads[node][0])[2]
        names = [name for name in own if isinstance(own[name], fx.Node)]
        ids = {name: x for name, x in zip(names, local.reads[node], strict=True) if name in IDS}
        runs = _arguments(plan)["runs"]
        if runs < 1 or count % runs:
            raise _fail(node, f"{plan.name} has runs={runs} of {count} positions")
        whole = {"whole": axis.size * count, "ranks": axis.size, "mask": own["mask"]}
        _compare(node, plan, {name: own[name] for name in IDS} | ids | whole)
    inside = {name: x.all_input_nodes[0] if plan is not None else x for name, x in read.items()}
    for (name, x), wanted in zip(inside.items(), local.reads[node], strict=False):
        if x is not wanted:
            raise _fail(node, f"{made.name} has {name}={x} where {node.name} has {wanted}")
    return read


def _random(local: LocalProgram, node: fx.Node, made: fx.Node) -> None:
    own, places = _arguments(node), {"whole": list(shape(node)), **_places(local, node)}
    if node.target is noise:
        _is(node, made, local_noise)
        _compare(node, made, {"kind": own["kind"], "op": own["op"], "dtype": value(node).dtype, **places})
        return
    _is(node, made, aten.native_dropout_backward.default)
    x, mask, scale = tuple[Any, ...](made.args)
    _is(node, mask, keep_mask)
    _compare(node, mask, {"x": x, "p": own["p"], "op": own["op"], **places})
    if x is not local.reads[node][0] or scale != (0.0 if own["p"] == 1 else 1 / (1 - own["p"])):
        raise _fail(node, f"{made.name} is not {node.name} with its mask")


def _places(local: LocalProgram, node: fx.Node) -> dict[str, list[Any]]:
    """The axes that split a result: their names, sizes, dims, in how many parts, and in units of what."""
    sharded = local.staged.sharded
    kinds = zip(sharded.axes, sharded.produced(node), strict=True)
    cuts = [(axis.name, axis.size, kind.dim, kind.parts, kind.unit) for axis, kind in kinds if isinstance(kind, Shard)]
    names = "axes", "sizes", "dims", "parts", "units"
    return {name: [cut[i] for cut in cuts] for i, name in enumerate(names)}


def _is(node: fx.Node, made: Any, target: Any) -> None:
    if not isinstance(made, fx.Node) or made.target is not target:
        raise _fail(node, f"{made} stands for {node.name}")


def _compare(node: fx.Node, made: fx.Node, expected: dict[str, Any]) -> None:
    found = _arguments(made)
    for name, wanted in expected.items():
        if name in IDS and isinstance(found[name], fx.Node):
            found[name] = _there(found[name], wanted)
        same = found[name] is wanted if isinstance(wanted, fx.Node) else found[name] == wanted
        if not same:
            raise _fail(node, f"{made.name} has {name}={found[name]} where {node.name} has {wanted}")


def _there(x: fx.Node, wanted: Any) -> fx.Node:
    """What is copied to the host, where that is all that happens to it."""
    copied = x.target is aten._to_copy.default and x.args == (wanted,) and x.kwargs == {"device": torch.device("cpu")}
    return wanted if copied else x


def _fail(node: fx.Node, what: str) -> CompileError:
    return CompileError("QN209", f"positions check: {what}", where=facts(node).where, fix=REPORT)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """By the names that the operator's schema gives them."""
    known = schema(node.target).arguments
    defaults = {one.name: one.default_value for one in known}
    return defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs
