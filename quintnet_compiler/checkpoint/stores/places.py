"""Which folder of checkpoints a path or URL is."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from ...core.errors import CheckpointError
from ...weights.files import shown
from ..folder import CheckpointFolder
from .disk_folder import DiskFolder


def folder_at(place: str | Path) -> CheckpointFolder:
    """A path, or a URL of a store that fsspec knows (``s3://bucket/run``, ``gs://``, ``memory://``). ``file://`` is a
    path. Options of a store (keys, an endpoint) are fsspec's: its configuration files and environment variables.

    Raises:
        CheckpointError: QN603 if the package for this kind of store is not installed, or there is none.
    """
    if isinstance(place, Path) or "://" not in place:
        return DiskFolder(Path(place))
    if place.startswith("file://"):
        return DiskFolder(Path(unquote(urlsplit(place).path)))
    from fsspec.core import url_to_fs

    from .object_folder import ObjectFolder

    try:
        store, root = url_to_fs(place.rstrip("/"), use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            "QN603",
            f"{shown(place)}: {shown(str(error))}",
            fix="pip install the package that it names (s3fs for s3://)",
        ) from None
    return ObjectFolder(store, root)
