"""The fault that ended a run: the rank at its root, named once, and a line for each of the others."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.process import BaseProcess
from pathlib import Path

from ...compat.interpreter import call_once
from ...core.errors import QuintNetError, RunError
from .board import last_step
from .disagreement import Disagreement, disagreement, said_of
from .rank_status import LONGEST_LINE, RankStatus, first_line, of_communication, shorten_middle, some_ranks
from .sending import LAUNCHES_AGAIN

_AGAIN = "ranks import the script that launched them, and its import launches ranks again"
_GUARD = 'put the call of launch, and all that only the first process shall do, below `if __name__ == "__main__":`'
_NO_TERMINAL = (
    "ranks have no standard input: attach a debugger to the process (gdb -p), or compile without launch: all ranks are "
    "in this process then"
)
HELD_SECONDS = 10.0  # seconds in which a process that was killed has ended, unless something holds it
REPEATABLE = ("QN302", "QN303", "QN402", "QN407")  # codes of faults that may not happen again

MAX_TEXT_CHARACTERS = 20_000  # of an error and its traceback
WATCHDOG = "NCCL's watchdog ends a process when a collective takes too long"


@dataclass(frozen=True)
class RankError:
    """An error that a rank's function raised.

    Attributes:
        when: by the machine's monotonic clock.
        distant: whether it is the consequence of another rank's fault.
        error: the error, if it is one of ours.
    """

    rank: int
    when: float
    line: str
    text: str
    distant: bool
    error: QuintNetError | None = None


def report(rank: int, error: BaseException) -> RankError:
    """Return the report of an error; to be called at once, so that it precedes the consequences elsewhere."""
    when = time.monotonic()
    text = shorten_middle("".join(traceback.format_exception(error)), MAX_TEXT_CHARACTERS)
    coded = error if isinstance(error, QuintNetError) else None
    line = f"{coded.code} {coded.message}" if coded is not None else f"{type(error).__name__}: {first_line(error)}"
    return RankError(
        rank, when, shorten_middle(line.splitlines()[0], LONGEST_LINE), text, of_communication(error), coded
    )


@dataclass(frozen=True)
class Fault:
    """The reason why an attempt ended.

    Attributes:
        ranks: those at fault.
        saved: what a surviving rank has saved then.
    """

    error: QuintNetError
    ranks: tuple[int, ...]
    saved: str = ""

    @property
    def again(self) -> bool:
        """Return whether another attempt may go better."""
        return isinstance(self.error, RunError) and self.error.code in REPEATABLE


@dataclass(frozen=True)
class Scene:
    """The state of all ranks when an attempt ends.

    Attributes:
        rows: the last status of ranks.
        ended: exit codes of ranks that ended without a report (negative: a signal's number).
        stopped: ranks that the system does not let run.
        stacks: folder of the ranks' stacks.
    """

    size: int
    rows: Mapping[int, RankStatus]
    reports: Sequence[RankError]
    ended: Mapping[int, int]
    stopped: Collection[int]
    stacks: Path

    @property
    def certain(self) -> bool:
        """Return whether something explains itself; a ``distant`` error has its cause elsewhere."""
        direct = self.ended or self.stopped or any(not report.distant for report in self.reports)
        return bool(direct or self.disagreement is not None)

    @cached_property
    def disagreement(self) -> Disagreement | None:
        """Return calls of ranks that can never meet: whatever else happened to these ranks is a consequence."""
        return disagreement(self.rows)

    def fault(self) -> Fault:
        """Return the fault at the root: the first of these causes that was seen."""
        causes = (
            self._disagreement,
            self._raised,
            self._aborted,
            self._launched_again,
            self._exited,
            self._stopped,
            self._not_arrived,
        )
        for cause in causes:
            if (fault := cause()) is not None:
                return fault
        report = min(self.reports, key=lambda report: report.when)
        message = f"rank {report.rank}: {report.line}\n  {said_of(self.rows)}"
        return self._fault("QN402", message, [report.rank], "")

    def _disagreement(self) -> Fault | None:
        """Return the fault of ranks that are in calls that can never meet."""
        if (apart := self.disagreement) is None:
            return None
        return self._fault(apart.code, apart.text, apart.ranks, apart.error.fix)

    def _raised(self) -> Fault | None:
        """Return the fault of the first rank that raised an error of its own."""
        direct = (report for report in self.reports if not report.distant)
        first = min(direct, key=lambda report: report.when, default=None)
        if first is None:
            return None
        if first.error is not None:
            return Fault(self._with_rank(first, first.error), (first.rank,))
        message = f"rank {first.rank} raised {first.line}\n{first.text.rstrip()}"
        fix = _NO_TERMINAL if first.line.startswith("BdbQuit") else ""
        return self._fault("QN302", message, [first.rank], fix)

    def _aborted(self) -> Fault | None:
        """Return the fault of ranks that had not begun the run in which NCCL's watchdog aborted all that ended."""
        if not self.ended or any(code != -signal.SIGABRT for code in self.ended.values()):
            return None
        begun = min(self.rows[rank].calls if rank in self.rows else 0 for rank in self.ended)
        late = [r for r, row in sorted(self.rows.items()) if r not in self.ended and row.calls < begun]
        ended = [f"rank {r} {_exit(code)}{self._where(r)}: {WATCHDOG}" for r, code in sorted(self.ended.items())]
        return self._late(late, ended) if late else None

    def _launched_again(self) -> Fault | None:
        """Return the fault of a rank whose import of the script came to launch."""
        if any(code == LAUNCHES_AGAIN and not self._started(rank) for rank, code in self.ended.items()):
            return self._fault("QN307", _AGAIN, sorted(self.ended), _GUARD)
        return None

    def _exited(self) -> Fault | None:
        """Return the fault of ranks that ended without a report."""
        if not self.ended:
            return None
        fix = ""
        if -signal.SIGKILL in self.ended.values():
            fix = "if nobody killed it, the machine may have been out of memory (see dmesg)"
        elif not any(self._started(rank) for rank in self.ended):
            fix = "see what it printed above: a rank first imports the script that launched it"
        lines = [f"rank {rank} {_exit(code)}{self._where(rank)}" for rank, code in sorted(self.ended.items())]
        return self._fault("QN302", "\n  ".join(lines), sorted(self.ended), fix)

    def _stopped(self) -> Fault | None:
        """Return the fault of ranks that the system does not let run."""
        if not self.stopped:
            return None
        lines = [f"rank {rank} is stopped (SIGSTOP){self._where(rank)}" for rank in sorted(self.stopped)]
        return self._fault("QN303", "\n  ".join(lines), sorted(self.stopped), "")

    def _not_arrived(self) -> Fault | None:
        """Return the fault of ranks that do not wait, while others report that they waited too long."""
        reported = {report.rank for report in self.reports}
        late = [r for r, row in sorted(self.rows.items()) if r not in reported and not row.waiting]
        return self._late(late) if late else None

    def _late(self, ranks: Sequence[int], others: Sequence[str] = ()) -> Fault:
        lines = [f"rank {r} did not come{self._where(r)}: it is at {self.rows[r].at or 'its start'}" for r in ranks]
        fix = "see what it does there, or wait longer for it"
        return self._fault("QN402", "\n  ".join([*lines, *others]), ranks, fix)

    def _started(self, rank: int) -> bool:
        return self.rows.get(rank, RankStatus()).pid > 0

    def _with_rank(self, first: RankError, error: QuintNetError) -> QuintNetError:
        """Return the error as it is if every rank raised it; else with those that did, and where the others are."""
        errors = {report.rank: report.error for report in self.reports if report.error is not None}
        same = {rank for rank, other in errors.items() if (other.code, other.message) == (error.code, error.message)}
        same |= {first.rank}
        others = {rank: self.rows.get(rank, RankStatus()) for rank in range(self.size) if rank not in same}
        if not others:
            return error
        message = f"{error.message}\n  raised on {some_ranks(sorted(same))}; {said_of(others)}"
        return type(error)(error.code, message, where=error.where, fix=error.fix)

    def _fault(self, code: str, message: str, ranks: Sequence[int], fix: str) -> Fault:
        others = [f"rank {report.rank}: {report.line}" for report in self.reports if report.rank not in ranks]
        if self.disagreement is not None:  # ranks that noticed, or read the verdict, say the same
            same = f": {self.disagreement.code} ", self.disagreement.text
            others = [line for line in others if not any(text in line for text in same)]
        lines = [message, *sorted(others)]
        files = sorted(self.stacks.glob("rank*.txt")) if self.stacks.exists() else []
        if files:
            lines.append(f"stacks of {len(files)} ranks when it ended: {self.stacks}")
        error = RunError(code, "\n  ".join(lines), fix=fix)
        return Fault(error, tuple(ranks))

    def _where(self, rank: int) -> str:
        row, last = self.rows.get(rank, RankStatus()), last_step(self.stacks, rank)
        step = f" in step {last}" if last >= 0 else " before its first step"
        return f"{step} (pid {row.pid})" if row.pid else " before it had started"


def _exit(code: int) -> str:
    with contextlib.suppress(ValueError):
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code} and without a result"


def stopped(pid: int | None) -> bool:
    """Return whether the system does not let a process of this machine run (SIGSTOP; not a debugger's)."""
    return _state(pid) == "T"


def gone(pid: int) -> bool:
    """Return whether a process of this machine has ended, or this system has no /proc."""
    return _state(pid) in ("", "Z", "X")


def wait_for_killed(ranks: Sequence[BaseProcess]) -> None:
    """Wait until the ranks' processes have ended; for some seconds, as a debugger may hold one, or a disk."""
    until = time.monotonic() + HELD_SECONDS
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
    held = [f"rank {rank} (pid {process.pid})" for rank, process in enumerate(ranks) if process.is_alive()]
    if held:
        text = f"killed, and not ended yet: {', '.join(held)}; a debugger or the system's kernel holds what is killed"
        print(text, file=sys.stderr, flush=True)


@call_once
def number_space() -> str:
    """Return a name of the processes among which a process number identifies one; "" if that is not known.

    These are the processes of a machine since it started, or of a container there.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{machine} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state(pid: int | None) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
