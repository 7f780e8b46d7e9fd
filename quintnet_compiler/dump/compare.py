"""What differs between two plans, or two dump folders."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..ir.plan import Plan, read_plan

SHOWN = 40  # lines of a file's difference
LARGEST = 2**22  # bytes of a file whose lines are compared


@dataclass(frozen=True)
class FileChange:
    """A file that differs: how many lines were added and removed, and the first of them (none where only one folder
    has the file, or it is too large to compare line by line)."""

    added: int
    removed: int
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class DumpChanges:
    """``plan``: key -> (before, after); ``parameters``: name -> (types before, types after); ``files``: what differs,
    by path, if folders were compared."""

    plan: Mapping[str, tuple[Any, Any]]
    parameters: Mapping[str, tuple[Any, Any]]
    files: Mapping[str, FileChange] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"equal": not (self.plan or self.parameters or self.files), **asdict(self)}, indent=2)

    def __str__(self) -> str:
        lines = [f"{key}: {_short(old)} -> {_short(new)}" for key, (old, new) in self.plan.items()]
        lines += [f"{name}: {_types(old)} -> {_types(new)}" for name, (old, new) in self.parameters.items()]
        for path, change in self.files.items():
            lines += [f"{path}: +{change.added} -{change.removed} lines", *(f"    {line}" for line in change.lines)]
        return "\n".join(lines) or "no difference"


def compare_plans(a: Plan, b: Plan) -> DumpChanges:
    """Compare plans decision by decision, and parameter by parameter."""
    old, new = (plan.model_dump(mode="json") for plan in (a, b))
    pins, new_pins = old.pop("parameters"), new.pop("parameters")
    names = [*pins, *(name for name in new_pins if name not in pins)]
    return DumpChanges(
        {key: (old[key], new[key]) for key in old if old[key] != new[key]},
        {name: (pins.get(name), new_pins.get(name)) for name in names if pins.get(name) != new_pins.get(name)},
    )


def compare_folders(a: Path, b: Path) -> DumpChanges:
    """Compare the plans of two folders, and every file of text; pictures and pages follow from those.

    Raises:
        CompileError: QN207 if a plan is not valid.
    """
    plans = compare_plans(read_plan(a / "plan.json"), read_plan(b / "plan.json"))
    files: dict[str, FileChange] = {}
    for name in sorted(_files(a) | _files(b)):
        old, new = (_read(folder / name) for folder in (a, b))
        if old != new:
            files[name] = _change(old, new)
    return DumpChanges(plans.plan, plans.parameters, files)


def _files(folder: Path) -> set[str]:
    text = {file.relative_to(folder).as_posix() for kind in ("*.py", "*.txt") for file in folder.rglob(kind)}
    return text | {name for name in ("ranks.json", "comm/schedule.json") if (folder / name).is_file()}


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _change(old: str, new: str) -> FileChange:
    if len(old) + len(new) > LARGEST or not old or not new:
        return FileChange(new.count("\n"), old.count("\n"))
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0))[2:]
    changed = [line for line in lines if not line.startswith("@@")]
    added = sum(line.startswith("+") for line in changed)
    cut = (f"... {len(changed) - SHOWN} more",) if len(changed) > SHOWN else ()
    return FileChange(added, len(changed) - added, (*(line[:200] for line in changed[:SHOWN]), *cut))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _types(kinds: Mapping[str, str] | None) -> str:
    return ", ".join(f"{axis}: {kind}" for axis, kind in kinds.items()) if kinds else "not said"
