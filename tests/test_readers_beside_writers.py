"""Loads beside a writer: none fails and none has parts of two checkpoints. See readers_beside_writers.py."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from tests.readers_beside_writers import Saving, read, writer_process, writer_thread

SECONDS = 2.0
LONG_SECONDS = 40.0  # of each of 15 ways: ten minutes
WAYS = [
    pytest.param(files, rotates, keep, id=f"{files} files, {'growing steps' if rotates else 'one step'}, keep {keep}")
    for files in (1, 4)
    for rotates, keep in ((False, 1), (True, 1), (True, 2), (True, 3))
]


def _on_disk(tmp_path: Path, files: int, rotates: bool, keep: int, seconds: float) -> None:
    folder = tmp_path / "run"
    with writer_process(Saving(str(folder), rotates, keep), files, tmp_path):
        counts = read(str(folder), seconds, lambda: any(folder.glob("step-*")))
    assert counts.mixed == () and counts.errors == ()
    assert counts.loads >= counts.states > 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(("files", "rotates", "keep"), WAYS)
def test_loads_beside_a_writer(tmp_path: Path, files: int, rotates: bool, keep: int) -> None:
    _on_disk(tmp_path, files, rotates, keep, SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize(("files", "rotates", "keep"), WAYS)
def test_loads_beside_a_writer_for_long(tmp_path: Path, files: int, rotates: bool, keep: int) -> None:
    _on_disk(tmp_path, files, rotates, keep, LONG_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [SECONDS, LONG_SECONDS])
@pytest.mark.parametrize(("rotates", "keep"), [(False, 1), (True, 1), (True, 2), (True, 3)])
def test_loads_beside_a_writer_into_a_store(tmp_path: Path, rotates: bool, keep: int, seconds: float) -> None:
    place = f"memory://{tmp_path.name}-{rotates}-{keep}/run"
    store, root = fsspec.core.url_to_fs(place)
    with writer_thread(Saving(place, rotates, keep), tmp_path):
        counts = read(place, seconds, lambda: bool(store.glob(f"{root}/step-*.json")))
    assert counts.mixed == () and counts.errors == ()
    assert counts.loads >= counts.states > 2
