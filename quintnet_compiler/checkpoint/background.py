"""Saving while training goes on."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from .staging import Staging
from .training_state import Destination, Snapshot, write


@dataclass
class Background:
    """One thread that writes snapshots in order, over a process group of its own: steps go on over theirs."""

    group: dist.ProcessGroup | None = None
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "quintnet-save", _step_back))
    last: Future[Path] | None = None
    staging: Staging = field(default_factory=Staging)

    @classmethod
    def make(cls) -> Background:
        """Every rank must call this at the same time."""
        spread = dist.is_initialized() and dist.get_world_size() > 1
        return cls(dist.new_group(backend="gloo") if spread else None)

    def save(self, found: Snapshot, to: Destination) -> Future[Path]:
        """``found`` is copied before this returns, once the save before is on disk: its copy is overwritten."""
        self.wait()
        self.last = self.thread.submit(write, found.on_host(self.staging.copies), to, self.group)
        return self.last

    def wait(self) -> None:
        """Until no save is under way."""
        if self.last is not None:
            self.last.exception()  # whoever asked for that one is told by its own future


def _step_back() -> None:
    """Let steps have a core that this thread and those that it starts want, too: Linux gives each thread a niceness of
    its own, and ten times the share to one that has the usual one."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
