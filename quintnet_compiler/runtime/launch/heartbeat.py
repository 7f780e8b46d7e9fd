"""What a rank lets others know while it runs: that it lives, how far it is, and what its step was given."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from ...compat.distributed import Store, flight_record
from ...core.errors import QuintNetError, RunError, printable
from .board import Board
from .disagreement import disagreement, said_of
from .faults import number_space
from .rank_status import RankStatus, brief, first_line, format_value, innermost, place, read_rows, refusal, shown_line
from .run_folder import keep_folder

PERIOD = 0.1  # seconds between two beats
LOOK = 3  # beats between two looks at where the main thread is
LATEST = 0.5  # seconds in which a rank that is in another call, or was given another batch, waits to hear of all others
MARGIN = 5.0  # seconds for which an error of the transport, which says more, is waited for
GRACE = 2.0  # seconds that a rank may take to leave after it has heard of a fault
THREAD = "quintnet-pulse"  # name of a heartbeat's thread
VERDICT = "verdict"  # key of what all ranks must hear of
SAVES = "saves"  # key of the rank that is to save what it has, after a fault
SAVED = "saved"  # key of the step that it has saved


class Observer(Protocol):
    """Looks around at each beat of a rank."""

    def look(self, store: Store) -> RunError | None:
        """Return what is wrong with others; None if nothing."""
        ...


class CollectiveCall(NamedTuple):
    """A call in which all ranks take part (see :mod:`.calls`). ``label``: of the program that is called; ``step``: the
    training step that it is, if it is one; ``line``: the user's file and line."""

    number: int = 0
    kind: str = ""
    label: str = ""
    given: Any = ()
    step: int | None = None
    line: tuple[str, int] = ("", 0)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.step}{self.label}" if self.kind == "step" else f"{self.kind}{self.label}"


