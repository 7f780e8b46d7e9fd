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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...compat.distributed import PrefixStore, TCPStore
from ...core.errors import RunError, printable
from ..threads.at_exit import finish_all, finish_or_warn
from .accelerator import take_accelerator
from .disagreement import disagreement, stalled
from .faults import Fault, RankError, Scene, gone, report, stopped, wait_for_killed
from .forwarding import Forwarding
from .heartbeat import GRACE, LOOK, PERIOD, SAVED, SAVES, VERDICT, Heartbeat
from .preemption import Preempted
from .rank_status import LONGEST_LINE, RankStatus, read_rows, shorten_middle
from .run_folder import end_with_launcher, mark_fork_server_folder
from .sending import LOOPBACK, importable_main, local_listener, needs_fork_server, packed, unpacked

STOPPED_SECONDS = 1.0  # after which a stopped rank is given up
STALL_SECONDS = 3.0  # after which a message says that all ranks wait
SLOT_LOOK_SECONDS = 1.0  # between two looks at the available places
SETTLE_SECONDS = 1.0  # in which the cause of an error that another rank caused shows
EXIT_SECONDS = 5.0  # in which a process with a result ends by itself
STORE_SECONDS = 60.0  # in which the launching process answers, however busy; if it ends, ranks know at once
NO_CODE = 255  # multiprocessing's exit code of a process whose fork server has ended
# Imported by the fork server, so that no rank does when it starts, compiles or saves: no thread starts, no GPU is used.
PRELOADED = (
    "torch.export._trace", "scipy.optimize", "quintnet_compiler.api.compile", "quintnet_compiler.api.compiled_program",
    "quintnet_compiler.checkpoint.background", "quintnet_compiler.huggingface.parallel_plan",
    "quintnet_compiler.runtime.backends.processes", "quintnet_compiler.runtime.launch.group_heartbeat",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """The function of all ranks; ``patience``: seconds that they wait for each other in communication."""

    call: Callable[[], Any]
    threads: int
    patience: float


@dataclass(frozen=True)
class Seat:
    """The place of a rank.

    Attributes:
        slot: what it has of this machine (its GPU), of ``slots``.
        port: of the attempt's store.
        start_method: of multiprocessing, as it is set in the launching process.
    """

    rank: int
    size: int
    slot: int
    slots: int
    port: int
    folder: Path
    start_method: str | None


class Attempt:
    """A start of ranks, one for each of ``slots``, until their end; they talk over loopback alone.

    Nothing outlives it. ``signals``: those that this process received, and passes on to ranks; ``wanted``: returns the
    slots that there should be now.
    """

    def __init__(
        self, job: Job, slots: Sequence[int], folder: Path, signals: Forwarding, wanted: Callable[[], Sequence[int]]
    ) -> None:
        self.job, self.slots, self.folder, self.signals = job, slots, folder, signals
        self.wanted, self.looked = wanted, time.monotonic()
        self.leaving = Forwarding(signals.grace)  # signals for ranks when other slots are wanted
        self.size = len(slots)
        self.results: dict[int, Any] = {}
        self.reports: dict[int, RankError] = {}
        self.ended: dict[int, int] = {}
        self.since: dict[int, float] = {}  # when a rank was first seen stopped
        self.stall = "", 0.0  # what ranks wait in, and since when
        self.looks, self.apart = 0, dict[int, RankStatus]()  # rows of ranks that can never meet
        self.closing = False  # whether the thread that starts ranks shall end
        self.start_error: BaseException | None = None  # of that thread
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
                process = context.Process(target=run_job, args=(self.job, seat, theirs), daemon=True)
                with importable_main(), needs_fork_server(rank):
                    process.start()
                theirs.close()
                self.pipes[ours] = rank
                self.processes.append(process)
                if self.closing:  # the attempt is over
                    process.kill()
                    return
        except BaseException as error:
            self.start_error = error

    def _started(self, deadline: float) -> bool:
        """Return whether all ranks were started in time, or raise the error of the thread that starts them."""
        while self.starting.is_alive() and time.monotonic() < deadline:
            self.starting.join(PERIOD)
        if self.start_error is not None:
            raise self.start_error
        return not self.starting.is_alive()

    def __exit__(self, *error: object) -> None:
        self.closing = True
        for process in list(self.processes):
            if process.is_alive():
                process.kill()  # stopped ones would never see another signal
        for rank in self.orphans - self.ended.keys():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid(rank), signal.SIGKILL)
        wait_for_killed(list(self.processes))

    def wait_for_results(self, deadline: float) -> list[Any] | Fault:
        """Return the results by rank, or the fault that ended the attempt."""
        first_sign: float | None = None
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
                first_sign = first_sign or now
                if self._scene(given_up).certain or now > first_sign + SETTLE_SECONDS:
                    return self._end(given_up)
            if (fault := self._overdue(deadline)) is not None:
                return fault
        self._join()
        return [self.results[rank] for rank in range(self.size)]

    def _overdue(self, deadline: float) -> Fault | None:
        """Return the fault of ranks that did not finish in time."""
        after_signal = self.signals.late or self.leaving.late
        if time.monotonic() <= deadline and not after_signal:
            return None
        late, grace = (
            sorted(set(range(self.size)) - self.results.keys()),
            f"the {self.signals.grace:g} s after a signal",
        )
        error = RunError("QN304", f"ranks {late} did not finish in {grace if after_signal else 'time'}")
        self._tell(error.message)
        return Fault(error, tuple(late))

    def _join(self) -> None:
        """Wait until processes that returned their results have ended, each in its own way."""
        for process in self.processes:
            process.join(EXIT_SECONDS)
        until = time.monotonic() + EXIT_SECONDS
        while time.monotonic() < until and not all(gone(self._pid(rank)) for rank in self.orphans):
            time.sleep(PERIOD / 2)

    def moves(self, outcome: list[Any] | Fault) -> bool:
        """Return whether the ranks ended because other slots are wanted: by themselves or not."""
        if self.leaving.first is None:
            return False
        if isinstance(outcome, Fault):
            return outcome.again or self.leaving.late
        return any(isinstance(result, Preempted) for result in outcome)

    def _look_at_slots(self) -> None:
        if self.leaving.first is not None or time.monotonic() < self.looked + SLOT_LOOK_SECONDS:
            return
        wanted, self.looked = self.wanted(), time.monotonic()
        if wanted != self.slots:
            text = f"places {wanted} are available, and ranks run on {self.slots}: they save, and start again there"
            print(text, file=sys.stderr, flush=True)
            self.leaving.came.append(signal.SIGTERM)

    def _hear(self, seconds: float) -> None:
        """Take the answers of ranks, and see which ended."""
        watched = [rank for rank in range(self.size) if self._runs(rank) and rank not in self.orphans]
        sentinels: dict[Any, int] = {self.processes[rank].sentinel: rank for rank in watched}
        ready = wait([*self.pipes, *sentinels], timeout=seconds)
        for pipe in [source for source in ready if isinstance(source, Connection)]:
            self._read(pipe)
        for sentinel in [source for source in ready if not isinstance(source, Connection)]:
            self._see_end(sentinels[sentinel])
        for rank in [rank for rank in self.orphans if self._is_unheard(rank) and gone(self._pid(rank))]:
            self._ended(rank, NO_CODE)

    def _read(self, pipe: Connection) -> None:
        """Take the answer of a rank."""
        rank = self.pipes.pop(pipe)
        with contextlib.suppress(EOFError):  # it has died
            answer = unpacked(pipe.recv_bytes())
            (self.reports if isinstance(answer, RankError) else self.results)[rank] = answer
        pipe.close()

    def _see_end(self, rank: int) -> None:
        """Note the end of a process, or of its fork server."""
        if not self._is_unheard(rank):
            return
        self.processes[rank].join()
        code = self.processes[rank].exitcode or 0
        if code == NO_CODE and not gone(self._pid(rank)):
            self.orphans.add(rank)
        else:
            self._ended(rank, code)

    def _is_unheard(self, rank: int) -> bool:
        """Return whether a rank has given no answer, and none is on its way."""
        return self._runs(rank) and not any(pipe.poll() for pipe, owner in self.pipes.items() if owner == rank)

    def _ended(self, rank: int, code: int) -> None:
        # its pipe may still be open: its own children (workers of a DataLoader) have it as well
        self.pipes, self.ended[rank] = {pipe: owner for pipe, owner in self.pipes.items() if owner != rank}, code

    def _pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None  # it was started
        return pid

    def _runs(self, rank: int) -> bool:
        return not any(rank in outcomes for outcomes in (self.results, self.reports, self.ended))

    def _given_up(self) -> list[int]:
        now = time.monotonic()
        stopped_ranks = {r for r, process in enumerate(self.processes) if self._runs(r) and stopped(process.pid)}
        self.since = {rank: self.since.get(rank, now) for rank in stopped_ranks}
        return [rank for rank, first in self.since.items() if now - first > STOPPED_SECONDS]

    def _apart(self) -> bool:
        """Return whether ranks can never meet, which is looked for now and then."""
        self.looks += 1
        if not self.apart and self.looks % LOOK == 0:
            rows = read_rows(self.store, range(self.size))
            self.apart = rows if disagreement(rows) is not None else {}
            self._look_for_stall(stalled(rows))
        return bool(self.apart)

    def _look_for_stall(self, text: str) -> None:
        """Print once, on stderr, that all ranks have waited for some seconds: that is no error yet."""
        now = time.monotonic()
        if text != self.stall[0]:
            self.stall = text, now
        elif text and now - self.stall[1] > STALL_SECONDS:
            message = f"all ranks have been waiting for {STALL_SECONDS:g} s: {text}"
            print(printable(message), file=sys.stderr, flush=True)
            self.stall = text, math.inf

    def _scene(self, given_up: Sequence[int]) -> Scene:
        rows: dict[int, RankStatus] = read_rows(self.store, range(self.size))
        if self.apart and disagreement(rows) is None:  # a rank has gone on
            rows = self.apart
        return Scene(self.size, rows, list(self.reports.values()), dict(self.ended), given_up, self.folder)

    def _end(self, given_up: Sequence[int]) -> Fault:
        """Tell ranks of the fault, and let them report; a rank that ends from now on is a consequence."""
        self._hear(PERIOD)  # others at fault at the same time
        scene = self._scene(given_up)
        first = scene.fault()
        self._tell(first.error.message.splitlines()[0])
        ended, until, saved = dict(self.ended), time.monotonic() + GRACE / 2, ""
        while time.monotonic() < until and any(self._runs(r) for r in range(self.size) if r not in given_up):
            self._hear(PERIOD / 2)
            if first.again and (rank := self._offer()) is not None:
                saved = self._let_save(rank)
                break
        later = [report for report in self._scene(given_up).reports if report not in scene.reports]
        reports = [*scene.reports, *(replace(report, distant=True) for report in later)]
        fault = Scene(self.size, scene.rows, reports, ended, given_up, self.folder).fault()
        return replace(fault, saved=saved)

    def _offer(self) -> int | None:
        """Return a rank that could save all that the run needs to go on."""
        rows = read_rows(self.store, range(self.size))
        return next((r for r, row in rows.items() if row.offers and self._runs(r) and not self.orphans), None)

    def _let_save(self, rank: int) -> str:
        """Let a rank save, and return what it has saved; all others have ended by then, so that none else writes."""
        others = [process for other, process in enumerate(self.processes) if other != rank]
        for process in others:
            process.kill()
        for process in others:
            process.join()
        self.store.set(SAVES, str(rank))
        until = time.monotonic() + self.signals.grace
        while self._runs(rank) and time.monotonic() < until:
            self._hear(PERIOD / 2)
        return f"rank {rank} saved step {self.store.get(SAVED).decode()}" if self.store.check([SAVED]) else ""

    def _tell(self, reason: str) -> None:
        self.store.set(VERDICT, shorten_middle(reason, LONGEST_LINE))


