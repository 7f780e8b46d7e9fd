"""A folder of compiled programs. Its owner alone may read or write it, for what is in it is run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..core.errors import CacheWarning, CompileError
from ..core.files import open_folder, write_file
from ..core.names import one_line

_HEAD = "quintnet program "
_FILE = re.compile(r"[0-9a-f]{64}\.program|\.[0-9a-f]{16}\.tmp")  # the latter: of a writer that was killed, or writes
LARGEST = 2**30  # bytes
_LONGEST = 2**16  # characters of a line before the program


def sealed(text: str, about: Mapping[str, str] | None = None) -> str:
    """``text`` behind a line for people (``about``), and both behind a line with their SHA-256."""
    inside = f"{json.dumps(dict(about or {}))}\n{text}"
    return f"{_HEAD}{hashlib.sha256(inside.encode()).hexdigest()}\n{inside}"


def opened(text: str) -> str | None:
    """The text that was sealed; None if it is not as it was."""
    head, _, inside = text.partition("\n")
    if head != _HEAD + hashlib.sha256(inside.encode()).hexdigest():
        return None
    return inside.partition("\n")[2]


@dataclass(frozen=True)
class CacheFile:
    """A file of a folder. ``size``: bytes; ``used``: when a program was read from it last, or it was written, in
    seconds since 1970; ``about``: what was written beside the program, for people, and nothing if there is none."""

    name: str
    size: int
    used: float
    about: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheFolder:
    """Texts by key: SHA-256 in hexadecimal. What cannot be read or trusted is not there, and a CacheWarning says why.

    Several processes may write at once: a file appears whole, and those of one key are alike.
    """

    path: Path

    def read(self, key: str) -> str | None:
        """Return the text of ``key``, still sealed, if it is in the folder as it was written."""
        try:
            with open_folder(self.path) as folder:
                self._require_own(os.fstat(folder), "the folder")
                file = os.open(_name(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
                with open(file, "rb") as stream:
                    self._require_own(os.fstat(file), _name(key))
                    data = stream.read(LARGEST + 1)
                    with contextlib.suppress(OSError):  # a disk that is only read
                        os.utime(file)
        except FileNotFoundError:
            return None
        except (OSError, CompileError, _Distrusted) as error:
            self._warn(f"not read: {error}")
            return None
        text = data.decode(errors="replace")
        if len(data) > LARGEST or opened(text) is None:
            self._warn(f"{_name(key)} is damaged, and is written again")
            return None
        return text

    def write(self, key: str, text: str) -> None:
        """Put a sealed ``text`` there, in place of any other."""
        try:
            with open_folder(self.path) as folder:
                self._require_own(os.fstat(folder), "the folder")
                write_file(folder, _name(key), text, mode=0o600)
        except (OSError, CompileError, _Distrusted) as error:
            self._warn(f"not written: {error}")

    def files(self) -> tuple[CacheFile, ...]:
        """Return the files, the one that was used last first."""
        with self._for_people() as folder:
            files = [self._file(folder, name) for name in os.listdir(folder) if _FILE.fullmatch(name)]
        return tuple(sorted(filter(None, files), key=lambda file: (-file.used, file.name)))

    def remove(self, files: tuple[CacheFile, ...]) -> None:
        """Remove these. Who is about to read one of them compiles."""
        with self._for_people() as folder:
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.name, dir_fd=folder)

    @contextlib.contextmanager
    def _for_people(self) -> Iterator[int]:
        """The folder, whose files are only looked at, and never run.

        Raises:
            CompileError: QN701 if it cannot be read, or belongs to another user.
        """
        try:
            with open_folder(self.path) as folder:
                self._require_own(os.fstat(folder), "the folder")
                yield folder
        except (OSError, _Distrusted) as error:
            place = one_line(str(self.path)[:300])
            raise CompileError("QN701", f"cache {place}: {error}", fix="give a folder of your own, mode 700") from error

    def _file(self, folder: int, name: str) -> CacheFile | None:
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            with open(file, "rb") as stream:
                status = os.fstat(file)
                head, about = stream.readline(_LONGEST), stream.readline(_LONGEST)
        except OSError:  # it is gone, or a link
            return None
        document = {}
        if head.startswith(_HEAD.encode()):
            with contextlib.suppress(ValueError, AttributeError):
                document = {str(key): str(text) for key, text in json.loads(about).items()}
        return CacheFile(name, status.st_size, status.st_mtime, document)

    def _require_own(self, status: os.stat_result, name: str) -> None:
        if status.st_uid != os.geteuid():
            raise _Distrusted(f"{name} belongs to another user")
        if status.st_mode & 0o077:
            mode = 0o700 if stat.S_ISDIR(status.st_mode) else 0o600
            raise _Distrusted(f"others may use {name}: its mode is {stat.S_IMODE(status.st_mode):o}, not {mode:o}")

    def _warn(self, problem: str) -> None:
        warnings.warn(CacheWarning(one_line(f"cache {str(self.path)[:300]}: {problem}")), stacklevel=2)


class _Distrusted(Exception):
    """Somebody else may have written it."""


def _name(key: str) -> str:
    return f"{key}.program"
