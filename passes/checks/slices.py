"""Check of the arithmetic of slices, which every transport and the state of ranks share, for the types of a program.

Where dim d is viewed as (k, ranks, rest), an index belongs to the rank ``index // rest % ranks``: that is all that
``S(d, k)`` says. Slices are taken, joined and padded on a few numbers, and compared with that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...compat.torch import schema
from ...core import slices
from ...core.errors import REPORT, CompileError
from ...core.sharding import Shard
from ...ir.distributed_program import DistributedProgram
from ...ops.collectives import COMMUNICATION, shard_pad, shard_slice

REST, MOST = 2, 3  # indices in a run; ranks: more are as three
Slicing = tuple[int, int, int]  # dim, parts, ranks


def check_slices(program: DistributedProgram) -> None:
    """Raises: CompileError QN209 with the type whose slices are not what it says."""
    sizes = [min(axis.size, MOST) for axis in program.axes]
    kinds = [spec.sharding for spec in program.state.values()]
    kinds += [spec.sharding for spec in (*program.inputs, *program.results)]
    kinds += program.source.local.sharding.values()
    found = {
        (kind.dim, kind.parts, size)
        for sharding in kinds
        for kind, size in zip(sharding, sizes, strict=True)
        if isinstance(kind, Shard)
    }
    for node in program.source.graph.nodes:
        if node.target in COMMUNICATION or node.target in (shard_slice, shard_pad):
            names = [known.name for known in schema(node.target).arguments]
            given = dict(zip(names, node.args, strict=False))
            pairs = [(given.get(dim), given.get(parts)) for dim, parts in (("dim", "parts"), ("to_dim", "to_parts"))]
            size = min(node.args[2], MOST)
            found |= {(dim, parts, size) for dim, parts in pairs if isinstance(dim, int) and isinstance(parts, int)}
    for slicing in sorted(found):
        _check(slicing)


def _check(slicing: Slicing) -> None:
    dim, parts, ranks = slicing
    length = parts * ranks * REST
    x = torch.arange(2**dim * length, device="cpu").reshape(*[2] * dim, length).unsqueeze(-1)
    own = [[i for i in range(length) if i // REST % ranks == rank] for rank in range(ranks)]
    taken = [x[(slice(None),) * dim + (torch.tensor(mine, device="cpu"),)] for mine in own]
    for rank, (mine, part) in enumerate(zip(own, taken, strict=True)):
        padded = torch.zeros_like(x)
        padded[(slice(None),) * dim + (torch.tensor(mine, device="cpu"),)] = part
        _same("take", slicing, slices.take(x, dim, parts, ranks, rank), part)
        _same("slot", slicing, slices.slot(x, dim, parts, ranks, rank).reshape(part.shape), part)
        _same("pad", slicing, slices.pad(part, dim, parts, ranks, rank), padded)
    _same("join", slicing, slices.join(taken, dim, parts), x)
    _same("stack", slicing, slices.stack(x, dim, parts, ranks), torch.stack(taken))
    _same("unstack", slicing, slices.unstack(torch.stack(taken), dim, parts), x)


def _same(what: str, slicing: Slicing, have: Tensor, want: Tensor) -> None:
    if have.shape != want.shape or not torch.equal(have, want):
        dim, parts, ranks = slicing
        raise CompileError(
            "QN209",
            f"slice check: {what} is wrong for {Shard(dim, parts)} over {ranks} ranks",
            fix=REPORT,
        )
