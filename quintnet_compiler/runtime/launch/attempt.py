"""Processes of this machine that run a function together once."""

from __future__ import annotations

import contextlib
import math
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...compat.distributed import PrefixStore, TCPStore
from ...core.errors import QuintNetError, RunError, printable
from ..threads.at_exit import finish_all, finish_or_warn
from .accelerator import take_accelerator
from .disagreement import disagreement, stalled
from .faults import Fault, RankError, Scene, gone, stopped
from .forwarding import Forwarding
from .heartbeat import GRACE, LOOK, PERIOD, SAVED, SAVES, VERDICT, Heartbeat
from .preemption import Preempted
from .rank_status import LONGEST_LINE, RankStatus, cut, first_line, of_communication, read_rows
from .run_folder import mark_fork_server_folder, remove_with_its_owner
from .sending import LOOPBACK, importable_main, local_listener, packed, unpacked

STOPPED = 1.0  # seconds after which a rank that may not run is given up
STALL = 3.0  # seconds after which ranks that may wait for each other in vain are told of
AGAIN = 1.0  # seconds between two looks at which places are available
SETTLE = 1.0  # seconds in which the cause of an error that another rank caused shows
LONGEST_TEXT = 20_000  # characters of an error and its traceback
LOST = 60.0  # seconds in which the launching process answers, however busy; if it ends, ranks know at once
NO_CODE = 255  # what multiprocessing says of a process whose fork server is gone
# what the fork server has imported, and each rank would import otherwise: at once, or when it first traces and solves
# for a layout
PRELOADED = (
    "torch",
    "torch.distributed.tensor",
    "quintnet_compiler.api.compile",
    "torch.export._trace",
    "scipy.sparse",
    "scipy.optimize",
)


@dataclass(frozen=True)
class Job:
    """What ranks do. ``patience``: seconds that they wait for each other in communication."""

    call: Callable[[], Any]
    threads: int
    patience: float


@dataclass(frozen=True)
class Seat:
    """Where a rank sits. ``slot``: what it has of this machine (its GPU), of ``slots``; ``port``: of the attempt's
    store; ``start_method``: of multiprocessing, as it is set in the launching process."""

    rank: int
    size: int
    slot: int
    slots: int
    port: int
    folder: Path
    start_method: str | None


