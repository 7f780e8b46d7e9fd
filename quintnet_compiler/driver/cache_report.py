"""What is in a folder of compiled programs, for people, and what of it to remove."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..core.annotations import format_bytes
from ..core.names import one_line
from .cache_folder import CacheFile

DAY = 86400.0  # seconds
_MORE = ("rows", "device", "quintnet", "torch", "python")  # what is shown with its name


def surplus(files: Sequence[CacheFile], *, before: float, most: float) -> tuple[CacheFile, ...]:
    """Return the files that were used last before a time, and those used longest ago beyond ``most`` bytes.

    ``before`` is in seconds since 1970.

    >>> files = [CacheFile("new", 3, 30.0), CacheFile("old", 2, 20.0), CacheFile("oldest", 1, 10.0)]
    >>> [file.name for file in surplus(files, before=0.0, most=5.0)]
    ['oldest']
    >>> [file.name for file in surplus(files, before=25.0, most=float("inf"))]
    ['old', 'oldest']
    """
    kept_bytes, removed = 0, list[CacheFile]()
    for file in sorted(files, key=lambda file: -file.used):
        if removed or file.used < before or kept_bytes + file.size > most:
            removed.append(file)
        else:
            kept_bytes += file.size
    return tuple(removed)


@dataclass(frozen=True)
class CacheReport:
    """The files of a folder, with those that were ``removed`` from it; ``now``: seconds since 1970."""

    folder: str
    files: tuple[CacheFile, ...]
    removed: tuple[CacheFile, ...]
    now: float

    @classmethod
    def of_folder(cls, folder: str, files: Sequence[CacheFile], removed: Sequence[CacheFile]) -> CacheReport:
        gone = {file.name for file in removed}
        return cls(folder, tuple(file for file in files if file.name not in gone), tuple(removed), time.time())

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        whole = f"{_programs(self.files)} in {one_line(self.folder)}"
        gone = [f"removed: {_programs(self.removed)}"] if self.removed else []
        return "\n".join([*map(self._line, self.files), whole, *gone])

    def _line(self, file: CacheFile) -> str:
        days = (self.now - file.used) / DAY
        start = f"{file.name[:12]}  {format_bytes(file.size):>10}  used {days:.1f} days ago  "
        if not file.about:
            return start + "not a whole program"
        about = {name: one_line(text[:80]) for name, text in file.about.items()}
        count = about.get("parameters", "")
        large = f" of {int(count):,} parameters" if count.isdecimal() else ""
        parts = [f"{about.get('model', '')}{large}", about.get("use", ""), about.get("mesh", "")]
        parts += [f"{name} {about[name]}" for name in _MORE if about.get(name)]
        return start + ", ".join(parts)


def _programs(files: Sequence[CacheFile]) -> str:
    return f"{len(files)} program{'s' * (len(files) != 1)}, {format_bytes(sum(file.size for file in files))}"
