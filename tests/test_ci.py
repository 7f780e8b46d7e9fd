"""What CI runs, in one part or in several."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("given", "targets"),
    [
        ((), ["setup", "lint", "first-gpu", "test PART=1/1"]),
        (("1/3",), ["setup", "test PART=1/3"]),
        (("3/3",), ["setup", "lint", "first-gpu", "test PART=3/3"]),
    ],
)
def test_one_part_of_ci_has_what_no_part_of_the_tests_has(
    given: tuple[str, ...], targets: list[str], tmp_path: Path
) -> None:
    (make := tmp_path / "make").write_text('#!/bin/sh\necho "$@"\n')
    make.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run([ROOT / ".ci/run", *given], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == targets