class Attempt:
    """Starts a rank for each of ``slots`` and sees to their end. Nothing outlives it: ranks end when it does, and
    when this process does. They talk over loopback alone, and nothing that they leave behind is read again.
    ``signals``: what this process was sent, and passes on to them; ``wanted``: which slots there should be now."""

    def __init__(
        self, job: Job, slots: Sequence[int], folder: Path, signals: Forwarding, wanted: Callable[[], Sequence[int]]
    ) -> None:
        self.job, self.slots, self.folder, self.signals = job, slots, folder, signals
        self.wanted, self.looked = wanted, time.monotonic()
        self.leaving = Forwarding(signals.grace)  # what ranks are sent when other slots are wanted
        self.size = len(slots)
        self.results: dict[int, Any] = {}
        self.reports: dict[int, RankError] = {}
        self.ended: dict[int, int] = {}
        self.since: dict[int, float] = {}  # when a rank was first seen stopped
        self.stall = "", 0.0  # what ranks wait in, and since when
        self.looks, self.apart = 0, dict[int, RankStatus]()  # rows of ranks that can never meet
        self.left = False  # whether the thread that starts ranks is to end
        self.trouble: BaseException | None = None  # what it met
        self.orphans: set[int] = set()  # ranks that live, and whose fork server has ended
        folder.mkdir()

    def __enter__(self) -> Attempt:
        listener = local_listener(2 * self.size)
        port = listener.getsockname()[1]
        self.store = TCPStore(LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        self.store.set(VERDICT, "")
        self.processes, self.pipes = list[ForkServerProcess](), dict[Connection, int]()
        # in a thread, as each waits until the fork server has imported torch, however long that takes
        self.starting = threading.Thread(target=self._start, args=(port,), daemon=True, name="quintnet-start")
        self.starting.start()
        return self

    def _start(self, port: int) -> None:
        try:
            context = mp.get_context("forkserver")
            context.set_forkserver_preload(list(PRELOADED))
            mark_fork_server_folder()
            method = mp.get_start_method(allow_none=True)
            for rank, slot in enumerate(self.slots):
                ours, theirs = context.Pipe(duplex=False)
                seat = Seat(rank, self.size, slot, max(self.slots) + 1, port, self.folder, method)
                process = context.Process(target=work, args=(self.job, seat, theirs), daemon=True)
                with importable_main():
                    process.start()
                theirs.close()
                self.pipes[ours] = rank
                self.processes.append(process)
                if self.left:  # nobody waits for ranks any more
                    process.kill()
                    return
        except BaseException as error:
            self.trouble = error

    def _started(self, deadline: float) -> bool:
        """Whether all ranks were started in time. Raises: what went wrong."""
        while self.starting.is_alive() and time.monotonic() < deadline:
            self.starting.join(PERIOD)
        if self.trouble is not None:
            raise self.trouble
        return not self.starting.is_alive()

    def __exit__(self, *error: object) -> None:
        self.left = True
        for process in list(self.processes):
            if process.is_alive():
                process.kill()  # stopped ones would never see another signal
        for rank in self.orphans - self.ended.keys():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid(rank), signal.SIGKILL)
        for process in list(self.processes):
            process.join()

    def run(self, deadline: float) -> list[Any] | Fault:
        """Results by rank, or what went wrong."""
        doubt: float | None = None
        if not self._started(deadline):
            return Fault(RunError("QN304", "the ranks were not started in time"), tuple(range(self.size)))
        while len(self.results) < self.size:
            self._hear(PERIOD / 2)
            self._look_at_slots()
            for signals in (self.signals, self.leaving):
                signals.pass_on([self._pid(rank) for rank in range(self.size) if self._runs(rank)])
            given_up = self._given_up()
            if self.reports or self.ended or given_up or self._apart():
                now = time.monotonic()
                doubt = doubt or now
                if self._scene(given_up).certain or now > doubt + SETTLE:
                    return self._end(given_up)
            asked = self.signals.late or self.leaving.late
            if time.monotonic() > deadline or asked:
                late = sorted(set(range(self.size)) - self.results.keys())
                after = f"the {self.signals.grace:g} s after a signal" if asked else "time"
                error = RunError("QN304", f"ranks {late} did not finish in {after}")
                self._tell(error.message)
                return Fault(error, tuple(late))
        for process in self.processes:
            process.join(5)  # so that each can leave in its own way
        until = time.monotonic() + 5
        while time.monotonic() < until and not all(gone(self._pid(rank)) for rank in self.orphans):
            time.sleep(PERIOD / 2)
        return [self.results[rank] for rank in range(self.size)]

    def moves(self, found: list[Any] | Fault) -> bool:
        """Whether the ranks, of which ``found`` came, ended because other slots are wanted: by themselves or not."""
        if self.leaving.first is None:
            return False
        if isinstance(found, Fault):
            return found.again or self.leaving.late
        return any(isinstance(one, Preempted) for one in found)

    def _look_at_slots(self) -> None:
        if self.leaving.first is not None or time.monotonic() < self.looked + AGAIN:
            return
        wanted, self.looked = self.wanted(), time.monotonic()
        if wanted != self.slots:
            told = f"places {wanted} are available, and ranks run on {self.slots}: they save, and start again there"
            print(told, file=sys.stderr, flush=True)
            self.leaving.came.append(signal.SIGTERM)

    def _hear(self, seconds: float) -> None:
        """Take what ranks have to say, and see which ended."""
        watched = [rank for rank in range(self.size) if self._runs(rank) and rank not in self.orphans]
        sentinels = {self.processes[rank].sentinel: rank for rank in watched}
        ready = wait([*self.pipes, *sentinels], timeout=seconds)
        for pipe in ready:
            if isinstance(pipe, Connection):
                rank = self.pipes.pop(pipe)
                with contextlib.suppress(EOFError):  # it has died
                    found = unpacked(pipe.recv_bytes())
                    (self.reports if isinstance(found, RankError) else self.results)[rank] = found
                pipe.close()
        for pipe in ready:
            rank = -1 if isinstance(pipe, Connection) else sentinels[pipe]  # type: ignore[index]
            if rank >= 0 and self._runs(rank) and not any(one.poll() for one, r in self.pipes.items() if r == rank):
                self.processes[rank].join()
                code = self.processes[rank].exitcode or 0
                if code == NO_CODE and not gone(self._pid(rank)):
                    self.orphans.add(rank)
                else:
                    self._ended(rank, code)
        for rank in [rank for rank in self.orphans if self._runs(rank) and gone(self._pid(rank))]:
            if not any(one.poll() for one, r in self.pipes.items() if r == rank):
                self._ended(rank, NO_CODE)

    def _ended(self, rank: int, code: int) -> None:
        # its pipe may still be open: its own children (workers of a DataLoader) have it as well
        self.pipes = {one: r for one, r in self.pipes.items() if r != rank}
        self.ended[rank] = code

    def _pid(self, rank: int) -> int:
        found = self.processes[rank].pid
        assert found is not None  # it was started
        return found

    def _runs(self, rank: int) -> bool:
        return not any(rank in known for known in (self.results, self.reports, self.ended))

    def _given_up(self) -> list[int]:
        now = time.monotonic()
        seen = {r for r, process in enumerate(self.processes) if self._runs(r) and stopped(process.pid)}
        self.since = {rank: self.since.get(rank, now) for rank in seen}
        return [rank for rank, first in self.since.items() if now - first > STOPPED]

    def _apart(self) -> bool:
        """Whether ranks can never meet; looked for now and then."""
        self.looks += 1
        if not self.apart and self.looks % LOOK == 0:
            rows = read_rows(self.store, range(self.size))
            self.apart = rows if disagreement(rows) is not None else {}
            self._look_for_stall(stalled(rows))
        return bool(self.apart)

    def _look_for_stall(self, text: str) -> None:
        """Tell once, on stderr, that all ranks have waited for some seconds: that is no error yet."""
        now = time.monotonic()
        if text != self.stall[0]:
            self.stall = text, now
        elif text and now - self.stall[1] > STALL:
            print(printable(f"all ranks have been waiting for {STALL:g} s: {text}"), file=sys.stderr, flush=True)
            self.stall = text, math.inf

    def _scene(self, given_up: Sequence[int]) -> Scene:
        rows: dict[int, RankStatus] = read_rows(self.store, range(self.size))
        if self.apart and disagreement(rows) is None:  # a rank has gone on
            rows = self.apart
        return Scene(self.size, rows, list(self.reports.values()), dict(self.ended), given_up, self.folder)

    def _end(self, given_up: Sequence[int]) -> Fault:
        """Tell the others, and let them say what they saw. Who dies from now on dies of this."""
        self._hear(PERIOD)  # others at fault at the same time
        seen = self._scene(given_up)
        first = seen.fault()
        self._tell(first.error.message.splitlines()[0])
        ended, until, saved = dict(self.ended), time.monotonic() + GRACE / 2, ""
        while time.monotonic() < until and any(self._runs(r) for r in range(self.size) if r not in given_up):
            self._hear(PERIOD / 2)
            if first.again and (rank := self._offer()) is not None:
                saved = self._let_save(rank)
                break
        later = self._scene(given_up)
        late = [one for one in later.reports if one not in seen.reports]
        heard = [RankError(one.rank, one.when, one.line, one.text, True, one.error) for one in late]
        fault = Scene(self.size, seen.rows, [*seen.reports, *heard], ended, given_up, self.folder).fault()
        return replace(fault, saved=saved)

    def _offer(self) -> int | None:
        """A rank that could save all that the run needs to go on."""
        rows = read_rows(self.store, range(self.size))
        return next((r for r, row in rows.items() if row.offers and self._runs(r) and not self.orphans), None)

    def _let_save(self, rank: int) -> str:
        """What the rank has saved. Before it begins, all others have ended: none writes where it does."""
        others = [process for one, process in enumerate(self.processes) if one != rank]
        for process in others:
            process.kill()
        for process in others:
            process.join()
        self.store.set(SAVES, str(rank))
        until = time.monotonic() + self.signals.grace
        while self._runs(rank) and time.monotonic() < until:
            self._hear(PERIOD / 2)
        return f"rank {rank} saved step {self.store.get(SAVED).decode()}" if self.store.check([SAVED]) else ""

    def _tell(self, why: str) -> None:
        self.store.set(VERDICT, cut(why, LONGEST_LINE))


