"""Saving while training goes on."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch.distributed as dist

from ..runtime.transport.groups import new_group
from .staging import Staging
from .training_state import Destination, Snapshot, write


@dataclass
class SaveThread:
    """One thread that writes snapshots in order, over a process group of its own: steps go on over theirs. All programs
    of a process share it."""

    group: dist.ProcessGroup | None
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "quintnet-save", _step_back))
    last: Future[Path | str] | None = None


@dataclass
class Background:
    """A program's saves. ``staging``: its own, which is freed with it."""

    line: SaveThread
    staging: Staging = field(default_factory=Staging)

    @classmethod
    def make(cls) -> Background:
        """Every rank must call this at the same time."""
        spread = dist.is_initialized() and dist.get_world_size() > 1
        return cls(_thread_of(dist.group.WORLD if spread else None))

    def save(self, found: Snapshot, to: Destination) -> Future[Path | str]:
        """``found`` is copied before this returns, once the save before is on disk: its copy is overwritten."""
        self.wait()
        line = self.line
        line.last = line.thread.submit(write, found.on_host(self.staging.copies), to, line.group)
        return line.last

    def wait(self) -> None:
        """Until no save is under way."""
        if self.line.last is not None:
            self.line.last.exception()  # whoever asked for that one is told by its own future


@lru_cache(maxsize=1)
def _thread_of(world: dist.ProcessGroup | None) -> SaveThread:
    """That of a world; of one before, nothing is kept."""
    return SaveThread(None if world is None else new_group(backend="gloo"))


def _step_back() -> None:
    """Let steps have a core that this thread and those that it starts want, too: Linux gives each thread a niceness of
    its own, and ten times the share to one that has the usual one."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
