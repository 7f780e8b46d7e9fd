"""Ranks compile for themselves. Before the first communication of a program they make sure that they agree on it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ...core.errors import RunError

WIDTH = 40  # bytes of one claim: a short text itself, or the start of a longer one's SHA-256


def agree(claims: Mapping[str, str], device: torch.device) -> None:
    """Compare ``claims`` (what about -> text) between all ranks of the world. Every rank calls this at the same time,
    with the same keys.

    Raises:
        RunError: QN403 on every rank if they differ: which ranks differ from the others, and in what.
    """
    mine = b"".join(_shortened(text) for text in claims.values())
    row = torch.tensor(list(mine), dtype=torch.uint8, device=device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    told = [bytes(r.tolist()) for r in rows]
    lines = []
    for index, what in enumerate(claims):
        values = [_text(t[index * WIDTH : (index + 1) * WIDTH]) for t in told]
        usual, _ = Counter(values).most_common(1)[0]
        odd = {rank: value for rank, value in enumerate(values) if value != usual}
        if odd:
            found = ", ".join(f"rank {rank}: {value}" for rank, value in odd.items())
            lines.append(f"{what}: {found}; all others: {usual}")
    if lines:
        raise RunError("QN403", "\n  ".join(lines), fix="start every rank with the same script, plan and packages")


def tell(text: str, device: torch.device) -> tuple[str, ...]:
    """Every rank's ``text``. Every rank calls this at the same time."""
    mine = text.encode(errors="replace")
    most = torch.tensor(len(mine), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    row = torch.frombuffer(bytearray(mine.ljust(max(1, int(most)), b"\0")), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return tuple(_text(r.cpu().numpy().tobytes()) for r in rows)


def _shortened(text: str) -> bytes:
    data = text.encode()
    if len(data) > WIDTH:
        data = hashlib.sha256(data).hexdigest()[:16].encode()
    return data.ljust(WIDTH, b"\0")


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
