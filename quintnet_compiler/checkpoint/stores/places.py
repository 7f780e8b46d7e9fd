"""Which folder of checkpoints a path or URL is."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ...core.errors import CheckpointError
from ...core.files import path_of
from ...weights.files import shown
from ..folder import CheckpointFolder
from .disk_folder import DiskFolder


def folder_at(place: str | os.PathLike[str], code: str = "QN603") -> CheckpointFolder:
    """Return the folder at a path, or at a URL of a store that fsspec knows (``s3://bucket/run``, ``gs://``).

    A relative path is that of the working directory now: a save in the background ends later. ``file://`` is a path.
    Options of a store (keys, an endpoint) are fsspec's: its configuration files and environment variables.

    Args:
        place: the path or URL.
        code: of errors.

    Raises:
        CheckpointError: if this is no path, the package for this kind of store is not installed, or there is no such
            place.
    """
    if not isinstance(place, str) or "://" not in place:
        return DiskFolder(_absolute(path_of(place, code, CheckpointError), code))
    if place.startswith("file://"):
        return DiskFolder(_path_of_url(place, code))
    from fsspec.core import url_to_fs

    from .object_folder import ObjectFolder

    try:
        store, root = url_to_fs(place.rstrip("/"), use_listings_cache=False)
    except (ImportError, ValueError) as error:
        text = f"{shown(place)}: {shown(str(error))}"
        raise CheckpointError(code, text, fix="pip install the package that it names (s3fs for s3://)") from None
    return ObjectFolder(store, root)


def _absolute(path: Path, code: str) -> Path:
    """Return a path that does not depend on the working directory; ``..`` and links stay."""
    try:
        return path.absolute()
    except OSError as error:
        text = f"{shown(str(path))} is in the working directory, which is not there any more: {shown(str(error))}"
        raise CheckpointError(code, text, fix="give an absolute path") from None


def _path_of_url(url: str, code: str) -> Path:
    """Return the path that a ``file://`` URL names."""
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or not path.is_absolute():
        raise CheckpointError(code, f"{shown(url)} names no folder of this host", fix="give a path, or file:///path")
    return path
