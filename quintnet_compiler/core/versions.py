"""Versions of what is installed."""

from __future__ import annotations

import importlib.metadata


def version_of(package: str) -> str:
    """Return the version of a package; empty if it is not installed (a checkout on the path is not)."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
