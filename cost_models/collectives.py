"""Time of a collective over a group: alpha-beta per algorithm, over the levels that the group crosses.

Ring and tree after Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005); the hierarchy as in NCCL: a ring enters each node over as many adapters as it has ranks there. ``num_bytes``
is always the size of the full, unsplit value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from ..core.errors import CompileError
from .links import Group, Part

# What starting any collective costs (kernel launch, rendezvous of channels), and how many bytes a channel needs in
# flight before it runs at full speed: NCCL's own tuning tables (src/graph/tuning.cc) have 6-14 microseconds of base
# latency per algorithm, and chunks of 0.5 MiB on each of a few channels.
START_SECONDS = 8e-6
RAMP_BYTES = 1 << 20
# NCCL's protocols for bulk data, as its tuning tables have them (src/graph/tuning.cc, ring): of "Simple", a step over
# NVLink takes 3.4 microseconds and one over the network, through a thread of the host, 14; of "LL128", which stores a
# flag beside every 120 bytes, 1.9 and 4. Each: share of bandwidth, seconds of a step in shares of a link's latency, and
# what a network's latency lacks of a step.
PROTOCOLS = ((1.0, 1.0, 11.2e-6), (0.92, 0.56, 1.2e-6))

# Sizes of messages that add up gradients: small ones start early in the backward, large ones use the links well.
BANDWIDTH_SHARE = 0.9  # of the links, that a message shall reach
MIN_BUCKET_BYTES, MAX_BUCKET_BYTES = 2**20, 2**29  # messages under way take memory, too
MIN_BUCKETS = 8  # the last message is not overlapped with the backward, so it shall be a small share of all


def volume(name: str, num_bytes: float, ranks: int) -> float:
    """Bytes that leave each rank, where no rank sends more than it must.

    Raises:
        CompileError: QN210 for a collective that has no price.
    """
    others = (ranks - 1) / ranks
    shares = {"all_reduce": 2 * others, "all_to_all": others / ranks, "send": 1.0}
    if name not in ALGORITHMS:
        raise CompileError("QN210", f"no price for the collective {name!r}", fix=f"use one of {', '.join(ALGORITHMS)}")
    return num_bytes * shares.get(name, others)


def _slowest(group: Group) -> float:
    return min(hop.bytes_per_second for hop in group.hops)


def _steps(group: Group) -> float:
    """Latency of one pass over the group along a tree, in seconds."""
    return sum(math.log2(hop.members) * hop.level.seconds for hop in group.hops)


def _around(group: Group, link: float, network: float) -> float:
    """Latency of one pass over the group along a ring, which visits every rank: all of a node, then of the next."""
    seconds, behind = 0.0, 1
    for hop in reversed(group.hops):
        step = hop.level.seconds + network if hop.level.network else hop.level.seconds * link
        seconds += (hop.members - 1) * behind * step
        behind *= hop.members
    return seconds


def _ring(group: Group, num_bytes: float, passes: int) -> float:
    share = volume("all_gather", num_bytes, group.size)
    return passes * min(
        _around(group, link, network) + (share / reached + RAMP_BYTES) / _slowest(group)
        for reached, link, network in PROTOCOLS
    )


def _tree(group: Group, num_bytes: float) -> float:
    return 2 * (_steps(group) + (num_bytes + RAMP_BYTES) / _slowest(group))


def all_reduce(group: Group, num_bytes: float) -> float:
    """Return the faster of a ring (2 (n-1)/n of the bytes) and a tree (logarithmic latency)."""
    return min(_ring(group, num_bytes, 2), _tree(group, num_bytes))


def gather_seconds(group: Group, num_bytes: float) -> float:
    """Return the time of an all-gather or a reduce-scatter: one pass of a ring."""
    return _ring(group, num_bytes, 1)


def broadcast(group: Group, num_bytes: float) -> float:
    """Along a ring, chunk by chunk: the last rank has it when the last chunk has passed all the others. Unlike in a
    gather, where every rank has something to send from the start, links idle until the first chunk arrives."""
    fill, behind = 0.0, 1
    for hop in reversed(group.hops):
        fill += (hop.members - 1) * behind * min(RAMP_BYTES, num_bytes) / hop.bytes_per_second
        behind *= hop.members
    return fill + _ring(group, num_bytes, 1)


def all_to_all(group: Group, num_bytes: float) -> float:
    """Each rank sends 1/n of its part to every other; the levels run side by side, so the slowest one counts."""
    part, worst, inside = num_bytes / group.size, 0.0, 1
    for hop in group.hops:
        beyond = inside * hop.members
        leaving = part * (beyond - inside) / group.size
        worst = max(worst, (leaving + RAMP_BYTES) / hop.level.bytes_per_second)
        inside = beyond
    return _steps(group) + worst


def send(group: Group, num_bytes: float) -> float:
    """From one rank to its neighbour, over the outermost level that the group crosses."""
    level = group.hops[-1].level
    return level.seconds + (num_bytes + RAMP_BYTES / 4) / level.bytes_per_second


ALGORITHMS: Mapping[str, Callable[[Group, float], float]] = MappingProxyType(
    {
        "all_reduce": all_reduce,
        "all_gather": gather_seconds,
        "reduce_scatter": gather_seconds,
        "broadcast": broadcast,
        "all_to_all": all_to_all,
        "send": send,
    }
)


def lost_seconds(hidden: float, group: Group, parts: Iterable[Part]) -> float:
    """Return what computing loses to ``hidden`` seconds of concurrent communication.

    The transfer takes multiprocessors and memory bandwidth away, the less of both the slower its links are. Of several
    ``parts`` of a cluster, the largest loss counts.
    """
    if not group.hops:
        return 0.0
    rates = [(part.device.efficiency.contention, next(iter(part.levels.values())).bytes_per_second) for part in parts]
    return max(share * hidden * min(1.0, _slowest(group) / fast) for share, fast in rates)


def beside(work: float, moved: float, lost: Callable[[float], float]) -> float:
    """Return the seconds of computing ``work`` and of concurrent communication ``moved``.

    ``lost``: what computing loses to so many seconds of communication.
    """
    return max(work + lost(min(work, moved)), moved)


def in_turn(
    work: Sequence[float], inputs: Sequence[float], after: Sequence[float], lost: Callable[[float], float]
) -> float:
    """Return the seconds of parts that follow each other, each with communication.

    A part waits for the communication of its ``inputs``, and starts some ``after`` it; while it computes, the inputs of
    the next part and what the previous part has started are communicated.

    >>> in_turn([4, 4], [1, 1], [2, 9], lambda hidden: 0)  # 1, then 4 beside 1, then 4 beside 2, then 9
    18
    """
    total = inputs[0] + after[-1]
    for index, seconds in enumerate(work):
        ahead = inputs[index + 1] if index + 1 < len(work) else 0.0
        total += beside(seconds, ahead + (after[index - 1] if index else 0.0), lost)
    return total


def collective_seconds(name: str, group: Group, num_bytes: float) -> float:
    """Return the time of the collective ``name`` of ``num_bytes`` in all over ``group``, in seconds.

    Raises:
        CompileError: QN210 for a collective that has no price.
    """
    if not volume(name, num_bytes, group.size) or group.size == 1:
        return 0.0
    return START_SECONDS + ALGORITHMS[name](group, num_bytes)


def bucket_bytes(seconds: Callable[[float], float], total: float) -> int:
    """Return the smallest power of two at which a collective loses at most a tenth to latency.

    ``seconds``: its time for so many bytes; ``total``: the bytes of all gradients.
    """
    per_byte = (seconds(2.0**41) - seconds(2.0**40)) / 2.0**40
    most = max(MIN_BUCKET_BYTES, min(MAX_BUCKET_BYTES, 2 ** (int(total / MIN_BUCKETS) | 1).bit_length() // 2))
    size = MIN_BUCKET_BYTES
    while size < most and size * per_byte < BANDWIDTH_SHARE * seconds(size):
        size *= 2
    return size
