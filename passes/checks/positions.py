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
from ...ops.attention import IDS, attention
from ...ops.collectives import mirror_halves, ring_attention
from ...ops.rank_local import dropout, keep_mask, local_noise, noise
from ...ops.tiled_attention import tiled_attention

aten = torch.ops.aten


def check_positions(local: LocalProgram) -> None:
    """Raises: CompileError QN209 with what a rank would compute otherwise than the unsplit model."""
    for node in local.staged.sharded.program.graph.nodes:
        if node.target not in (attention, dropout, noise) or (node, 0) not in local.parts:
            continue
        made, _ = origin(_unmirrored(node, local.parts[node, 0]))
        if made.target is ring_attention or made.target is tiled_attention:
            _compare(node, made, _attention(local, node, made))
        elif node.target is not attention:
            _random(local, node, made)


def _unmirrored(node: fx.Node, x: fx.Node) -> fx.Node:
    """What ranks have before they exchange halves of it with their mirror images."""
    return x.all_input_nodes[0] if x.target is mirror_halves and node.target is attention else x


def _attention(local: LocalProgram, node: fx.Node, made: fx.Node) -> dict[str, Any]:
    """The arguments of ``made`` by their names."""
    sharded = local.staged.sharded
    reads, own = iter(local.reads[node]), _arguments(node)
    found = {name: next(reads) if isinstance(given, fx.Node) else given for name, given in own.items()}
    if made.target is ring_attention:
        (axis,) = (a for a, s in zip(sharded.axes, sharded.strategies[node], strict=True) if s.exchanges)
        return found | _mirrored(local, node, made, axis) | {"axis": axis.name, "size": axis.size}
    places = _places(local, node)
    queries = [i for i, dim in enumerate(places.pop("dims")) if dim == 2]
    del places["units"]  # tiles count on behind the last position
    queries_here = shape(local.reads[node][0])[2]
    count = queries_here * math.prod(places["sizes"][i] for i in queries)
    return found | {"whole": count} | {name: [x[i] for i in queries] for name, x in places.items()}


def _mirrored(local: LocalProgram, node: fx.Node, made: fx.Node, axis: Axis) -> dict[str, fx.Node]:
    """What a ring reads. Where its work is balanced, these are halves of mirror images, and so is what it makes."""
    balanced, how = _arguments(made)["balance"], (axis.name, axis.size, 2)
    result, read = local.parts[node, 0], dict(zip("qkv", tensor_inputs(made), strict=False))
    for x in (result, *read.values()):
        if (x.target is mirror_halves) is not balanced or (balanced and x.args[1:] != how):
            raise _fail(node, f"{x.name} does not have the positions that {made.name} takes it for")
    inside = {name: _unmirrored(node, x) for name, x in read.items()} if balanced else read
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