def work(job: Job, seat: Seat, pipe: Connection) -> None:
    """A rank's process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    size = str(seat.size)
    os.environ |= {"RANK": str(seat.rank), "LOCAL_RANK": str(seat.slot), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    torch.set_num_threads(job.threads)
    _prepare(seat)
    answer: Any
    try:
        store = TCPStore(LOOPBACK, seat.port, None, False)

        def connect() -> TCPStore:
            return TCPStore(LOOPBACK, seat.port, None, False, timeout=timedelta(seconds=LOST))

        with Heartbeat(connect, seat.rank, seat.size, seat.folder, job.patience) as pulse:
            patience = timedelta(seconds=job.patience)
            dist.init_process_group(
                **take_accelerator(seat.slot, seat.slots),  # alike on all ranks
                store=PrefixStore("group", store),
                rank=seat.rank,
                world_size=seat.size,
                timeout=patience,
            )
            answer = _answer(job, seat.rank)
            if not isinstance(answer, RankError):
                pulse.finish()
    except BaseException as error:
        answer = report(seat.rank, error)
    if isinstance(answer, RankError):
        send(pipe, seat.rank, answer)
        return
    send(pipe, seat.rank, answer)
    dist.destroy_process_group()


def _answer(job: Job, rank: int) -> Any:
    """What the job returns or raises, once what it has begun in the background is done: other ranks take part in that,
    and the process group ends with this process."""
    answer: Any
    try:
        answer = job.call()
    except Preempted as left:
        answer = left
    except BaseException as error:
        answer = report(rank, error)  # now: before others see what comes of it
        finish_or_warn(job.patience)
        return answer
    finish_all(job.patience)
    return answer


def _prepare(seat: Seat) -> None:
    """End with the launching process at once: ranks that train on meanwhile would write into the checkpoints of the run
    that follows. And leave nothing behind that outlives a rank that is killed."""
    mp.current_process().daemon = False  # daemons may have no children, such as a DataLoader's workers
    mp.set_start_method(seat.start_method, force=True)  # multiprocessing left that of the fork server
    if (parent := mp.parent_process()) is not None:

        def end() -> None:
            parent.join()
            if seat.rank == 0:
                print("all ranks end: the process that launched them is gone", file=sys.stderr, flush=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch would say it in 30 lines of C++
            remove_with_its_owner(seat.folder.parent)
            os._exit(1)

        threading.Thread(target=end, daemon=True, name="quintnet-parent").start()
    with contextlib.suppress(ImportError):  # torch.fx makes bars, which have a lock that all processes of a machine see
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())


def report(rank: int, error: BaseException) -> RankError:
    """What is told of an error; before this process ends, so that it comes before what others then see."""
    when = time.monotonic()
    text = cut("".join(traceback.format_exception(error)), LONGEST_TEXT)
    own = error if isinstance(error, QuintNetError) else None
    line = f"{own.code} {own.message}" if own is not None else f"{type(error).__name__}: {first_line(error)}"
    return RankError(rank, when, cut(line.splitlines()[0], LONGEST_LINE), text, of_communication(error), own)


def send(pipe: Connection, rank: int, answer: Any) -> None:
    try:
        data = packed(answer)
    except Exception as error:
        text = f"a result that cannot be sent to the launching process: {error}"
        data = packed(RankError(rank, time.monotonic(), text, text, False))
    with contextlib.suppress(BrokenPipeError):  # nobody is there to hear it
        pipe.send_bytes(data)
    pipe.close()
