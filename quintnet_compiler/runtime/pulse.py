"""What a rank lets others know while it runs: that it lives, how far it is, and what its step was given."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from ..errors import InputError, QuintNetError, RunError

PERIOD = 0.1  # seconds between two beats
LATEST = 0.5  # seconds in which a rank that was given another batch waits to hear of all others
GRACE = 2.0  # seconds that a rank may take to leave after it has heard of a fault
STEP = struct.Struct("q")
VERDICT = "verdict"  # key of what all ranks must hear of

TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent.parent)


@dataclass(frozen=True)
class Row:
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
    def read(cls, text: bytes) -> Row:
        return cls(**json.loads(text))


def read_rows(store: Store, ranks: Sequence[int]) -> dict[int, Row]:
    """Raises: an error of torch's if one of ``ranks`` has never written."""
    told = store.multi_get([str(rank) for rank in ranks])
    return {rank: Row.read(text) for rank, text in zip(ranks, told, strict=True)}


class Observer(Protocol):
    """Looks around at each beat of a rank."""

    def look(self, store: Store) -> str:
        """What is wrong with others; "" if nothing."""
        ...


@dataclass
class Pulse:
    """Writes a rank's row ten times a second, and hears whether the run is over.

    Args:
        connect: to the store of this attempt; nobody else uses what it returns.
        folder: for the stacks of all threads when the run is over.
        patience: seconds that ranks wait for each other.
    """

    connect: Callable[[], Store]
    rank: int
    size: int
    folder: Path
    patience: float
    observer: Observer | None = None
    last: float = field(default_factory=time.monotonic)  # when the store last answered

    def __post_init__(self) -> None:
        self.store, self.beat = self.connect(), 0
        self.main = threading.get_ident()
        self.now: tuple[int, int, Any] = 0, -1, ()  # one value: the other thread reads it
        self.mark = _mark(self.folder, self.rank)
        STEP.pack_into(self.mark, 0, -1)
        self.lock, self.over = threading.Lock(), threading.Event()
        self.verdict = ""
        self.thread = threading.Thread(target=self._run, daemon=True, name="quintnet-pulse")

    def __enter__(self) -> Pulse:
        self._write()
        self.thread.start()
        self.token = current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        current.reset(self.token)
        self.over.set()
        self.thread.join(GRACE)

    # -- what the main thread calls

    def begin(self, step: int, given: Any, *, usual: bool) -> None:
        """A run begins, with ``given`` (see :func:`described`). Unless that is ``usual``, ranks compare it.

        Raises:
            InputError: QN102 if ranks were given different batches.
            RunError: QN402 if a rank does not come, QN303 if it is known that the run is over.
        """
        run = self.now[0] + 1
        self.now = run, step, given
        STEP.pack_into(self.mark, 0, step)
        if self.verdict:
            raise RunError("QN303", self.verdict)
        if usual:
            return
        self._write()
        late = self._compare(run, step, self.patience)
        if late:
            rows = self._rows()
            places = "\n  ".join(f"rank {rank} is at {rows[rank].at or 'its start'}" for rank in late)
            raise RunError("QN402", f"step {step}: not all ranks began it in {self.patience:g} s\n  {places}")

    def cause(self, error: BaseException) -> QuintNetError:
        """Why communication failed, as far as this rank can tell."""
        run, step, _ = self.now
        time.sleep(PERIOD)  # others' rows, and a verdict, may be under way
        try:
            self._compare(run, step, 2 * PERIOD)
        except InputError as found:
            return found
        except Exception as lost:  # whoever keeps the rows is gone as well
            return RunError("QN402", f"step {step}: {first_line(error)}; {first_line(lost)}")
        why = first_line(error)
        if self.observer is not None:  # else the process that launched this one tells of the others
            why = self.verdict or f"{why}{self._silent()}"
        return RunError("QN402", f"step {step}: {why}")

    def _silent(self) -> str:
        """Who has not said anything for some beats."""
        before = self._rows()
        time.sleep(10 * PERIOD)
        ranks = [f"{rank} ({row.host})" for rank, row in self._rows().items() if row.beat == before[rank].beat]
        return f"; nothing is heard of ranks {', '.join(ranks)}" if ranks else ""

    def _compare(self, run: int, step: int, patience: float) -> list[int]:
        """Which ranks did not begin a run in time.

        Raises:
            InputError: QN102, the same on every rank, if ranks were given different batches.
        """
        start, pause = time.monotonic(), 0.001
        while True:
            rows = self._rows()
            late = [rank for rank, row in rows.items() if row.runs < run]
            waited = time.monotonic() - start
            odd = differ(rows, run)
            if odd and (not late or waited > LATEST):
                raise InputError(
                    "QN102",
                    f"step {step}: ranks were given different batches\n  " + "\n  ".join(odd),
                    fix="read the same data on every rank, or as many rows of it with batch_is_local=True",
                )
            if not late or waited > patience:
                return late
            time.sleep(pause)
            pause = min(PERIOD, pause * 2)

    # -- the thread

    def _run(self) -> None:
        while not self.over.wait(PERIOD):
            try:
                self._beat()
            except Exception as lost:  # of many kinds
                try:
                    with self.lock:
                        self.store = self.connect()
                    self._beat()
                except Exception:  # whoever keeps the store, and would end this rank, is gone
                    if not self.over.is_set():
                        self._leave(f"the process that launched it is gone ({first_line(lost)})")
                    return
            if self.verdict:
                self._leave(self.verdict)

    def _beat(self) -> None:
        with self.lock:
            self._say()
            self.verdict = self.store.get(VERDICT).decode()
            self.last = time.monotonic()
            if not self.verdict and self.observer is not None:
                self._announce(self.observer.look(self.store))

    def _announce(self, found: str) -> None:
        if found:
            self.verdict = self.store.compare_set(VERDICT, "", found).decode()
        if found and self.verdict == found:  # nobody else was first
            print(RunError("QN303", f"{found}\n  stacks: {self.folder}"), file=sys.stderr, flush=True)

    def _leave(self, why: str) -> None:
        """Give the main thread time to fail by itself: its error says more."""
        dump_stacks(self.folder, self.rank)
        if not self.over.wait(GRACE):
            print(f"rank {self.rank} ends: {why.splitlines()[0]}", file=sys.stderr, flush=True)
            os._exit(1)

    def _rows(self) -> dict[int, Row]:
        with self.lock:
            return read_rows(self.store, range(self.size))

    def _write(self) -> None:
        with self.lock:
            self._say()

    def _say(self) -> None:
        self.beat += 1
        runs, step, given = self.now
        waiting, at = place(sys._current_frames().get(self.main))
        row = Row(self.beat, runs, step, shown(given), waiting, at, os.getpid(), socket.gethostname())
        self.store.set(str(self.rank), json.dumps(asdict(row)))


