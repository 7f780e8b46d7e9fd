"""compat.interpreter_exit: the hook runs before thread pools refuse work, and its fallback at the exit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quintnet_compiler.compat.interpreter_exit import run_before_exit

SCRIPT = """
import atexit, sys, threading
from concurrent.futures import ThreadPoolExecutor
from quintnet_compiler.compat.interpreter_exit import run_before_exit

if sys.argv[1] == "no hook":
    del threading._register_atexit
pool = ThreadPoolExecutor(1)

def end():
    try:
        print("pool:", pool.submit(lambda: "works").result())
    except RuntimeError:
        print("pool: refuses")

atexit.register(lambda: print("late:", run_before_exit(print)))
print("early:", run_before_exit(end))
"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("hook", ["early: True", "pool: works", "late: False"]),
        ("no hook", ["early: True", "pool: refuses", "late: True"]),
    ],
)
def test_calls_run_when_the_interpreter_ends(how: str, expected: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines() == expected


def test_a_failure_of_the_hook_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(call: object) -> None:
        raise RuntimeError("can't register atexit after shutdown")

    monkeypatch.setattr("threading._register_atexit", refuses)
    assert not run_before_exit(lambda: None)
