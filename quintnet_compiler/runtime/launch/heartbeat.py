"""What a rank lets others know while it runs: that it lives, how far it is, and what its step was given."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ...compat.distributed import Store, flight_record
from ...core.errors import InputError, QuintNetError, RunError
from .rank_status import RankStatus, described, differ, first_line, of_communication, place, read_rows, shown

PERIOD = 0.1  # seconds between two beats
LOOK = 3  # beats between two looks at where the main thread is
LATEST = 0.5  # seconds in which a rank that was given another batch waits to hear of all others
GRACE = 2.0  # seconds that a rank may take to leave after it has heard of a fault
STEP = struct.Struct("q")
VERDICT = "verdict"  # key of what all ranks must hear of


class Observer(Protocol):
    """Looks around at each beat of a rank."""

    def look(self, store: Store) -> str:
        """What is wrong with others; "" if nothing."""
        ...


@dataclass
class Heartbeat:
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
        self.place, self.looked = (False, ""), -1
        self.stacks = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as this lives
        self.mark = _mark(self.folder, self.rank)
        STEP.pack_into(self.mark, 0, -1)
        self.lock, self.over = threading.Lock(), threading.Event()
        self.verdict = ""
        self.thread = threading.Thread(target=self._run, daemon=True, name="quintnet-pulse")

    def __enter__(self) -> Heartbeat:
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
        known = error if isinstance(error, RunError) else None
        why = f"step {step}: {first_line(error)}" if known is None else known.message
        if self.observer is not None:  # else the process that launched this one tells of the others
            why = f"step {step}: {self.verdict}" if self.verdict else f"{why}{self._silent()}"
        return RunError("QN402", why, where=known.where if known else None, fix=known.fix if known else "")

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

    def _look(self) -> None:
        """Where the main thread is, if it has been in one run since the last look."""
        run = self.now[0]
        self.place, stays = (False, ""), self.looked == run
        self.looked = run
        if stays:
            self.stacks.seek(0)
            self.stacks.truncate()
            faulthandler.dump_traceback(self.stacks, all_threads=True)
            self.stacks.seek(0)
            self.place = place(self.stacks.read().decode(errors="replace"), self.main)

    def _beat(self) -> None:
        if self.beat % LOOK == 0:
            self._look()
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

    def _rows(self) -> dict[int, RankStatus]:
        with self.lock:
            return read_rows(self.store, range(self.size))

    def _write(self) -> None:
        with self.lock:
            self._say()

    def _say(self) -> None:
        self.beat += 1
        runs, step, given = self.now
        row = RankStatus(self.beat, runs, step, shown(given), *self.place, os.getpid(), socket.gethostname())
        self.store.set(str(self.rank), json.dumps(asdict(row)))


current: ContextVar[Heartbeat | None] = ContextVar("quintnet_pulse", default=None)


def running(
    known: dict[Any, Any], step: int, kind: str, local: bool, batch: Callable[[], Any]
) -> contextlib.AbstractContextManager[None]:
    """One run of a program on every rank. What fails in it because of another rank says so.

    Args:
        known: what the program's runs of each kind were given last.
        batch: what this one is given; it is asked where there are other ranks to compare with.

    Raises:
        InputError: QN102 on every rank, if they were given different batches.
        RunError: QN402 if communication fails.
    """
    pulse = current.get()
    return contextlib.nullcontext() if pulse is None else _with_others(pulse, known, step, (kind, local), batch)


@contextlib.contextmanager
def _with_others(
    pulse: Heartbeat, known: dict[Any, Any], step: int, key: tuple[str, bool], batch: Callable[[], Any]
) -> Iterator[None]:
    given = described(batch())
    pulse.begin(step, given, usual=known.get(key) == given)
    known[key] = given
    try:
        yield
    except RuntimeError as error:
        own = isinstance(error, QuintNetError) and error.code != "QN402"
        if own or not of_communication(error):
            raise
        raise pulse.cause(error) from error


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
    """Every thread's stack, into a file of ``folder``; beside it torch's record of collectives, if it has one."""
    with contextlib.suppress(OSError), (folder / f"rank{rank}.txt").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    with contextlib.suppress(Exception):  # a record that cannot be had must not hide the stacks
        if record := flight_record():
            (folder / f"rank{rank}.collectives.json").write_bytes(record)
