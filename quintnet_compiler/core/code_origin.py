"""Folders of code that is not the user's: this package, torch, and Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

PACKAGE = str(Path(__file__).parents[1])
TORCH = str(Path(torch.__file__).parent)
STDLIB = sysconfig.get_path("stdlib")
