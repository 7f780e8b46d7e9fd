"""Runs parts in processes of their own, one after the other, and writes the report after each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .entries import Check, Entry, Figures, NotRun, entry_of
from .page import page
from .parts import Part

TAIL = 4000  # characters of what a failed part printed


@dataclass(frozen=True)
class Outcome:
    """The outcome of a part. ``why``: the reason of a failure; ``tail``: the end of its output."""

    part: Part
    verdict: str  # passed, failed, not run
    seconds: float
    entries: tuple[Entry, ...] = ()
    why: str = ""
    tail: str = ""

    @property
    def checks(self) -> list[Check]:
        return [entry for entry in self.entries if isinstance(entry, Check)]

    @property
    def not_run(self) -> list[NotRun]:
        return [entry for entry in self.entries if isinstance(entry, NotRun)]

    @property
    def tables(self) -> dict[str, list[Figures]]:
        tables: dict[str, list[Figures]] = {}
        for entry in self.entries:
            if isinstance(entry, Figures):
                tables.setdefault(entry.table, []).append(entry)
        return tables


def run_parts(parts: Sequence[Part], folder: Path, *, emulated: bool, library: Path | None = None) -> list[Outcome]:
    """All of ``parts``; ``folder`` has report.json and index.html of those that are done, and what each printed."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for part in parts:
        outcomes.append(run_part(part, folder, emulated=emulated, library=library))
        waiting = [Outcome(other, "not run", 0.0, why="it has not begun") for other in parts[len(outcomes) :]]
        write([*outcomes, *waiting], folder, emulated=emulated)
        print(f"{part.name:<16}{outcomes[-1].verdict:<10}{outcomes[-1].seconds:6.1f} s  {outcomes[-1].why}", flush=True)
    return outcomes


def run_part(part: Part, folder: Path, *, emulated: bool, library: Path | None = None) -> Outcome:
    entries, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    entries.unlink(missing_ok=True)
    script = Path(__file__).parent.parent / "first_gpu.py"
    command = [sys.executable, str(script), "--out", str(folder), "--part", part.name]
    command += ["--emulated"] if emulated else []
    command += ["--library", str(library)] if library is not None else []
    start, why = time.monotonic(), ""
    with log.open("wb") as printed:
        process = subprocess.Popen(
            command,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that processes which it started end with it
        )
        try:
            code = process.wait(part.seconds)
            why = "" if code == 0 else _ended(code)
        except subprocess.TimeoutExpired:
            why = f"it was not done after {part.seconds} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = entries.read_text().splitlines() if entries.exists() else []
    reported = tuple(entry_of(line) for line in lines)
    tail = log.read_text(errors="replace")[-TAIL:]
    if why:
        why = f"{why}: {last_error(tail)}" if last_error(tail) else why
    bad = [entry.what for entry in reported if isinstance(entry, Check) and not entry.good]
    if bad and not why:
        why = f"{len(bad)} of {sum(isinstance(entry, Check) for entry in reported)} checks"
    run = any(not isinstance(entry, NotRun) for entry in reported)
    verdict = "failed" if why else "passed" if run else "not run"
    return Outcome(part, verdict, time.monotonic() - start, reported, why, tail if why else "")


def _ended(code: int) -> str:
    if code > 0:
        return f"it ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it was ended by signal {-code}"


def last_error(text: str) -> str:
    """The last line of a traceback, if there is one.

    >>> last_error("Traceback (most recent call last):\\n  File ...\\nValueError: no\\n")
    'ValueError: no'
    """
    _, there, after = text.rpartition("Traceback (most recent call last):")
    lines = [line for line in after.splitlines() if line and not line.startswith(" ")]
    return lines[0] if there and lines else ""


def write(outcomes: Sequence[Outcome], folder: Path, *, emulated: bool) -> None:
    """report.json and index.html."""
    document = {
        "emulated": emulated,
        "seconds": sum(outcome.seconds for outcome in outcomes),
        "parts": [
            {
                **asdict(outcome.part),
                "limit": outcome.part.seconds,
                "verdict": outcome.verdict,
                "seconds": round(outcome.seconds, 1),
                "why": outcome.why,
                "tail": outcome.tail,
                "checks": [asdict(check) for check in outcome.checks],
                "tables": {name: [dict(row.cells) for row in rows] for name, rows in outcome.tables.items()},
                "not_run": [asdict(what) for what in outcome.not_run],
            }
            for outcome in outcomes
        ],
    }
    for name, text in (("report.json", json.dumps(document, indent=1) + "\n"), ("index.html", page(document))):
        new = folder / f"{name}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(folder / name)  # what is there is whole, whenever this is interrupted
