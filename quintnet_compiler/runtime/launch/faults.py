"""What ended a run: the rank at its root, named once, and a line for each of the others."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from ...core.errors import QuintNetError, RunError
from .board import last_step
from .disagreement import Disagreement, disagreement, said_of
from .rank_status import RankStatus, some_ranks
from .sending import LAUNCHES_AGAIN

_AGAIN = "ranks import the script that launched them, and its import launches ranks again"
_GUARD = 'put the call of launch, and all that only the first process shall do, below `if __name__ == "__main__":`'
REPEATABLE = ("QN302", "QN303", "QN402", "QN407")  # codes of faults that may not happen again

WATCHDOG = "NCCL's watchdog ends a process when a collective takes too long"


@dataclass(frozen=True)
class RankError:
    """An error that a rank's function raised. ``when``: of the machine's monotonic clock. ``distant``: it is how
    another rank's fault looks like from there. ``error``: itself, if it is one of ours."""

    rank: int
    when: float
    line: str
    text: str
    distant: bool
    error: QuintNetError | None = None


@dataclass(frozen=True)
class Fault:
    """Why an attempt ended. ``ranks``: those at fault; ``again``: whether another attempt may go better; ``saved``:
    what a rank that was left has saved then."""

    error: QuintNetError
    ranks: tuple[int, ...]
    saved: str = ""

    @property
    def again(self) -> bool:
        return isinstance(self.error, RunError) and self.error.code in REPEATABLE


@dataclass(frozen=True)
class Scene:
    """All that is known when an attempt ends.

    ``ended``: exit codes of ranks that ended without a word (negative: a signal's number); ``stopped``: ranks that
    the system does not let run; ``rows``: the last that ranks said; ``stacks``: folder of their stacks.
    """

    size: int
    rows: Mapping[int, RankStatus]
    reports: Sequence[RankError]
    ended: Mapping[int, int]
    stopped: Collection[int]
    stacks: Path

    @property
    def certain(self) -> bool:
        """Whether something was seen that explains itself; what is ``distant`` has its cause elsewhere."""
        seen = self.ended or self.stopped or any(not one.distant for one in self.reports)
        return bool(seen or self.apart is not None)

    @cached_property
    def apart(self) -> Disagreement | None:
        """What ranks are in that can never meet: whatever happened to them then is its consequence."""
        return disagreement(self.rows)

    def fault(self) -> Fault:
        first = min((one for one in self.reports if not one.distant), key=lambda one: one.when, default=None)
        if (apart := self.apart) is not None:
            return self._fault(apart.code, apart.text, apart.ranks, apart.error.fix)
        if first is not None and first.error is not None:
            return Fault(self._with_rank(first, first.error), (first.rank,))
        if first is not None:
            return self._fault(
                "QN302", f"rank {first.rank} raised {first.line}\n{first.text.rstrip()}", [first.rank], ""
            )
        if late := self._given_up_on():
            lines = [f"rank {r} did not come{self._where(r)}: it is at {self.rows[r].at or 'its start'}" for r in late]
            lines += [f"rank {r} {_exit(code)}{self._where(r)}: {WATCHDOG}" for r, code in sorted(self.ended.items())]
            return self._fault("QN402", "\n  ".join(lines), late, "see what it does there, or wait longer for it")
        if self._launched_again():
            return self._fault("QN307", _AGAIN, sorted(self.ended), _GUARD)
        if self.ended:
            lines = [f"rank {rank} {_exit(code)}{self._where(rank)}" for rank, code in sorted(self.ended.items())]
            fix = ""
            if -signal.SIGKILL in self.ended.values():
                fix = "if nobody killed it, the machine may have been out of memory (see dmesg)"
            elif not any(self._started(rank) for rank in self.ended):
                fix = "see what it printed above: a rank first imports the script that launched it"
            return self._fault("QN302", "\n  ".join(lines), sorted(self.ended), fix)
        if self.stopped:
            lines = [f"rank {rank} is stopped (SIGSTOP){self._where(rank)}" for rank in sorted(self.stopped)]
            return self._fault("QN303", "\n  ".join(lines), sorted(self.stopped), "")
        told = {one.rank for one in self.reports}
        late = [r for r, row in sorted(self.rows.items()) if r not in told and not row.waiting]
        waited = min(self.reports, key=lambda one: one.when)
        if late:
            lines = [f"rank {r} did not come{self._where(r)}: it is at {self.rows[r].at or 'its start'}" for r in late]
            return self._fault("QN402", "\n  ".join(lines), late, "see what it does there, or wait longer for it")
        message = f"rank {waited.rank}: {waited.line}\n  {said_of(self.rows)}"
        return self._fault("QN402", message, [waited.rank], "")

    def _started(self, rank: int) -> bool:
        return self.rows.get(rank, RankStatus()).pid > 0

    def _launched_again(self) -> bool:
        """Whether a rank's import of the script came to launch."""
        return any(code == LAUNCHES_AGAIN and not self._started(rank) for rank, code in self.ended.items())

    def _given_up_on(self) -> list[int]:
        """Ranks that had not begun the run in which all that ended were aborted, as NCCL's watchdog does where a
        collective takes too long."""
        if not self.ended or any(code != -signal.SIGABRT for code in self.ended.values()):
            return []
        begun = min(self.rows[rank].calls if rank in self.rows else 0 for rank in self.ended)
        return [r for r, row in sorted(self.rows.items()) if r not in self.ended and row.calls < begun]

    def _with_rank(self, first: RankError, error: QuintNetError) -> QuintNetError:
        """The error as it is if every rank raised it; else with those that did, and where the others are."""
        mine = error.code, error.message
        told = {one.rank: one.error for one in self.reports if one.error is not None}
        same = sorted({first.rank} | {rank for rank, one in told.items() if (one.code, one.message) == mine})
        others = {rank: self.rows.get(rank, RankStatus()) for rank in range(self.size) if rank not in same}
        if not others:
            return error
        message = f"{error.message}\n  raised on {some_ranks(same)}; {said_of(others)}"
        return type(error)(error.code, message, where=error.where, fix=error.fix)

    def _fault(self, code: str, message: str, ranks: Sequence[int], fix: str) -> Fault:
        others = [f"rank {one.rank}: {one.line}" for one in self.reports if one.rank not in ranks]
        if self.apart is not None:  # ranks that noticed, or were told, say the same
            same = f": {self.apart.code} ", self.apart.text
            others = [line for line in others if not any(text in line for text in same)]
        lines = [message, *sorted(others)]
        found = sorted(self.stacks.glob("rank*.txt")) if self.stacks.exists() else []
        if found:
            lines.append(f"stacks of {len(found)} ranks when it ended: {self.stacks}")
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
    """Whether the system does not let a process of this machine run (SIGSTOP; not a debugger's)."""
    return _state(pid) == "T"


def gone(pid: int) -> bool:
    """Whether a process of this machine has ended, or this system has no /proc."""
    return _state(pid) in ("", "Z", "X")


@cache
def number_space() -> str:
    """Names the processes among which a process number is that of one: those of a machine since it started, or of a
    container there. "" if that is not known."""
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
