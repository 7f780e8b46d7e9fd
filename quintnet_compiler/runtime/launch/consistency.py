"""Ranks compile for themselves. Before the first communication of a program they make sure that they agree on it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest

import torch
import torch.distributed as dist

from ...core.errors import RunError
from .rank_status import some_ranks

SHORT, LONG = b"t", b"h"  # what the rest of a claim is
WIDTH = 40  # bytes of one claim: a short text itself, or the start of a longer one's SHA-256
AROUND = 60  # characters that are shown before and after the first difference of two long texts


SAME_SCRIPT = "start every rank with the same script, plan and packages"


def agree(claims: Mapping[str, str], device: torch.device, fix: str = SAME_SCRIPT) -> None:
    """Compare ``claims`` (subject -> text) between all ranks of the world.

    Every rank calls this at the same time, with the same keys.

    Raises:
        RunError: QN403 on every rank if they differ: which ranks differ from the others, and in what.
    """
    claimed = b"".join(_shortened(text) for text in claims.values())
    row = torch.tensor(list(claimed), dtype=torch.uint8, device=device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    received = [bytes(r.tolist()) for r in rows]
    lines = []
    for index, (subject, text) in enumerate(claims.items()):
        values = [claim[index * WIDTH : (index + 1) * WIDTH] for claim in received]
        usual, _ = Counter(values).most_common(1)[0]
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            others, first = values.index(usual), odd[0]
            short = all(value.startswith(SHORT) for value in values)
            pair = [_text(values[rank][1:]) if short else _from(rank, text, device) for rank in (others, first)]
            ours, theirs = (pair[1], pair[0]) if short else first_difference(pair[1], pair[0])
            also = f" ({some_ranks(odd[1:])} too)" if len(odd) > 1 else ""
            lines.append(f"{subject}: rank {first}: {ours}{also}; all others: {theirs}")
    if lines:
        raise RunError("QN403", "\n  ".join(lines), fix=fix)


def first_difference(text: str, other: str) -> tuple[str, str]:
    """Return a line of each text, where they begin to differ.

    >>> first_difference("zero: 0\\ndp: 2", "zero: 0\\ndp: 4")
    ('dp: 2', 'dp: 4')
    """
    pairs = zip_longest(text.splitlines(), other.splitlines(), fillvalue="(nothing)")
    line, other_line = next(((a, b) for a, b in pairs if a != b), ("", ""))
    same = next((i for i, (a, b) in enumerate(zip(line, other_line, strict=False)) if a != b), 0)
    shown = slice(max(0, same - AROUND), same + AROUND)
    return line[shown].strip(), other_line[shown].strip()


def tell(text: str, device: torch.device) -> tuple[str, ...]:
    """Every rank's ``text``. Every rank calls this at the same time."""
    mine = text.encode(errors="replace")
    most = torch.tensor(len(mine), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    row = torch.frombuffer(bytearray(mine.ljust(max(1, int(most)), b"\0")), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return tuple(_text(r.cpu().numpy().tobytes()) for r in rows)


def _from(rank: int, text: str, device: torch.device) -> str:
    """Return the ``text`` of ``rank``, on every rank."""
    data = text.encode(errors="replace")
    size = torch.tensor(len(data), device=device)
    dist.broadcast(size, rank)
    most = max(1, int(size))
    sent = torch.frombuffer(bytearray(data.ljust(most, b"\0")[:most]), dtype=torch.uint8).to(device)
    dist.broadcast(sent, rank)
    return _text(sent.cpu().numpy().tobytes())


def told_by_first(text: str, device: torch.device) -> str:
    """Rank 0's ``text``. Every rank calls this at the same time."""
    return _from(0, text, device)


def _shortened(text: str) -> bytes:
    data = SHORT + text.encode()
    if len(data) > WIDTH:
        data = LONG + hashlib.sha256(data).digest()
    return data.ljust(WIDTH, b"\0")


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
