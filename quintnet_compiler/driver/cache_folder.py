"""A folder of compiled programs. Its owner alone may read or write it, for what is in it is run."""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import CacheWarning, CompileError
from ..core.files import open_folder, write_file
from ..core.names import one_line

_HEAD = "quintnet program "
LARGEST = 2**30  # bytes


def sealed(text: str) -> str:
    """``text`` behind a line with its SHA-256."""
    return f"{_HEAD}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def opened(text: str) -> str | None:
    """What was sealed; None if it is not as it was."""
    _, _, inside = text.partition("\n")
    return inside if text == sealed(inside) else None


@dataclass(frozen=True)
class CacheFolder:
    """Texts by key: SHA-256 in hexadecimal. What cannot be read or trusted is not there, and a CacheWarning says why.

    Several processes may write at once: a file appears whole, and those of one key are alike.
    """

    path: Path

    def read(self, key: str) -> str | None:
        """The text of ``key``, still sealed, if there is one as it was written."""
        try:
            with open_folder(self.path) as folder:
                self._require_own(os.fstat(folder), "the folder")
                file = os.open(_name(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
                with open(file, "rb") as there:
                    self._require_own(os.fstat(file), _name(key))
                    data = there.read(LARGEST + 1)
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

    def _require_own(self, found: os.stat_result, what: str) -> None:
        if found.st_uid != os.geteuid():
            raise _Distrusted(f"{what} belongs to another user")
        if found.st_mode & 0o077:
            mode = 0o700 if stat.S_ISDIR(found.st_mode) else 0o600
            raise _Distrusted(f"others may use {what}: its mode is {stat.S_IMODE(found.st_mode):o}, not {mode:o}")

    def _warn(self, what: str) -> None:
        warnings.warn(CacheWarning(one_line(f"cache {str(self.path)[:300]}: {what}")), stacklevel=2)


class _Distrusted(Exception):
    """Somebody else may have written it."""


def _name(key: str) -> str:
    return f"{key}.program"