current: ContextVar[Pulse | None] = ContextVar("quintnet_pulse", default=None)


@contextlib.contextmanager
def running(known: dict[Any, Any], step: int, kind: str, local: bool, batch: Any) -> Iterator[None]:
    """One run of a program on every rank. What fails in it because of another rank says so.

    Args:
        known: what the program's runs of each kind were given last.

    Raises:
        InputError: QN102 on every rank, if they were given different batches.
        RunError: QN402 if communication fails.
    """
    pulse = current.get()
    if pulse is None:
        yield
        return
    given = described(batch)
    try:
        pulse.begin(step, given, usual=known.get((kind, local)) == given)
        known[kind, local] = given
        yield
    except QuintNetError:
        raise
    except RuntimeError as error:
        if not of_communication(error):
            raise
        raise pulse.cause(error) from error


def of_communication(error: BaseException | None) -> bool:
    """Whether an error is what other ranks' faults look like from here."""
    while error is not None:
        text = str(error)
        if isinstance(error, dist.DistError) or "/gloo/" in text or "NCCL" in text or "Application timeout" in text:
            return True
        if isinstance(error, RunError) and error.code == "QN402":
            return True
        error = error.__cause__ or error.__context__
    return False


def differ(rows: Mapping[int, Row], run: int) -> list[str]:
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


def place(frame: FrameType | None) -> tuple[bool, str]:
    """Whether a thread is in communication, and the innermost line that is neither torch's nor ours."""
    waiting = False
    while frame is not None:
        file = frame.f_code.co_filename
        waiting = waiting or "/torch/distributed/" in file or file.endswith("runtime/distributed.py")
        if not file.startswith((TORCH, HERE, "<")):
            return waiting, f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return waiting, ""


def _mark(folder: Path, rank: int) -> mmap.mmap:
    """Memory that outlives this process: a row may be a beat old when its rank dies."""
    with (folder / f"rank{rank}.step").open("wb+") as file:
        file.truncate(STEP.size)
        return mmap.mmap(file.fileno(), STEP.size)


def last_step(folder: Path, rank: int) -> int:
    """The training step that a rank of this machine began last; -1 before the first."""
    try:
        found: int = STEP.unpack((folder / f"rank{rank}.step").read_bytes())[0]
    except (OSError, struct.error):  # it never started
        return -1
    return found


def dump_stacks(folder: Path, rank: int) -> None:
    """Every thread's stack, into a file of ``folder``."""
    with contextlib.suppress(OSError), (folder / f"rank{rank}.txt").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def first_line(error: BaseException) -> str:
    """What an error says, without where in gloo it was and what is typical."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S*/gloo/\S*\] ", "", line).partition(". This is typically")[0]
