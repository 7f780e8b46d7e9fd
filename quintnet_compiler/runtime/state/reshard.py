"""Move parameters from one layout to another: each rank sends only what other ranks lack."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...ir.distributed_program import DistributedProgram
from .true_part import TruePart

Held = Sequence[TruePart | None]  # each rank's part of one parameter; None if it stores none
MAX_ELEMENTS = 2**28  # of one exchange of all ranks, unless a single part is larger


@dataclass(frozen=True)
class MovedPart:
    """Elements of the parameter ``name`` that rank ``source`` sends to rank ``target``.

    Attributes:
        taken: for each dim, the indices in the source's part.
        placed: for each dim, the indices in the target's part.
    """

    name: str
    source: int
    target: int
    taken: tuple[Tensor, ...]
    placed: tuple[Tensor, ...]

    @property
    def shape(self) -> list[int]:
        """Return the shape of the elements."""
        return [len(indices) for indices in self.taken]

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


def held(program: DistributedProgram, name: str) -> Held:
    """Return each rank's part of a parameter, without padding."""
    spec, parts = program.state[name], list[TruePart | None]()
    homes = {program.schedule.placement[stage] for stage in spec.stages}
    for rank in range(program.mesh.size):
        coordinate = program.mesh.coordinate(rank)
        stores = coordinate.get("pp", 0) in homes
        parts.append(TruePart.on_rank(spec.shape, spec.sharding, program.axes, coordinate) if stores else None)
    return parts


def moved_parts(name: str, source: Held, target: Held) -> Iterator[MovedPart]:
    """Yield the parts of one parameter that ranks exchange.

    A rank takes from itself what it has; replicas share the sending to ranks that lack their part.

    >>> [(m.source, m.target, m.elements) for m in moved_parts("w", _rows(4, 2, 2), _rows(4, 4, 1))]
    [(0, 0, 1), (1, 1, 1), (2, 2, 1), (3, 3, 1)]
    """
    holders: dict[bytes, list[int]] = {}
    for rank, part in enumerate(source):
        if part is not None:
            holders.setdefault(b"|".join(x.numpy().tobytes() for x in part.positions), []).append(rank)
    for rank, part in enumerate(target):
        if part is None:
            continue
        for ranks in holders.values():
            sender = rank if rank in ranks else ranks[rank % len(ranks)]
            source_part = source[sender]
            assert source_part is not None
            pairs = [_common(a, b) for a, b in zip(source_part.positions, part.positions, strict=True)]
            if all(len(taken) for taken, _ in pairs):
                yield MovedPart(name, sender, rank, tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def _common(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions in ``first`` and in ``second`` of the indices that both have."""
    size = 1 + max([int(x.max()) for x in (first, second) if len(x)], default=-1)
    position = SHIPPED.full((size,), -1)
    position[first] = SHIPPED.arange(len(first))
    shared = (position[second] >= 0).nonzero().flatten()
    return position[second[shared]], shared


def _rows(ranks: int, parts: int, copies: int) -> Held:
    """Return a layout of four rows for the example: rank r has part r // copies, modulo the number of parts."""
    return [TruePart((SHIPPED.arange(4).view(parts, -1)[rank // copies % parts],)) for rank in range(ranks)]


def reshard(
    parts: Iterable[MovedPart], source: Mapping[str, Tensor], target: Mapping[str, Tensor], like: Tensor
) -> int:
    """Exchange parts between ranks; every rank must call this with the same ``parts``.

    Args:
        parts: see :func:`moved_parts`.
        source: this rank's tensors by name, of the dtype of ``like`` or a wider one.
        target: this rank's tensors to fill, by name.
        like: ranks exchange in its dtype, on its device.

    Returns:
        The bytes that this rank received from others.
    """
    received, group, size = 0, list[MovedPart](), 0
    for part in parts:
        moved = part.elements if part.source != part.target else 0
        if group and size + moved > MAX_ELEMENTS:
            received += _exchange(group, source, target, like)
            group, size = [], 0
        group.append(part)
        size += moved
    return received + (_exchange(group, source, target, like) if group else 0)


def _exchange(
    group: Sequence[MovedPart], source: Mapping[str, Tensor], target: Mapping[str, Tensor], like: Tensor
) -> int:
    """Exchange all parts of a group in one all-to-all, and return the bytes that this rank received."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for part in group:
        if part.source == part.target == rank:
            _put(target[part.name], part, _taken(source[part.name], part))
    transfers = [part for part in group if part.source != part.target]
    if not transfers:
        return 0
    outgoing = [[part for part in transfers if (part.source, part.target) == (rank, other)] for other in range(ranks)]
    incoming = [[part for part in transfers if (part.source, part.target) == (other, rank)] for other in range(ranks)]
    sent = [_taken(source[part.name], part).to(like.dtype).flatten() for parts in outgoing for part in parts]
    received_sizes, sent_sizes = _sizes(incoming), _sizes(outgoing)
    buffer = like.new_empty(sum(received_sizes))
    dist.all_to_all_single(buffer, SHIPPED.cat(sent) if sent else like.new_empty(0), received_sizes, sent_sizes)
    arrived = [part for parts in incoming for part in parts]
    for part, x in zip(arrived, SHIPPED.split(buffer, [part.elements for part in arrived]), strict=True):
        _put(target[part.name], part, x.view(part.shape))
    return len(buffer) * buffer.element_size()


def _sizes(messages: Sequence[Sequence[MovedPart]]) -> list[int]:
    """Return the number of elements of each message."""
    return [sum(part.elements for part in parts) for parts in messages]


def _taken(x: Tensor, part: MovedPart) -> Tensor:
    """Return the elements of ``part`` from the source's tensor."""
    for dim, indices in enumerate(part.taken):
        if len(indices) != x.shape[dim] or not bool((indices == SHIPPED.arange(len(indices))).all()):
            x = x.index_select(dim, indices.to(x.device))
    return x


def _put(x: Tensor, part: MovedPart, values: Tensor) -> None:
    if not part.placed:
        x.copy_(values)
        return
    last = len(part.placed) - 1
    where = tuple(indices.to(x.device).view(-1, *[1] * (last - dim)) for dim, indices in enumerate(part.placed))
    x[where] = values.to(x.dtype)
