"""How many bytes of gradients to add up in one message: few start early beside the backward, many use the links."""

from __future__ import annotations

from collections.abc import Callable

REACHED = 0.9  # of the bandwidth of links
SMALLEST, LARGEST = 2**20, 2**29  # bytes; what is under way takes memory, too
SHARE = 8  # the last message has no backward beside it: at most so large a part of all


def bucket_bytes(seconds: Callable[[float], float], total: float) -> int:
    """The smallest power of two at which a collective that takes ``seconds`` for so many bytes loses at most a tenth to
    latency. ``total``: the bytes of all gradients."""
    per_byte = (seconds(2.0**41) - seconds(2.0**40)) / 2.0**40
    most = max(SMALLEST, min(LARGEST, 2 ** (int(total / SHARE) | 1).bit_length() // 2))
    size = SMALLEST
    while size < most and size * per_byte < REACHED * seconds(size):
        size *= 2
    return size