def run_job(job: Job, seat: Seat, pipe: Connection) -> None:
    """Run the job as a rank, in its process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    size = str(seat.size)
    os.environ |= {"RANK": str(seat.rank), "LOCAL_RANK": str(seat.slot), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    torch.set_num_threads(job.threads)
    _prepare(seat)
    answer: Any
    try:
        store = TCPStore(LOOPBACK, seat.port, None, False)
        connect = partial(TCPStore, LOOPBACK, seat.port, None, False, timeout=timedelta(seconds=STORE_SECONDS))
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
    send_answer(pipe, seat.rank, answer)
    if not isinstance(answer, RankError):
        dist.destroy_process_group()


def _answer(job: Job, rank: int) -> Any:
    """Return what the job returns or raises, once what it has begun in the background is done.

    Other ranks take part in that, and the process group ends with this process.
    """
    answer: Any
    try:
        answer = job.call()
    except Preempted as preempted:
        answer = preempted
    except BaseException as error:
        answer = report(rank, error)  # now: before others see the consequences
        finish_or_warn(job.patience)
        return answer
    finish_all(job.patience)
    return answer


def _prepare(seat: Seat) -> None:
    """Set up the process, and let it end with the launching process."""
    mp.current_process().daemon = False  # daemons may have no children, such as a DataLoader's workers
    mp.set_start_method(seat.start_method, force=True)  # multiprocessing left that of the fork server
    end_with_launcher(seat.rank, seat.folder.parent)
    with contextlib.suppress(ImportError):  # torch.fx makes bars, which have a lock that all processes of a machine see
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())


def send_answer(pipe: Connection, rank: int, answer: Any) -> None:
    """Send a rank's answer to the launching process."""
    try:
        data = packed(answer)
    except Exception as error:
        text = f"a result that cannot be sent to the launching process: {error}"
        data = packed(RankError(rank, time.monotonic(), text, text, False))
    with contextlib.suppress(BrokenPipeError):  # the launching process has ended
        pipe.send_bytes(data)
    pipe.close()
