"""What a compiled program depends on, as a key: equal keys, equal programs.

Nothing is guessed about the user's code. The module is traced in every process, and the key has the trace, as
:func:`.captured_text.captured_text` writes it. What is compiled of a trace depends on the plan, the versions and the
settings that are in the key, too; where something else may decide, there is no key.
"""

from __future__ import annotations

import hashlib
import importlib
import platform
import sys
from pathlib import Path

import torch

from ..compat.torch_settings import active_modes, files_of_kernels, root_of_build, settings_of_torch
from ..core.code_origin import PACKAGE, TORCH, version_of
from ..ir.program import Captured
from ..ops.rules.table import RULES
from .captured_text import NotCacheable, captured_text
from .compiler import Compiled
from .pipeline import Request

FORMAT = 1
_LIBRARIES = ("numpy", "scipy", "networkx", "sympy", "pydantic")  # with which passes decide
_FOR_OTHERS = tuple(f"{TORCH}/{name}" for name in ("library.py", "_library/", "_custom_op"))  # what registers for them
_PACKAGES = ("quintnet_compiler", "quintnet_compiler.passes", "quintnet_compiler.cost_models")


def key_of(captured: Captured, request: Request, *, training: bool, primary: Compiled | None = None) -> str:
    """Return the key of the program that is compiled of ``captured`` for ``request``.

    ``primary``: the program that decides where parameters live, if it is another one.

    Raises:
        NotCacheable: if the result may depend on something that is not in a key.
    """
    similar = request.known
    if similar is not None and not similar.key:
        raise NotCacheable("it reuses another program's decisions, and that program has no cache key")
    if request.fused:
        raise NotCacheable('backend="inductor" reads its graphs')
    custom = [op for op, rule in request.rules.items() if RULES.get(op) is not rule]
    if custom:
        raise NotCacheable(f"the sharding rule of {custom[0]} is the caller's")
    leader = "" if primary is None else repr((primary.program.digest, primary.plan.to_json(), primary.stages))
    asked = (
        request.mesh, request.batch_size, request.device.type, request.absent, sorted(request.lengths.items()),
        sorted((name, axis, str(kind)) for (name, axis), kind in request.held.items()), training,
    )  # fmt: skip
    similar_key = "" if similar is None else similar.key
    parts = [captured_text(captured), request.plan.to_json(), repr(asked), leader, similar_key, *_here(request.device)]
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogatepass")
        whole.update(len(data).to_bytes(8, "big") + data)
    return whole.hexdigest()


def _here(device: torch.device) -> list[str]:
    """This process: versions, settings, the kind of device."""
    if device.type not in ("cpu", "cuda"):
        raise NotCacheable(f"a library has kernels of its own for devices of type {device.type}")
    if modes := active_modes():
        raise NotCacheable(f"a {modes[0]} is active, which sees operators while they are compiled")
    for file in sorted(files_of_kernels()):
        if not file.startswith((root_of_build(), TORCH, PACKAGE)) or file.startswith(_FOR_OTHERS):
            raise NotCacheable(f"a library has kernels of its own for PyTorch's operators, registered by {file}")
    versions = [str(FORMAT), sys.version, platform.machine(), *(f"{name} {version_of(name)}" for name in _LIBRARIES)]
    return [sources_digest(), *versions, *settings_of_torch(), _kind(device)]


def _kind(device: torch.device) -> str:
    """Return the kind of a device, whichever of that kind it is."""
    present = device.type != "cpu" and torch.get_device_module(device.type).is_available()
    if present and device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    return f"{device.type} {present} {torch.cuda.is_available()}"


def _files() -> list[Path]:
    roots = {Path(importlib.import_module(name).__path__[0]).resolve() for name in _PACKAGES}
    return sorted({path for root in roots for path in root.rglob("*.py")})


def _stamps() -> list[tuple[str, int, int]]:
    files = [(path, path.stat()) for path in _files()]
    return [(str(path), status.st_size, status.st_mtime_ns) for path, status in files]


_AT_IMPORT = _stamps()


def sources_digest() -> str:
    """SHA-256 of this package's own files.

    Raises:
        NotCacheable: if they are not as they were when this process read them.
    """
    if _stamps() != _AT_IMPORT:
        raise NotCacheable("files of QuintNet were changed since this process started")
    whole = hashlib.sha256()
    for path in _files():
        data = path.read_bytes()
        whole.update(f"{path.name} {len(data)} ".encode() + data)
    return whole.hexdigest()
