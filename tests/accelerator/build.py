"""Builds the emulated accelerator's extension, once for each state of its sources."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch.utils.cpp_extension import get_default_build_root, load

# with what is installed beside this Python, whose environment may not be activated
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
SOURCES = Path(__file__).parent / "csrc"
NAME = "quintnet_emulated_accelerator"


def missing() -> str | None:
    """Why the extension cannot be built here, if it cannot."""
    return next((f"there is no {tool}" for tool in ("c++", "ninja") if shutil.which(tool, path=PATH) is None), None)


def built() -> ModuleType:
    """The extension. Compiling takes about 20 seconds; the result is kept where torch keeps extensions."""
    library = _folder() / f"{NAME}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, and the others wait for it
        if not library.exists():
            _compile(library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _folder() -> Path:
    text = hashlib.sha256(torch.__version__.encode())
    for path in sorted(SOURCES.iterdir()):
        text.update(path.name.encode() + path.read_bytes())
    return Path(get_default_build_root()) / f"{NAME}-{text.hexdigest()[:16]}"


def _compile(library: Path) -> None:
    """Compile elsewhere and move the result here whole, so that an interrupted build leaves no half."""
    with tempfile.TemporaryDirectory(dir=library.parent) as made, mock.patch.dict(os.environ, PATH=PATH):
        load(
            NAME,
            [str(SOURCES / "extension.cpp")],
            extra_cflags=["-O0", "-w"],
            build_directory=made,
            is_python_module=False,
        )
        os.replace(Path(made) / library.name, library)
