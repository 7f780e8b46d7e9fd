"""64-bit digests of tensors, in one pass over memory and on any device, to compare the values of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...compat.torch_codegen import SHIPPED

BLOCK = 2**16  # words of 8 bytes; fits the second-level cache of a CPU
NUM_BLOCKS = 2**6  # at once on other devices
RUN = 64  # consecutive elements of a sample
_MULTIPLIER = -7046029254386353131  # 2**64 / golden ratio, odd: spreads products with close numbers


def digests(tensors: Iterable[Tensor], max_elements: int | None = None) -> list[int]:
    """Return a digest of each tensor's dtype, shape and bits; the chance of a collision is 2**-63.

    Args:
        tensors: on any devices.
        max_elements: read about so many elements of each, spread over all of it; None: all.
    """
    listed = list(tensors)
    factors = {device: _factors(device) for device in dict.fromkeys(x.device for x in listed)}
    sums = [_sum(_words(x if max_elements is None else sample(x, max_elements)), factors[x.device]) for x in listed]
    numbers: list[int] = SHIPPED.stack([x.cpu() for x in sums]).tolist() if sums else []
    return [together(n, str(x.dtype), tuple(x.shape)) for n, x in zip(numbers, listed, strict=True)]


def device_digests(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return digests [n] (int64) of the tensors' bits alone, on ``device``, without synchronizing with the host."""
    listed = list(tensors)
    factors = {place: _factors(place) for place in dict.fromkeys(x.device for x in listed)}
    sums = [_sum(_words(x), factors[x.device]).to(device, non_blocking=True) for x in listed]
    return SHIPPED.stack(sums) if sums else SHIPPED.zeros(0, dtype=torch.int64, device=device)


def together(*parts: object) -> int:
    """Return one digest of several objects' ``repr``."""
    data = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(data, "little", signed=True)


def sample(x: Tensor, max_elements: int) -> Tensor:
    """Return about ``max_elements`` elements in short runs, so that few cache lines are read."""
    if x.numel() <= max_elements:
        return x
    flat = x.reshape(-1)
    return flat[: flat.numel() // RUN * RUN].view(-1, RUN)[:: -(-flat.numel() // max_elements)]


def _words(x: Tensor) -> Tensor:
    """Return the bits, in the order of the elements, as int64, padded with zeros."""
    x = SHIPPED.view_as_real(x.resolve_conj()) if x.is_complex() else x
    data = x.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8 or data.numel() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
        data = data.clone() if data.storage_offset() % 8 else data
    return data.view(torch.int64)


def _sum(words: Tensor, factors: Tensor) -> Tensor:
    """Return the sum, modulo 2**64, of each mixed word times a factor of its position.

    The order of additions does not matter. Words are mixed so that two flipped signs do not cancel.
    """
    while words.numel() > 1:
        chunk_words = BLOCK if words.device.type == "cpu" else BLOCK * NUM_BLOCKS
        words = SHIPPED.cat([_block_sums(chunk, factors) for chunk in SHIPPED.split(words, chunk_words)])
    return words.sum()


def _block_sums(words: Tensor, factors: Tensor) -> Tensor:
    full = words.numel() // BLOCK * BLOCK
    parts: Sequence[Tensor] = [
        part for part in (words[:full].view(-1, BLOCK), words[full:].view(1, -1)) if part.numel()
    ]
    sums = []
    for part in parts:
        mixed = part * _MULTIPLIER
        mixed ^= mixed >> 32
        mixed *= factors[: part.shape[1]]
        sums.append(mixed.sum(1))
    return SHIPPED.cat(sums)


def _factors(device: torch.device) -> Tensor:
    """Return an odd number for each position in a block."""
    factors = SHIPPED.arange(1, BLOCK + 1, device=device) * _MULTIPLIER
    factors ^= factors >> 29
    factors *= -4658895280553007687
    factors ^= factors >> 32
    return factors | 1