@dataclass
class Heartbeat:
    """Writes a rank's row ten times a second, and hears whether the run is over.

    Args:
        connect: to the store of this attempt; nobody else uses what it returns.
        folder: for the stacks of all threads when the run is over, and the board of this machine's ranks.
        patience: seconds that ranks wait for each other.
        group: that of a process of the user's own, with which the heartbeat ends. Such a process is ended only where it
            waits for others, and only then are these looked at: one that has ended is missed by nobody else.
    """

    connect: Callable[[], Store]
    rank: int
    size: int
    folder: Path
    patience: float
    observer: Observer | None = None
    group: dist.ProcessGroup | None = None
    last: float = field(default_factory=time.monotonic)  # when the store last answered

    def __post_init__(self) -> None:
        self.store, self.beat = self.connect(), 0
        self.main = threading.get_ident()
        self.now = CollectiveCall()  # one value: the other thread reads it
        self.inside = self.finished = self.offers = self.saves = False
        self.refused = 0  # the number of the call that ended because other ranks are elsewhere, until the next one
        self.step = -1  # that began last
        self.usual: dict[Any, Any] = {}  # what frequent calls were given last
        self.programs = 0  # that were set up, which all ranks do in one order
        self.place, self.looked = (False, ""), -1
        self.spot, self.looks = "", 0  # the line where the main thread was seen, and how often since it came there
        self.stacks = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as this lives
        weakref.finalize(self, self.stacks.close)
        self.board = Board(self.folder, self.rank, self.size)
        self.lock, self.over = threading.Lock(), threading.Event()
        self.verdict = ""
        self.thread = threading.Thread(target=self._run, daemon=True, name=THREAD)

    def __enter__(self) -> Heartbeat:
        self.start()
        self.token = current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        current.reset(self.token)
        self.stop()

    def start(self) -> None:
        self._write()
        self.thread.start()

    def stop(self) -> None:
        self.over.set()
        self.thread.join(GRACE)

    @property
    def may_end(self) -> bool:
        """Return whether this process may be ended because of others."""
        return self.group is None or self.inside or self.place[0]

    @property
    def gave_up(self) -> bool:
        """Return whether the main thread has waited within its call for longer than it may.

        NCCL's collectives do not make it wait: it is then at one line that reads their results. Time is counted in
        looks, so that in which this process was stopped does not count.
        """
        host_waits = self.place[0] or __file__ in self.spot
        waited = self.looks * LOOK * PERIOD
        return self.inside and waited > self.patience + (MARGIN if host_waits else 0)

    # -- what the main thread calls

    def begin_call(self, call: CollectiveCall, *, usual: bool) -> None:
        """A call begins: the next one of this rank. Unless what it is given is ``usual``, ranks compare it.

        Raises:
            InputError: QN102 if ranks have different batches, or changes of their modules.
            RunError: QN401 if another rank is in another call, QN402 if one does not come, QN303 if it is known that
                the run is over.
        """
        self.now = call
        if call.step is not None:
            self.step = call.step
        apart = self.board.enter(call.number, call.kind + call.label, self.step)
        if self.verdict:
            raise RunError("QN303", self.verdict)
        if usual and not apart:
            return
        self._write()
        try:
            late = self._compare(call, 2 * LATEST if usual else self.patience)
        except RunError:
            self.refused = call.number  # other ranks, which look later, read that this one was in it
            raise
        if late and not usual:
            rows = self.rows()
            places = "\n  ".join(f"rank {rank} is at {rows[rank].at or 'its start'}" for rank in late)
            raise RunError("QN402", f"{call.name}: not all ranks began it in {self.patience:g} s\n  {places}")

    def finish(self) -> None:
        """This rank's function has returned: it makes no further call."""
        self.finished = True
        self._write()

    def fail(self, why: str) -> None:
        """This rank ends by an error of its own."""
        with self.lock:
            self.store.compare_set(VERDICT, "", why)

    def chosen(self) -> bool:
        """After a fault, this rank has all that a checkpoint needs: whether it is to write one, alone. All other ranks
        have ended then. Not if the launching process has chosen another, or does not answer while this rank may stay.
        """
        if self.observer is not None:  # there is none
            return False
        self.offers = True
        self._write()
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            with self.lock:
                if self.store.check([SAVES]):
                    self.saves = int(self.store.get(SAVES)) == self.rank
                    return self.saves
            time.sleep(PERIOD / 2)
        return False

    def announce_checkpoint(self, step: int) -> None:
        """This rank, which was chosen, has written its checkpoint."""
        with self.lock:
            self.store.set(SAVED, str(step))

    def cause(self, error: BaseException) -> QuintNetError:
        """Return why communication failed, as far as this rank can tell."""
        call = self.now
        time.sleep(PERIOD)  # others' rows, and a verdict, may be under way
        try:
            late = self._compare(call, 2 * PERIOD)
        except QuintNetError as difference:
            return difference
        except Exception as lost:  # the process that keeps the rows is gone as well
            return RunError("QN402", f"{call.name}: {first_line(error)}; {first_line(lost)}")
        coded = error if isinstance(error, RunError) else None
        reason = f"{call.name}: {first_line(error)}" if coded is None else coded.message
        if self.observer is not None:  # else the process that launched this one tells of the others
            others = self._silent() or self._late(late)
            reason = f"{call.name}: {self.verdict}" if self.verdict else f"{reason}{others}"
        return RunError("QN402", reason, where=coded.where if coded else None, fix=coded.fix if coded else "")

    def _silent(self) -> str:
        """Return the ranks that have not written anything for some beats, as text."""
        previous = self.rows()
        time.sleep(10 * PERIOD)
        ranks = [f"{rank} ({row.host})" for rank, row in self.rows().items() if row.beat == previous[rank].beat]
        return f"; nothing is heard of ranks {', '.join(ranks)}" if ranks else ""

    def _late(self, ranks: list[int]) -> str:
        """Return where ranks are that have not begun this call."""
        rows = self.rows()
        return f"; {said_of({rank: rows[rank] for rank in ranks})}" if ranks else ""

    def _compare(self, call: CollectiveCall, patience: float) -> list[int]:
        """Which ranks did not begin a call in time.

        Raises:
            InputError: QN102, the same on every rank, if ranks have different batches, or changes of their modules.
            RunError: QN401 if a rank is in another call, QN402 if one has finished.
        """
        start, pause = time.monotonic(), 0.001
        while True:
            rows = self.rows()
            late = [rank for rank, row in rows.items() if row.calls < call.number]
            waited = time.monotonic() - start
            all_said = waited > min(LATEST, patience) or all(rows[rank].finished for rank in late)
            if all_said and (apart := disagreement(rows)) is not None:
                raise apart.error
            if (error := refusal(rows, call.number, call.name)) is not None and (not late or waited > LATEST):
                raise error
            if not late or waited > patience:
                return late
            time.sleep(pause)
            pause = min(PERIOD, pause * 2)

    # -- the thread

    def _run(self) -> None:
        while not self.over.wait(PERIOD):
            if self.group is not None and not (dist.is_initialized() and dist.group.WORLD is self.group):
                with contextlib.suppress(Exception):  # whoever keeps the store may have left, too
                    self.finish()
                self.over.set()
                return
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
                return

    def _look(self) -> None:
        """Return where the main thread is, if it has begun no further call since the last look."""
        number = self.now.number
        self.place, stays = (False, ""), self.looked == number
        self.looked = number
        spot = ""
        if stays:
            self.stacks.seek(0)
            self.stacks.truncate()
            faulthandler.dump_traceback(self.stacks, all_threads=True)
            self.stacks.seek(0)
            text = self.stacks.read().decode(errors="replace")
            self.place, spot = place(text, self.main), innermost(text, self.main)
        self.looks = self.looks + 1 if spot and spot == self.spot else 0
        self.spot = spot

    def _beat(self) -> None:
        if self.beat % LOOK == 0:
            self._look()
        with self.lock:
            self._say()
            self.verdict = printable(self.store.get(VERDICT).decode(errors="replace"))
            self.last = time.monotonic()
            if not self.verdict and self.observer is not None and self.may_end:
                self._announce(self.observer.look(self.store) or self._missing())

    def _missing(self) -> RunError | None:
        """Return which ranks this one has waited for too long: any, not only those that the observer looks at."""
        if not self.gave_up:
            return None
        apart = disagreement(read_rows(self.store, range(self.size)))
        return None if apart is None else apart.error

    def _announce(self, fault: RunError | None) -> None:
        if fault is None:
            return
        self.verdict = self.store.compare_set(VERDICT, "", fault.message).decode()
        if self.verdict == fault.message:  # nobody else was first
            message = f"{fault.message}\n  stacks: {self.folder}"
            print(RunError(fault.code, message, fix=fault.fix), file=sys.stderr, flush=True)

    def _leave(self, why: str) -> None:
        """Give the main thread time to fail by itself: its error says more."""
        dump_stacks(self.folder, self.rank)
        previous = self._waits_in()
        while not self.over.wait(GRACE):
            now = self._waits_in()
            if now is not None and now == previous and not self.saves:
                print(f"rank {self.rank} ends: {why.splitlines()[0]}", file=sys.stderr, flush=True)
                os._exit(1)
            previous = now

    def _waits_in(self) -> int | None:
        """The call in which, or after which, the main thread may be ended; None: nowhere."""
        if self.group is None:
            return 0
        self._look()
        return self.now.number if self.may_end else None

    def rows(self) -> dict[int, RankStatus]:
        """Return the last status of all ranks."""
        with self.lock:
            return read_rows(self.store, range(self.size))

    def _write(self) -> None:
        with self.lock:
            self._say()

    def _say(self) -> None:
        self.beat += 1
        now = self.now
        waiting, at = self.place if self.looked == now.number else (False, "")
        row = RankStatus(
            beat=self.beat,
            calls=now.number,
            kind=now.kind + now.label,
            name=now.name,
            line=shown_line(*now.line),
            inside=self.inside or (self.refused == now.number > 0 and not self.finished),
            step=self.step,
            given=brief(format_value(now.given)),
            waiting=waiting,
            at=at,
            gave_up=self.gave_up,
            finished=self.finished,
            offers=self.offers,
            pid=os.getpid(),
            host=socket.gethostname(),
            space=number_space(),
        )
        self.store.set(str(self.rank), json.dumps(asdict(row)))


current: ContextVar[Heartbeat | None] = ContextVar("quintnet_pulse", default=None)


def current_heartbeat() -> Heartbeat | None:
    """Return the heartbeat of the calls of this thread, if there is one."""
    pulse = current.get()
    return None if pulse is None or pulse.over.is_set() else pulse


def beats() -> bool:
    """Return whether this process has a heartbeat, be it for the calls of another thread."""
    return any(thread.name == THREAD for thread in threading.enumerate())


def dump_stacks(folder: Path, rank: int) -> None:
    """Every thread's stack, into a file of ``folder``, which stays; beside it torch's record of collectives, if it has
    one."""
    with contextlib.suppress(OSError):
        keep_folder(folder)
    with contextlib.suppress(OSError), (folder / f"rank{rank}.txt").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    with contextlib.suppress(Exception):  # a record that cannot be had must not hide the stacks
        if record := flight_record():
            (folder / f"rank{rank}.collectives.json").write_bytes(record)
