"""What a step pays to be announced to the ranks of its machine, the comparison of its batch's structure included.
``python benchmarks/announced_calls.py``"""

from __future__ import annotations

import tempfile
import timeit
from pathlib import Path

import torch
from torch.distributed import HashStore

from quintnet_compiler.runtime.launch.board import Board
from quintnet_compiler.runtime.launch.calls import running
from quintnet_compiler.runtime.launch.heartbeat import VERDICT, Heartbeat
from quintnet_compiler.runtime.launch.rank_status import described

REPEATS, CALLS = 2000, 100


def measured(ranks: int) -> float:
    """Seconds of one announced call that does nothing."""
    store = HashStore()
    store.set(VERDICT, "")
    for rank in range(ranks):
        store.set(str(rank), "{}")
    batch = torch.zeros(8, 16), torch.zeros(8, dtype=torch.long)
    described_batches = {("train", False): described(batch)}  # as in the step before
    with tempfile.TemporaryDirectory() as folder, Heartbeat(lambda: store, 0, ranks, Path(folder), 1.0) as pulse:
        others = [Board(Path(folder), rank, ranks) for rank in range(1, ranks)]
        for other in others:
            other.enter(1, "step", 0)

        def step() -> None:
            with running(described_batches, 0, "train", False, lambda: batch):
                pass

        seconds = min(timeit.repeat(step, number=CALLS, repeat=REPEATS)) / CALLS
        assert pulse.now.number == REPEATS * CALLS
        return seconds


def main() -> None:
    for ranks in (2, 8, 64):
        print(f"{ranks} ranks on this machine: {measured(ranks) * 1e6:.1f} us")


if __name__ == "__main__":
    main()
