"""A dump goes to the folder that it was asked for, whatever somebody put there before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import quintnet

from . import Outside, check_dump, refused

FILES = ("plan.json", "schedule.txt", "passes/01_Normalize.txt", "ranks/rank000.py")


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("target", ["file.txt", "new.txt", "inner"])
def test_a_planted_link_to_a_file_is_replaced(
    name: str, target: str, program: quintnet.CompiledProgram, outside: Outside
) -> None:
    link = Path("out") / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside.folder / target)
    program.dump("out")
    assert link.is_file() and not link.is_symlink()
    check_dump(Path("out"))


@pytest.mark.parametrize("name", ["passes", "ranks"])
@pytest.mark.parametrize("kind", ["link", "broken link", "link inside", "file", "pipe"])
def test_something_else_in_place_of_a_sub_folder_is_refused(
    name: str, kind: str, program: quintnet.CompiledProgram, outside: Outside
) -> None:
    Path("out").mkdir()
    place = Path("out") / name
    if kind == "file":
        place.write_text("x")
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to({"link": outside.folder, "broken link": outside.folder / "new", "link inside": "."}[kind])
    assert name in refused("QN701", lambda: program.dump("out"))


def test_something_else_in_place_of_the_folder_is_refused(program: quintnet.CompiledProgram, outside: Outside) -> None:
    Path("file").write_text("x")
    Path("broken").symlink_to(outside.folder / "new")
    for folder in ("file", "file/out", "broken", "a\0b"):
        refused("QN701", lambda folder=folder: program.dump(folder))  # type: ignore[misc]
    for name in FILES:
        (Path("full") / name).mkdir(parents=True)
    refused("QN701", lambda: program.dump("full"))
    assert not [file for file in Path("full").rglob("*") if file.is_file()]


def test_new_folders_are_private_and_no_temporary_file_stays(
    program: quintnet.CompiledProgram, outside: Outside
) -> None:
    program.dump("a/../b/c")
    assert sorted(os.listdir()) == ["a", "b"] and not os.listdir("a")
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in (Path("b"), Path("b/c"), Path("b/c/ranks")))
    assert {"manifest.json", "passes", "plan.json", "ranks", "ranks.json", "schedule.txt"} <= {*os.listdir("b/c")}
    assert not [file for file in Path("b").rglob("*") if file.name.endswith(".tmp")]
    before = {file: file.read_bytes() for file in Path("b").rglob("*") if file.is_file()}
    program.dump("b/c")
    assert {file: file.read_bytes() for file in Path("b").rglob("*") if file.is_file()} == before
