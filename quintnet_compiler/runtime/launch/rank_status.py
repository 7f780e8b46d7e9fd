"""What ranks tell each other of themselves, and what others make of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compat.distributed import Store
from ...core.code_origin import PACKAGE, STDLIB, TORCH
from ...core.errors import RunError

OF_DEVICES = ("QN405", "QN406", "QN407")  # of this rank's own, whatever text of NCCL's caused them
OTHERS = TORCH, PACKAGE, STDLIB, "<"
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True)
class RankStatus:
    """What a rank last said of itself. ``runs``: begun so far, of any program; ``step``: the training step that it
    began last, -1 before the first; ``given``: what the last run was given; ``waiting``: whether its main thread is in
    communication; ``at``: the user's line that it is in."""

    beat: int = 0
    runs: int = 0
    step: int = -1
    given: str = ""
    waiting: bool = False
    at: str = ""
    pid: int = 0
    host: str = ""

    @classmethod
    def read(cls, text: bytes) -> RankStatus:
        return cls(**json.loads(text))


def read_rows(store: Store, ranks: Sequence[int]) -> dict[int, RankStatus]:
    """Raises: an error of torch's if one of ``ranks`` has never written."""
    told = store.multi_get([str(rank) for rank in ranks])
    return {rank: RankStatus.read(text) for rank, text in zip(ranks, told, strict=True)}


def of_communication(error: BaseException | None) -> bool:
    """Whether an error is what other ranks' faults look like from here."""
    while error is not None:
        if isinstance(error, RunError) and error.code in OF_DEVICES:
            return False
        text = str(error)
        if isinstance(error, dist.DistError) or "/gloo/" in text or "NCCL" in text or "Application timeout" in text:
            return True
        if isinstance(error, RunError) and error.code == "QN402":
            return True
        error = error.__cause__ or error.__context__
    return False


def differ(rows: Mapping[int, RankStatus], run: int) -> list[str]:
    """What the ranks that are in a run were given, a line for each that differs from most; nothing if none does."""
    kinds: dict[str, list[int]] = {}
    for rank, row in rows.items():
        if row.runs == run:
            kinds.setdefault(row.given, []).append(rank)
    if len(kinds) < 2:
        return []
    usual = max(kinds, key=lambda given: len(kinds[given]))
    odd = sorted((rank, given) for given, ranks in kinds.items() if given != usual for rank in ranks)
    return [*(f"rank {rank}: {given}" for rank, given in odd), f"all others: {usual}"]


def described(x: Any) -> Any:
    """What ranks must have in common: structure, dtypes and shapes."""
    if isinstance(x, Tensor):
        return x.dtype, x.shape
    if isinstance(x, (tuple, list)):
        return tuple([described(one) for one in x])
    if isinstance(x, Mapping):
        return {name: described(one) for name, one in x.items()}
    return x if isinstance(x, (str, bool)) else type(x).__name__


def shown(given: Any) -> str:
    """What :func:`described` returned, for people."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], torch.dtype):
        return f"{str(given[0]).removeprefix('torch.')}{list(given[1])}"
    if isinstance(given, tuple):
        return f"({', '.join(map(shown, given))})"
    if isinstance(given, Mapping):
        return f"{{{', '.join(f'{name}: {shown(one)}' for name, one in given.items())}}}"
    return str(given)


def place(stacks: str, thread: int) -> tuple[bool, str]:
    """Whether a thread is in communication, and the innermost line that is neither Python's, torch's nor ours.

    Args:
        stacks: what faulthandler writes of all threads. Frames of a running thread must not be walked from another
            one: while torch traces, that ends the process (a segmentation fault, seen with Python 3.11).
    """
    waiting = False
    for file, line, name in FRAME.findall(stacks.partition(f" 0x{thread:016x} ")[2].partition("\n\n")[0]):
        waiting = waiting or "/torch/distributed/" in file or "/runtime/transport/" in file
        if not file.startswith(OTHERS):
            return waiting, f"{file}:{line} in {name}"
    return waiting, ""


def first_line(error: BaseException) -> str:
    """What an error says, without where in gloo it was and what is typical."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S*/gloo/\S*\] ", "", line).partition(". This is typically")[0]
