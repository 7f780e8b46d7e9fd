"""Installed code: the folders of what is not the user's (this package, torch, the standard library), and versions."""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path

import torch

PACKAGE = str(Path(__file__).parents[1])
TORCH = str(Path(torch.__file__).parent)
STDLIB = sysconfig.get_path("stdlib")


def version_of(package: str) -> str:
    """Return the version of a package; empty if it is not installed (a checkout on the path is not)."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
