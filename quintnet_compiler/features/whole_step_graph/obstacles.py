"""Why the steps of a program cannot be one graph."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from ...compat.torch import schema, schema_or_none
from ...core.annotations import facts, has_facts
from ...ir.distributed_program import DistributedProgram, RankProgram
from ...ops.attention.operator import IDS
from ...ops.catalog import name_of, op_spec


def obstacle(program: DistributedProgram, part: RankProgram, device: torch.device, kind: str) -> str | None:
    """Return why the steps of a rank on ``device`` cannot be one graph of a device of this kind; None if they can."""
    return next(_obstacles(program, part, device, kind), None)


def _obstacles(program: DistributedProgram, part: RankProgram, device: torch.device, kind: str) -> Iterator[str]:
    if device.type != kind:
        yield f"its values are on the {device.type}, not on {kind}"
    if program.mesh.size > 1:
        yield f"{program.mesh} has {program.mesh.size} ranks, and collectives in a graph are not implemented yet"
    if any(spec.kind == "cache" for spec in program.state.values()):
        yield "it generates, which is not implemented yet"
    if program.disk is not None or any(spec.host for spec in program.state.values()):
        yield "parameters or values are offloaded, and the host takes part in their copies"
    for stage in part.stages:
        for label, piece in stage.pieces.items():
            for node in piece.module.graph.nodes:
                reason = _of_node(node, device, drawn_once=label == "once" and program.batches > 1)
                if reason is not None:
                    yield f"in the {label} of stage {stage.index}, {reason}"


def _of_node(node: fx.Node, device: torch.device, *, drawn_once: bool) -> str | None:
    spec, name = op_spec(node), str(node.target)
    if spec.way is not None:
        return f"{name} copies values to the host or to a disk, or back"
    if spec.routing == "plan":
        return f"the host waits for {name}, which says how many rows each rank gets"
    if name_of(node.target) == "alike":
        return "the host counts the places of a mask, which each row has to have as many of"
    if _reads_ids(node):
        return f"the host reads the documents or the padding of a batch for {name}"
    if drawn_once and spec.random:
        return f"{name} draws random numbers for several batches at once"
    if _is_on_host(node, device) or _argument(node, "on_host"):
        return f"the host waits for the result of {name}"
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags and _draws(node):
        return f"{name} draws random numbers of the device's generator"
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return f"the host must know the result of {name}, or its size"
    return None


def _reads_ids(node: fx.Node) -> bool:
    """Return whether it is attention in tiles, which the host chooses by what documents and padding a batch has."""
    name = name_of(node.target) if node.op == "call_function" else str(node.target)
    first = {"tiled_attention": 3, "tiled_attention_backward": 6}.get(name or "")
    if first is None:
        return False
    first += node.op == "call_method"  # which has ``comm`` before the operator's arguments
    return any(isinstance(x, fx.Node) for x in node.args[first : first + len(IDS)])


def _is_on_host(node: fx.Node, device: torch.device) -> bool:
    """Return whether a copy, or an operator of ours, brings values to the host, which waits for them.

    Attention may return what its dropout began with on the host, which nobody reads.
    """
    ours = getattr(node.target, "namespace", None) == "quintnet"
    if device.type == "cpu" or not has_facts(node) or not (ours or op_spec(node).casts):
        return False
    value = facts(node).value
    return any(x.device.type == "cpu" for x in ((value,) if isinstance(value, Tensor) else value))


def _draws(node: fx.Node) -> bool:
    """Return whether an operator that can draw random numbers does: attention without dropout does not."""
    has_dropout = any(argument.name == "dropout_p" for argument in schema(node.target).arguments)
    return not has_dropout or bool(_argument(node, "dropout_p"))


def _argument(node: fx.Node, name: str) -> object:
    """Return what a node says of an argument of its operator; None if nothing, or if it has no such argument."""
    arguments = getattr(schema_or_none(node.target), "arguments", ())
    values = dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs
    return values.get(name)
