"""From one layout to another between the ranks of one world: each sends what others lack, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...ir.distributed_program import DistributedProgram
from .true_part import TruePart

Held = Sequence[TruePart | None]  # of one parameter on each rank; None: it holds nothing of it
MOST_ELEMENTS = 2**28  # that all ranks exchange at once, but for a part that is larger


@dataclass(frozen=True)
class MovedPart:
    """What rank ``source`` gives rank ``target`` of the parameter ``name``: for each dim, the places in the source's
    part, and those in the target's."""

    name: str
    source: int
    target: int
    taken: tuple[Tensor, ...]
    placed: tuple[Tensor, ...]

    @property
    def shape(self) -> list[int]:
        return [len(indices) for indices in self.taken]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def held(program: DistributedProgram, name: str) -> Held:
    """What each rank holds of a parameter, without padding."""
    spec, found = program.state[name], list[TruePart | None]()
    homes = {program.schedule.placement[stage] for stage in spec.stages}
    for rank in range(program.mesh.size):
        place = program.mesh.coordinate(rank)
        here = place.get("pp", 0) in homes
        found.append(TruePart.of(spec.shape, spec.sharding, program.axes, place) if here else None)
    return found


def moved_parts(name: str, source: Held, target: Held) -> Iterator[MovedPart]:
    """The plan for one parameter. What a rank has already, it takes from itself; of ranks that hold the same, those
    that lack it ask different ones.

    >>> [(m.source, m.target, m.elements) for m in moved_parts("w", _rows(4, 2, 2), _rows(4, 4, 1))]
    [(0, 0, 1), (1, 1, 1), (2, 2, 1), (3, 3, 1)]
    """
    holders: dict[bytes, list[int]] = {}
    for rank, part in enumerate(source):
        if part is not None:
            holders.setdefault(b"|".join(x.numpy().tobytes() for x in part.positions), []).append(rank)
    for rank, part in enumerate(target):
        for ranks in holders.values() if part is not None else ():
            giver = rank if rank in ranks else ranks[rank % len(ranks)]
            given = source[giver]
            assert given is not None and part is not None
            pairs = [_common(a, b) for a, b in zip(given.positions, part.positions, strict=True)]
            if all(len(taken) for taken, _ in pairs):
                yield MovedPart(name, giver, rank, tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def _common(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Where the indices that both have stand in each."""
    size = 1 + max([int(x.max()) for x in (one, other) if len(x)], default=-1)
    where = torch.full((size,), -1)
    where[one] = torch.arange(len(one))
    there = (where[other] >= 0).nonzero().flatten()
    return where[other[there]], there


def _rows(ranks: int, parts: int, copies: int) -> Held:
    """Of four rows: rank r has those of part r // copies, modulo the parts."""
    return [TruePart((torch.arange(4).view(parts, -1)[rank // copies % parts],)) for rank in range(ranks)]


def reshard(
    parts: Iterable[MovedPart], source: Mapping[str, Tensor], target: Mapping[str, Tensor], like: Tensor
) -> int:
    """Every rank calls this with the same ``parts``, which ranks exchange where ``like`` is, and in its dtype.
    ``source`` and ``target``: this rank's tensors, of this dtype or wider ones.

    Returns:
        The bytes that this rank received from others.
    """
    received, group, size = 0, list[MovedPart](), 0
    for part in parts:
        moved = part.elements if part.source != part.target else 0
        if group and size + moved > MOST_ELEMENTS:
            received += _exchange(group, source, target, like)
            group, size = [], 0
        group.append(part)
        size += moved
    return received + (_exchange(group, source, target, like) if group else 0)


def _exchange(
    group: Sequence[MovedPart], source: Mapping[str, Tensor], target: Mapping[str, Tensor], like: Tensor
) -> int:
    """All parts of a group as one message between any two ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for part in group:
        if part.source == part.target == rank:
            _put(target[part.name], part, _taken(source[part.name], part))
    away = [part for part in group if part.source != part.target]
    if not away:
        return 0
    gives = [[part for part in away if (part.source, part.target) == (rank, other)] for other in range(ranks)]
    gets = [[part for part in away if (part.source, part.target) == (other, rank)] for other in range(ranks)]
    sent = [_taken(source[part.name], part).to(like.dtype).flatten() for parts in gives for part in parts]
    counts = [[sum(part.elements for part in parts) for parts in each] for each in (gets, gives)]
    into = like.new_empty(sum(counts[0]))
    dist.all_to_all_single(into, torch.cat(sent) if sent else like.new_empty(0), counts[0], counts[1])
    came = [part for parts in gets for part in parts]
    for part, x in zip(came, torch.split(into, [part.elements for part in came]), strict=True):
        _put(target[part.name], part, x.view(part.shape))
    return len(into) * into.element_size()


def _taken(x: Tensor, part: MovedPart) -> Tensor:
    for dim, indices in enumerate(part.taken):
        if len(indices) != x.shape[dim] or not bool((indices == torch.arange(len(indices))).all()):
            x = x.index_select(dim, indices.to(x.device))
    return x


def _put(x: Tensor, part: MovedPart, values: Tensor) -> None:
    if not part.placed:
        x.copy_(values)
        return
    last = len(part.placed) - 1
    where = tuple(one.to(x.device).view(-1, *[1] * (last - dim)) for dim, one in enumerate(part.placed))
    x[where] = values.to(x.dtype)
