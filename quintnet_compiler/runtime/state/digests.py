"""64-bit digests of tensors: which values ranks hold, in one pass over memory and on any device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

BLOCK = 2**16  # words of 8 bytes: on a CPU, what stays in its second cache
BLOCKS = 2**6  # at once on other devices
RUN = 64  # elements that a sample takes in a row
_ODD = -7046029254386353131  # 2**64 / golden ratio, odd: its products with close numbers are far apart


def digests(tensors: Iterable[Tensor], most: int | None = None) -> list[int]:
    """A number for each tensor's dtype, shape and bits. Different ones have equal numbers with a chance of 2**-63.

    Args:
        most: look at about so many elements of each, spread over all of it; None: at all.
    """
    given = list(tensors)
    factors = {device: _factors(device) for device in dict.fromkeys(x.device for x in given)}
    sums = [_sum(_words(x if most is None else sample(x, most)), factors[x.device]) for x in given]
    found: list[int] = torch.stack([x.cpu() for x in sums]).tolist() if sums else []
    return [together(n, str(x.dtype), tuple(x.shape)) for n, x in zip(found, given, strict=True)]


def device_digests(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a number [n] for each tensor's bits alone, on ``device``: the host waits for nothing."""
    given = list(tensors)
    factors = {there: _factors(there) for there in dict.fromkeys(x.device for x in given)}
    sums = [_sum(_words(x), factors[x.device]).to(device, non_blocking=True) for x in given]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)


def together(*parts: object) -> int:
    """One number for several things, as they print."""
    data = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(data, "little", signed=True)


def sample(x: Tensor, most: int) -> Tensor:
    """Short runs of elements, so that few lines of memory are read."""
    if x.numel() <= most:
        return x
    flat = x.reshape(-1)
    return flat[: flat.numel() // RUN * RUN].view(-1, RUN)[:: -(-flat.numel() // most)]


def _words(x: Tensor) -> Tensor:
    """The bits, in the order of the elements, as int64; zeros at the end."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    data = x.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8 or data.numel() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
        data = data.clone() if data.storage_offset() % 8 else data
    return data.view(torch.int64)


def _sum(words: Tensor, factors: Tensor) -> Tensor:
    """The sum, modulo 2**64, of each word (mixed: a flip of two signs must not cancel) times a number of its place:
    the same in any order of addition."""
    while words.numel() > 1:
        at_once = BLOCK if words.device.type == "cpu" else BLOCK * BLOCKS
        words = torch.cat([_blocks(chunk, factors) for chunk in torch.split(words, at_once)])
    return words.sum()


def _blocks(words: Tensor, factors: Tensor) -> Tensor:
    full = words.numel() // BLOCK * BLOCK
    parts: Sequence[Tensor] = [
        part for part in (words[:full].view(-1, BLOCK), words[full:].view(1, -1)) if part.numel()
    ]
    sums = []
    for part in parts:
        mixed = part * _ODD
        mixed ^= mixed >> 32
        mixed *= factors[: part.shape[1]]
        sums.append(mixed.sum(1))
    return torch.cat(sums)


def _factors(device: torch.device) -> Tensor:
    """An odd number for each place in a block."""
    found = torch.arange(1, BLOCK + 1, device=device) * _ODD
    found ^= found >> 29
    found *= -4658895280553007687
    found ^= found >> 32
    return found | 1
