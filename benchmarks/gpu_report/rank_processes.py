"""Start a process for each rank, and collect their checks and exit codes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .entries import Check, entry_of

ROOT = Path(__file__).parent.parent.parent
CODE = "from gpu_report.rank_work import main; main()"


@dataclass(frozen=True)
class Ended:
    """The end of ranks, in their order.

    ``codes``: exit codes, None for one that still ran. ``checks``: of each. ``texts``: the output of each.
    """

    seconds: float
    codes: tuple[int | None, ...]
    checks: tuple[tuple[Check, ...], ...]
    texts: tuple[str, ...]

    @property
    def merged(self) -> list[Check]:
        """Return each check, good if it is good on all ranks, and one of how the ranks ended."""
        names = dict.fromkeys(check.what for checks in self.checks for check in checks)
        merged = [self._of_all(name) for name in names]
        if not names or any(self.codes):
            merged.append(Check(f"{len(self.codes)} ranks end well", False, f"{self.codes}: {self.texts[0][-600:]}"))
        return merged

    def _of_all(self, name: str) -> Check:
        mine = [check for checks in self.checks for check in checks if check.what == name]
        good = len(mine) == len(self.codes) and all(check.good for check in mine)
        return Check(name, good, " | ".join(dict.fromkeys(check.found for check in mine)))


@dataclass(frozen=True)
class Launcher:
    """Starts ranks. ``environment``: in addition to this process's; ``folder``: for the files that ranks write."""

    device: str
    environment: Mapping[str, str]
    folder: Path

    def run(self, work: str, size: int, seconds: float, *, awaited: Sequence[int] = ()) -> Ended:
        """Run ``work`` of :mod:`.rank_work` on ``size`` ranks, for at most ``seconds``.

        All ranks are ended once those that are ``awaited``, by default all, have ended.
        """
        start = time.monotonic()
        for old in self.folder.glob(f"{work}.*"):
            old.unlink()
        port = str(_free_port())
        processes = [self._start(work, rank, size, port) for rank in range(size)]
        try:
            waited_for = [processes[rank] for rank in awaited or range(size)]
            while any(process.poll() is None for process in waited_for) and time.monotonic() - start < seconds:
                time.sleep(0.05)
            codes = tuple(process.poll() for process in processes)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        lines = [self._read(f"{work}.{rank}.jsonl").splitlines() for rank in range(size)]
        checks = tuple(
            tuple(entry for entry in map(entry_of, own_lines) if isinstance(entry, Check)) for own_lines in lines
        )
        texts = tuple(self._read(f"{work}.{rank}.log") for rank in range(size))
        return Ended(time.monotonic() - start, codes, checks, texts)

    def _start(self, work: str, rank: int, size: int, port: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **self.environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", CODE, work, str(rank), str(size), port, self.device, str(self.folder)]
        with (self.folder / f"{work}.{rank}.log").open("wb") as printed:
            return subprocess.Popen(
                command, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _read(self, name: str) -> str:
        file = self.folder / name
        return file.read_text(errors="replace") if file.exists() else ""


def _free_port() -> int:
    """Return a port for the ranks' store: groups that meet by a file have no heartbeat."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
