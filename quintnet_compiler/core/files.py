"""Read the paths that people give. Write files whole or not at all, and never through a link in their place."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from .errors import CompileError, QuintNetError

AnyPath = str | os.PathLike[str]


def path_of(path: AnyPath, code: str, error: type[QuintNetError] = CompileError) -> Path:
    """Return the path that a text is, or that an object names.

    Raises:
        QuintNetError: of class ``error`` and id ``code``, for what names none.
    """
    try:
        text = os.fspath(path)
    except Exception as reason:  # of another library's __fspath__
        raise _no_path(f"{type(path).__name__}: {reason}", code, error) from reason
    if not isinstance(text, str):
        raise _no_path(type(text).__name__, code, error)
    if "\0" in text:
        raise _no_path(ascii(text), code, error)
    return Path(text)


def _no_path(text: str, code: str, error: type[QuintNetError]) -> QuintNetError:
    return error(code, f"this is no path: {text[:300]}", fix="give a str or a pathlib.Path")


@contextlib.contextmanager
def open_folder(path: Path, inside: int | None = None) -> Iterator[int]:
    """Yield a descriptor of folder ``path``, which is created if it does not exist (mode 0700).

    With ``inside`` the path is one name within that folder, and a link is refused. Whatever is written through the
    descriptor stays in that folder, even if the name changes meanwhile.

    Raises:
        CompileError: QN701 if it is not a folder, or a link inside another.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY
    try:
        if inside is None:
            for folder in reversed([path, *path.parents]):
                if not folder.exists():
                    folder.mkdir(mode=0o700, exist_ok=True)
        else:
            flags |= os.O_NOFOLLOW
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700, dir_fd=inside)
        folder_fd = os.open(path, flags, dir_fd=inside)
    except ValueError as error:  # a NUL in the path
        raise _no_folder(path) from error
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.EMLINK):  # a link: systems differ
            raise _no_folder(path) from error
        raise
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


def _no_folder(path: Path) -> CompileError:
    return CompileError("QN701", f"{ascii(str(path))[:300]} is not a folder", fix="remove it, or write elsewhere")


def open_plain(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Return a descriptor of a plain file, at once: no link is followed, and no pipe is waited for.

    ``mode``: of a file that is made, from which the process's umask is taken.

    Raises:
        OSError: ELOOP for a link, EINVAL for what is no plain file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise OSError(errno.ELOOP, "a link is not followed", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return descriptor


def open_to_append(path: Path) -> int:
    """Return a descriptor of a file that is written on, or made.

    One with further names, as copies of a folder by hard links have it, is replaced by a copy of its own: the others
    stay as they are.

    Raises:
        OSError: for a link, and for what is no plain file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    descriptor = open_plain(path, flags)
    if os.fstat(descriptor).st_nlink == 1:
        return descriptor
    os.close(descriptor)
    with open_folder(path.parent) as folder, open(open_plain(path), encoding="utf-8", newline="") as file:
        write_file(folder, path.name, file.read())
    return open_plain(path, flags)


def write_file(folder: int, name: str, text: str, *, mode: int = 0o666) -> None:
    """Write ``text`` to file ``name`` of an open folder atomically: a link of that name is replaced, not followed.

    Args:
        folder: a descriptor from :func:`open_folder`.
        name: the name of the file in the folder.
        text: the whole contents.
        mode: permissions of the file, from which the process's umask is taken.

    Raises:
        CompileError: QN701 if a folder has that name.
    """
    temporary = f".{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(os.open(temporary, flags, mode, dir_fd=folder), "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except IsADirectoryError as error:
        raise _is_a_folder(name) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)


def replace_file(path: Path, text: str) -> None:
    """Write ``text`` to a file as :func:`write_file` does. Its folder is created if it does not exist.

    Raises:
        CompileError: QN701 if a folder has that name, or the file's folder is none.
    """
    with naming(path), open_folder(path.parent) as folder:
        write_file(folder, path.name, text)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of the system name ``path``, which a person gave, and not a temporary file or a name in a folder."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def save_text(path: Path, text: str) -> None:
    """Write ``text`` where a person says: as :func:`replace_file`, but a device or a pipe is written to, not replaced.

    Raises:
        CompileError: QN701 if it is a folder, or its own folder is none.
        OSError: naming the path, if it cannot be written.
    """
    with naming(path):
        if path.is_dir():
            raise _is_a_folder(path)
        if not _is_stream(path):
            replace_file(path, text)
            return
        with path.open("w", encoding="utf-8", newline="") as stream:
            stream.write(text)


def print_text(text: str) -> None:
    r"""Print a line to stdout, unless its reader has gone. Bytes of paths that are no characters become ``\udcff``.

    Raises:
        OSError: if it cannot be written: it is dropped, and the process does not fail at its end.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
    except OSError as error:
        drop_output()
        if not isinstance(error, BrokenPipeError):
            raise


def drop_output() -> None:
    """Let whatever is still to be written to stdout go nowhere."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or replaced
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_stream(path: Path) -> bool:
    """Return whether a path is that of a device, a pipe, or an open descriptor, as ``/dev/stdout`` is of any file."""
    return path.absolute().parts[1:2] in (("dev",), ("proc",)) or (path.exists() and not path.is_file())


def _is_a_folder(path: str | Path) -> CompileError:
    return CompileError("QN701", f"{ascii(str(path))[:300]} is a folder", fix="remove it, or write elsewhere")
