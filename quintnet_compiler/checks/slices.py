"""Check of the arithmetic of slices, which every transport and the state of ranks share, for the types of a program.

``S(d, k)`` means: where dim d is viewed as (k, ranks, run), an index belongs to rank ``index // run % ranks``. Slices
are taken, joined and padded on a few numbers, and compared with that definition.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from ..compat.torch import schema
from ..core import slices
from ..core.sharding import Shard
from ..ir.distributed_program import DistributedProgram
from ..ops.catalog import op_spec
from .failure import check_failure

RUN_LENGTH = 2  # indices in a row that belong to one rank
MAX_RANKS = 3  # larger axes are checked as axes of so many ranks
Slicing = tuple[int, int, int]  # dim, parts, ranks


def check_slices(program: DistributedProgram) -> None:
    """Check every way in which ``program`` slices a dim.

    Raises:
        CompileError: QN209 with the type whose slices differ from its definition.
    """
    slicings = set(_of_types(program))
    for node in program.source.graph.nodes:
        if op_spec(node).takes_size:
            slicings.update(_of_call(node))
    for slicing in sorted(slicings):
        _check(slicing)


def _of_types(program: DistributedProgram) -> Iterator[Slicing]:
    """Yield the slicings of state, inputs, results and values."""
    sizes = [min(axis.size, MAX_RANKS) for axis in program.axes]
    shardings = [spec.sharding for spec in program.state.values()]
    shardings += [spec.sharding for spec in (*program.inputs, *program.results)]
    shardings += program.source.local.sharding.values()
    for sharding in shardings:
        for kind, size in zip(sharding, sizes, strict=True):
            if isinstance(kind, Shard):
                yield kind.dim, kind.parts, size


def _of_call(node: fx.Node) -> Iterator[Slicing]:
    """Yield the slicings that a collective has among its arguments."""
    names = [argument.name for argument in schema(node.target).arguments]
    arguments = dict(zip(names, node.args, strict=False))
    ranks = min(node.args[2], MAX_RANKS)  # type: ignore[type-var]
    for dim_name, parts_name in (("dim", "parts"), ("to_dim", "to_parts")):
        dim, parts = arguments.get(dim_name), arguments.get(parts_name)
        if isinstance(dim, int) and isinstance(parts, int):
            yield dim, parts, ranks  # type: ignore[misc]


def _check(slicing: Slicing) -> None:
    dim, parts, ranks = slicing
    length = parts * ranks * RUN_LENGTH
    x = torch.arange(2**dim * length, device="cpu").reshape(*[2] * dim, length).unsqueeze(-1)
    rows_of_ranks = [[i for i in range(length) if i // RUN_LENGTH % ranks == rank] for rank in range(ranks)]
    expected = [x[(slice(None),) * dim + (torch.tensor(rows, device="cpu"),)] for rows in rows_of_ranks]
    for rank, (rows, part) in enumerate(zip(rows_of_ranks, expected, strict=True)):
        padded = torch.zeros_like(x)
        padded[(slice(None),) * dim + (torch.tensor(rows, device="cpu"),)] = part
        _check_equal("take", slicing, slices.slice_of_rank(x, dim, parts, ranks, rank), part)
        _check_equal("slot", slicing, slices.slot(x, dim, parts, ranks, rank).reshape(part.shape), part)
        _check_equal("pad", slicing, slices.pad(part, dim, parts, ranks, rank), padded)
    _check_equal("join", slicing, slices.join(expected, dim, parts), x)
    _check_equal("stack", slicing, slices.stack(x, dim, parts, ranks), torch.stack(expected))
    _check_equal("unstack", slicing, slices.unstack(torch.stack(expected), dim, parts), x)


def _check_equal(function: str, slicing: Slicing, actual: Tensor, expected: Tensor) -> None:
    if actual.shape != expected.shape or not torch.equal(actual, expected):
        dim, parts, ranks = slicing
        raise check_failure("slice check", f"{function} is wrong for {Shard(dim, parts)} over {ranks} ranks")
