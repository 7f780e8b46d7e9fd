"""Everything that ranks exchange in a step, with its bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from ..core.annotations import facts, num_bytes, tensor_inputs, values
from ..ir.distributed_program import DistributedProgram, Piece, Transfer
from ..ops.catalog import collective_of, op_spec
from ..runtime.state.gradients import GradientStore
from ..runtime.transport.local import LocalTransport, LocalWorld


@dataclass(frozen=True)
class Exchange:
    """A collective of a function. ``bytes``: what one rank holds of it, going in or coming out, whichever is
    more."""

    node: str
    operator: str
    axis: str
    ranks: int
    bytes: int
    module: str
    source: str


def exchanges(program: DistributedProgram, piece: Piece) -> Iterator[Exchange]:
    """Yield the collectives of a function, in order; those that are started ahead where they start."""
    sources = {node.name: node for node in program.source.graph.nodes}
    for node in piece.module.graph.nodes:
        if node.op == "call_method" and collective_of(str(node.target)):
            source, axis = sources[node.name], str(node.args[2])
            where = facts(source).where
            moved = moved_bytes(source)
            yield Exchange(node.name, str(node.target), axis, program.mesh[axis], moved, where.module, where.source)


def moved_bytes(node: fx.Node) -> int:
    """Return the larger of a collective's input and output size on one rank, in bytes."""
    inputs = tensor_inputs(node)[:1]
    if op_spec(node).under_way and node.users:
        node = next(iter(node.users))  # what is under way has no value yet, but its wait has
    if (side := op_spec(node).slice_at) is not None:
        slice_ = tensor_inputs(node)[0] if side == "input" else node
        return num_bytes(values(slice_)[0]) * node.args[2]  # type: ignore[operator,return-value]
    written = sum(num_bytes(x) for x in values(node) if x is not None)
    return max(written, sum(num_bytes(x) for n in inputs for x in values(n) if x is not None))


def transfer_bytes(program: DistributedProgram, transfer: Transfer) -> tuple[int, int]:
    """Forward and back, for each microbatch and rank."""

    def size(names: tuple[str, ...]) -> int:
        return sum(torch.Size(program.values[n][0]).numel() * program.values[n][1].itemsize for n in names)

    return size(transfer.forward), size(transfer.backward)


def schedule_document(program: DistributedProgram) -> dict[str, Any]:
    """Return all communication as plain data.

    ``functions``: collectives by stage and function; ``transfers`` between stages; ``gradients``: sums over ranks at
    the end of a step; ``actions``: in which order each pipeline place runs all that.
    """
    return {
        "functions": [
            {"stage": stage.index, "function": name, "exchanges": [asdict(e) for e in exchanges(program, piece)]}
            for stage in program.stages
            for name, piece in stage.pieces.items()
        ],
        "transfers": [
            {**asdict(t), **dict(zip(("forward_bytes", "backward_bytes"), transfer_bytes(program, t), strict=True))}
            for t in program.transfers
        ],
        "gradients": [term for place in range(program.mesh["pp"]) for term in _sums(program, place)],
        "actions": [[str(action) for action in row] for row in program.schedule.actions],
        "sites": list(program.sites),
    }


def schedule_json(program: DistributedProgram) -> str:
    return json.dumps(schedule_document(program), indent=1) + "\n"


def _sums(program: DistributedProgram, place: int) -> Iterator[dict[str, Any]]:
    if not any(stage.gradients for stage in program.stages):
        return
    rank = program.mesh.rank({"pp": place})
    transport = LocalTransport(LocalWorld(program.mesh), rank)
    for bucket in GradientStore(program, program.rank(rank), transport, torch.device("meta")).buckets:
        for operator, axes, buffer in (
            ("reduce_scatter", bucket.scattered, bucket.buffer),
            ("all_reduce", bucket.summed, bucket.own),
        ):
            if len(program.mesh.peers(rank, axes)) > 1:
                row = {"pipeline_place": place, "operator": operator, "axes": list(axes), "name": bucket.label}
                yield {**row, "bytes": num_bytes(buffer)}
