"""What ranks tell each other of themselves, and what others make of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compat.distributed import Store
from ...core.code_origin import PACKAGE, STDLIB, TORCH
from ...core.errors import InputError, RunError

OF_DEVICES = ("QN405", "QN406", "QN407")  # of this rank's own, whatever text of NCCL's caused them
OTHERS = TORCH, PACKAGE, STDLIB, "<"
MODULE_CHANGES = "changes of the module"  # in the description of a call's arguments
SHOWN = 8  # ranks that a text names
LONGEST_LINE = 1000  # characters of what goes through the store
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True)
class RankStatus:
    """The last status of a rank.

    Attributes:
        calls: begun so far (see :mod:`.calls`). Of the last one: ``kind``, its ``name`` for people, the user's
            ``line``, its arguments (``given``), and whether the rank is still ``inside``.
        step: the training step that it began last, -1 before the first.
        waiting: whether its main thread is in communication.
        at: the user's line that it is in.
        gave_up: whether it has waited for others within its call for longer than it may.
        finished: whether its function has returned.
        offers: whether it could save all that a run needs.
        space: where ``pid`` counts (see :func:`.faults.number_space`).
    """

    beat: int = 0
    calls: int = 0
    kind: str = ""
    name: str = ""
    line: str = ""
    inside: bool = False
    step: int = -1
    given: str = ""
    waiting: bool = False
    at: str = ""
    gave_up: bool = False
    finished: bool = False
    offers: bool = False
    pid: int = 0
    host: str = ""
    space: str = ""

    @classmethod
    def read(cls, text: bytes) -> RankStatus:
        return cls(**json.loads(text))


def read_rows(store: Store, ranks: Sequence[int]) -> dict[int, RankStatus]:
    """Return the last status of ranks, without waiting; those that have never written are at their start."""
    written = list(ranks) if store.check([str(rank) for rank in ranks]) else [r for r in ranks if store.check([str(r)])]
    texts = store.multi_get([str(rank) for rank in written]) if written else []
    rows = {rank: RankStatus.read(text) for rank, text in zip(written, texts, strict=True)}
    return {rank: rows.get(rank, RankStatus()) for rank in ranks}


def of_communication(error: BaseException | None) -> bool:
    """Return whether an error is how other ranks' faults look from this one."""
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


def differ(rows: Mapping[int, RankStatus], call: int) -> list[str]:
    """Return a line for each rank whose arguments of a call differ from most; none if they are equal."""
    kinds: dict[str, list[int]] = {}
    for rank, row in rows.items():
        if row.calls == call:
            kinds.setdefault(row.given, []).append(rank)
    if len(kinds) < 2:
        return []
    usual = max(kinds, key=lambda given: len(kinds[given]))
    odd = sorted((rank, given) for given, ranks in kinds.items() if given != usual for rank in ranks)
    return [*(f"rank {rank}: {given}" for rank, given in odd), f"all others: {usual}"]


def refusal(rows: Mapping[int, RankStatus], call: int, name: str) -> InputError | None:
    """Return the error if ranks were given other arguments of a call than others."""
    lines = differ(rows, call)
    if not lines:
        return None
    if any(f"{MODULE_CHANGES}: " in line for line in lines):
        reason, fix = "modules of ranks were changed in different ways", "change modules on all ranks, in the same way"
    else:
        reason = "ranks were given different batches"
        fix = "read the same data on every rank, or as many rows of it with batch_is_local=True"
    return InputError("QN102", "\n  ".join([f"{name}: {reason}", *lines]), fix=fix)


def brief(text: str) -> str:
    """A text that is short enough for the store, and differs where the long one does."""
    if len(text) <= LONGEST_LINE:
        return text
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
    return f"{shorten_middle(text, LONGEST_LINE)} (SHA-256 {digest})"


def described(x: Any) -> Any:
    """Return what ranks must have in common: structure, dtypes and shapes."""
    if isinstance(x, Tensor):
        return x.dtype, x.shape
    if isinstance(x, (tuple, list)):
        return tuple([described(item) for item in x])
    if isinstance(x, Mapping):
        return {name: described(item) for name, item in x.items()}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {field.name: described(getattr(x, field.name, None)) for field in dataclasses.fields(x)}
    return x if isinstance(x, (str, bool)) else type(x).__name__


def format_value(description: Any) -> str:
    """Format what :func:`described` returned for people."""
    if isinstance(description, tuple) and len(description) == 2 and isinstance(description[0], torch.dtype):
        return f"{str(description[0]).removeprefix('torch.')}{list(description[1])}"
    if isinstance(description, tuple):
        return f"({', '.join(map(format_value, description))})"
    if isinstance(description, Mapping):
        return f"{{{', '.join(f'{name}: {format_value(item)}' for name, item in description.items())}}}"
    return str(description)


def some_ranks(ranks: Sequence[int]) -> str:
    """Ranks by their numbers, the first ones if they are many."""
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:SHOWN]))}{more}"


def shown_line(file: str, number: int) -> str:
    """A line of a file; its path from where the process works, if it is in there."""
    return f"{file.removeprefix(os.getcwd() + os.sep)}:{number}" if file else ""


def shorten_middle(text: str, most: int) -> str:
    """A text of at most about ``most`` characters: its middle is left out where it has more."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} ... ({len(text) - most} characters left out) ... {text[-(most // 2) :]}"


def place(stacks: str, thread: int) -> tuple[bool, str]:
    """Return whether a thread is in communication, and the innermost line that is neither Python's, torch's nor ours.

    Args:
        stacks: what faulthandler writes of all threads. Frames of a running thread must not be walked from another
            one: while torch traces, that ends the process (a segmentation fault, seen with Python 3.11).
        thread: its identifier.
    """
    waiting = False
    for file, line, name in FRAME.findall(stacks.partition(f" 0x{thread:016x} ")[2].partition("\n\n")[0]):
        waiting = waiting or "/torch/distributed/" in file or "/runtime/transport/" in file
        if not file.startswith(OTHERS):
            return waiting, f"{file}:{line} in {name}"
    return waiting, ""


def innermost(stacks: str, thread: int) -> str:
    """The line that a thread is at, whosever it is. ``stacks``: see :func:`place`."""
    frame = FRAME.search(stacks.partition(f" 0x{thread:016x} ")[2].partition("\n\n")[0])
    return frame.group(0) if frame else ""


def first_line(error: BaseException) -> str:
    """Return the text of an error, without its place in gloo and without boilerplate."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return shorten_middle(re.sub(r"^\[\S*/gloo/\S*\] ", "", line).partition(". This is typically")[0], LONGEST_LINE)
