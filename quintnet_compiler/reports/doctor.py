"""What a bug report needs, and whether processes here can talk to each other."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from ..core.code_origin import version_of
from ..core.errors import QuintNetError
from ..runtime.launch.launch import launch
from ..runtime.launch.launchers import Started, started
from ..runtime.launch.smoke import backends, smoke

PACKAGES = (
    "quintnet-compiler", "torch", "transformers", "numpy", "scipy", "networkx", "sympy", "pydantic", "greenlet",
    "typer", "rich", "jinja2", "safetensors",
)  # fmt: skip
SETTINGS = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Health:
    """The result of an examination.

    Attributes:
        interfaces: of the network.
        port: one of loopback that can be listened on, or None.
        compiler: of C++, which inductor needs.
        launcher: the launcher that started this process as one of several, and where they meet.
        talk: None, or why two processes could not add numbers.
    """

    system: str
    python: str
    cores: int
    packages: Mapping[str, str]
    settings: Mapping[str, str]
    devices: tuple[str, ...]
    backends: tuple[str, ...]
    interfaces: tuple[str, ...]
    port: int | None
    compiler: str | None
    launcher: str
    talk: str | None
    talk_seconds: float

    def to_json(self) -> str:
        return json.dumps({"ok": self.talk is None, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        good = f"added numbers in {self.talk_seconds:.1f} s"
        rows = {
            "system": self.system,
            "python": self.python,
            "cores": str(self.cores),
            **{name: version or "not installed" for name, version in self.packages.items()},
            **self.settings,
            "devices": ", ".join(self.devices) or "CPU only",
            "backends": ", ".join(self.backends),
            "interfaces": ", ".join(self.interfaces) or "none",
            "loopback port": f"{self.port} can be used" if self.port else "NONE can be used",
            "C++ compiler": self.compiler or 'none: backend="inductor" cannot compile for CPUs',
            "launcher": self.launcher or "none: this process is alone",
            "processes": good if self.talk is None else f"FAIL: {self.talk}",
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def examine() -> Health:
    """Look around; starts two processes for a moment."""
    begun, world = time.monotonic(), started()
    talk = _talk(2 if world is None else world.size)
    cuda = torch.cuda.is_available()
    return Health(
        platform.platform(),
        platform.python_version(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        {name: version_of(name) for name in PACKAGES},
        {name: os.environ[name] for name in SETTINGS if name in os.environ},
        tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) if cuda else (),
        backends(),
        tuple(name for _, name in socket.if_nameindex()),
        _port(),
        _compiler(),
        _launcher(world),
        talk,
        time.monotonic() - begun,
    )


def _compiler() -> str | None:
    names = os.environ.get("CXX"), "g++", "clang++", "c++"
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _port() -> int | None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])
    except OSError:
        return None


def _launcher(world: Started | None) -> str:
    if world is None:
        return ""
    where = world.meeting()
    met = f"they meet at {where.host}:{where.port}" if where else "it does not say where they meet"
    return f"{world.launcher.name} started {world.size} processes ({world.launcher.size}={world.size}); {met}"


def _talk(ranks: int) -> str | None:
    try:
        results = launch(smoke, ranks, timeout=60)
    except QuintNetError as error:
        return error.message.strip().splitlines()[-1]
    wanted = ranks * (ranks + 1) / 2
    sums = [x for x in results if x is not None]  # under a launcher: this rank's
    return None if sums and all(x == wanted for x in sums) else f"they found {sums} instead of {wanted}"
