"""Several ranks of NCCL on one device, each a process: its collectives, layouts, faults and checkpoints.

NCCL lets ranks share a device from 2.30 on, if ``NCCL_MULTI_RANK_GPU_ENABLE`` is set. PyTorch's own NCCL may be older:
``--library`` names another one, which is loaded in its place. Bandwidth, overlap, NVLink and several nodes cannot be
seen so.
"""

from __future__ import annotations

import ctypes
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from .entries import Check, Entry, NotRun
from .rank_processes import Ended, Launcher
from .setting import Setting

WHAT = "several ranks of NCCL on one device"
LAST = r"ranks? 1\b"  # how errors name the last of two
FIRST = (2, 30)  # NCCL's version that lets ranks share a device
SECONDS = 225.0  # less than the part's limit: what does not begin in time is told of
SHORT, LONG = 50.0, 110.0  # limits of one work
SIZES = (2, 4, 8)
ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": "1",  # kernels of all ranks fit on the device at once
        "NCCL_BUFFSIZE": str(2**20),
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_CUMEM_HOST_ENABLE": "0",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
    }
)
# how values may travel, what is most like many GPUs first
WAYS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "peer to peer (cuMem)": {"NCCL_P2P_LEVEL": "SYS"},
        "peer to peer (IPC)": {"NCCL_P2P_LEVEL": "SYS", "NCCL_CUMEM_ENABLE": "0"},
        "host memory": {"NCCL_P2P_DISABLE": "1"},
        "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
    }
)


@dataclass(frozen=True)
class Fault:
    """A fault of the last of two ranks.

    Attributes:
        what: the fault, as the report names it.
        code: a pattern of the error ids that may end rank 0.
        own_code: the error id that the last rank raises itself; "" if it raises none.
    """

    what: str
    code: str
    own_code: str = ""


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "other": Fault("a batch of other rows on one rank", r"QN102|QN302", "QN102"),
        "ends": Fault("a rank ends", r"QN302|QN402"),
        "away": Fault("a rank does not come", r"QN402"),
    }
)


def run(setting: Setting) -> Iterator[Entry]:
    why = reason_not_to_run(setting)
    if why:
        yield NotRun(WHAT, why)
        return
    library = {} if setting.library is None else {"LD_PRELOAD": str(setting.library.absolute())}
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(str(setting.device), {**ENVIRONMENT, **library}, Path(folder))
        yield from several_ranks(launcher, WAYS, SIZES, SECONDS)


def reason_not_to_run(setting: Setting) -> str:
    """Return why ranks of NCCL cannot share this device; "" if they can."""
    if not setting.cuda:
        return "it takes a CUDA device"
    version = torch.cuda.nccl.version() if setting.library is None else version_of(setting.library)
    if version[:2] < FIRST:
        name = ".".join(map(str, version))
        return f"NCCL {name} has one rank for each device; 2.30 and later have more: --library names one"
    return ""


def version_of(library: Path) -> tuple[int, ...]:
    """Return the version of an NCCL library: (2, 32, 3)."""
    number = ctypes.c_int()
    ctypes.CDLL(str(library)).ncclGetVersion(ctypes.byref(number))
    major, rest = divmod(number.value, 10000)
    return major, rest // 100, rest % 100


def several_ranks(
    launcher: Launcher,
    ways: Mapping[str, Mapping[str, str]],
    sizes: Sequence[int],
    seconds: float,
    layouts: str = "layouts",
) -> Iterator[Entry]:
    """Everything that ranks can show on one device, for ``seconds`` at most; ``layouts``: a work of
    :mod:`.rank_work`."""
    until = time.monotonic() + seconds
    for name, environment in ways.items():
        found = replace(launcher, environment={**launcher.environment, **environment})
        ended = found.run("collectives", 2, SHORT)
        good = all(check.good for check in ended.merged)
        if good:
            yield Check("values travel between ranks", good, f"{name}; {_said(ended)}")
            break
    yield from ended.merged
    if not good:
        return
    for size in sizes:
        yield from _checks(found, layouts, size, LONG, until)
    yield from _checks(found, "errors", 2, SHORT, until)
    yield from _checks(found, "files", 2, SHORT, until)
    for work in FAULTS:
        yield from _fault(found, work, until)


def _checks(launcher: Launcher, work: str, size: int, limit: float, until: float) -> Iterator[Entry]:
    left = until - time.monotonic()
    if left < limit / 5:
        yield NotRun(f"{work}, {size} ranks", "no time was left")
        return
    yield from launcher.run(work, size, min(limit, left)).merged


def _fault(launcher: Launcher, work: str, until: float) -> Iterator[Entry]:
    """Rank 0 must be ended with an error that names the other one, which says what is its own."""
    fault = FAULTS[work]
    left = until - time.monotonic()
    if left < SHORT / 2:
        yield NotRun(fault.what, "no time was left")
        return
    ended = launcher.run(work, 2, min(SHORT, left), awaited=[0])
    lines = [line.strip() for line in ended.texts[0].splitlines() if re.search(rf"{fault.code}|{LAST}", line)]
    names_it = all(re.search(pattern, " ".join(lines)) for pattern in (fault.code, LAST))
    good = bool(ended.codes[0]) and names_it and fault.own_code in ended.texts[-1]
    yield Check(fault.what, good, f"{ended.seconds:.1f} s; {' '.join(lines)}"[:600])


def _said(ended: Ended) -> str:
    """Return what NCCL says of its version, and of how ranks reach each other."""
    text = "".join(ended.texts)
    versions, ways = re.findall(r"NCCL version (\S+)", text), re.findall(r"via ((?:P2P|SHM|NET)\S*)", text)
    return ", ".join(sorted({*versions, *ways})) or "NCCL says nothing"
