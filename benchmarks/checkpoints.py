"""Checkpoints beside torch.distributed.checkpoint: the time of save and load, and what an asynchronous save costs.

python benchmarks/checkpoints.py [--mib 1024] [--ranks 1|2] [--repeats 9] [--loads 3] [--folder DIR] [--json]

Both save and load the same tensors, parameters and AdamW's moments of a stack of linear layers, in turns in one
process (or one per rank, which share the state by ZeRO 3). Ours writes safetensors with the hash of every piece, and
loading compares them all before it changes anything; torch's writes pickled tensors and compares nothing. Both
``fsync`` every file. Nothing is removed, and nothing is dirty in the page cache, while the time is taken.

- ``save``: seconds.
- ``load``: of files that are in the page cache, as after a restart on the same machine.
- ``load from disk``: the kernel was told to drop them (``posix_fadvise``).
- ``... CPU``: processors' seconds of the same, of all ranks together, which other work on the machine hardly changes.
- ``stall``: ``save_async`` beside steps (forward, backward, AdamW): how long it holds the caller, and how much longer
  the steps take until it has ended than as many steps before it, over the time of ``save``.

Each turn saves both, and then loads both ``--loads`` times, ours and theirs one after the other. Each line: medians,
the quartiles of the ratio of each pair, and the least of either, which is nearest to what the work takes on a machine
that others use.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

import quintnet

WIDTH, ROWS = 1024, 16


@dataclass(frozen=True)
class Line:
    """``ours`` and ``theirs``: seconds, medians; ``quartiles``: of the ratio; ``least``: of ours and of theirs."""

    what: str
    ours: float
    theirs: float
    quartiles: tuple[float, float, float]
    least: tuple[float, float]

    @classmethod
    def of(cls, what: str, ours: list[float], theirs: list[float]) -> Line:
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        if len(ratios) == 1:  # of which there are no quartiles
            ratios = ratios * 2
        first, middle, last = statistics.quantiles(ratios, n=4, method="inclusive")
        least = min(ours), min(theirs)
        return cls(what, statistics.median(ours), statistics.median(theirs), (first, middle, last), least)

    def __str__(self) -> str:
        first, middle, last = self.quartiles
        medians = f"{self.what:18} {self.ours:8.3f} s {self.theirs:8.3f} s   {middle:6.3f} ({first:.3f} to {last:.3f})"
        return f"{medians:60} {self.least[0]:8.3f} s {self.least[1]:8.3f} s"


class Subject:
    """A program of about ``mib`` MiB of state, and the same tensors for torch.distributed.checkpoint."""

    def __init__(self, mib: float) -> None:
        torch.manual_seed(0)
        layers = max(1, round(mib * 2**20 / 12 / (WIDTH * (WIDTH + 1))))
        self.batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        mesh = quintnet.Mesh(dp=_world())
        self.program = quintnet.compile(model, mesh, self.batch, loss_fn=F.mse_loss, zero=3 if _world() > 1 else 0)
        self.optimizer = torch.optim.AdamW(self.program.parameters(), fused=True)
        self.step()
        self.bytes = sum(x.numel() * x.element_size() for x in self.tensors().values())

    def step(self) -> None:
        self.program.step(self.batch)
        self.optimizer.step()
        self.program.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """What is saved, as it lies now: loading gives the optimizer other tensors."""
        found = {}
        for name, p in self.program.named_parameters():
            found[f"model/{name}"] = p.detach()
            found |= {f"optimizer/{name}/{key}": x for key, x in self.optimizer.state[p].items()}
        return found

    def sums(self) -> dict[str, float]:
        return {name: float(local(x).double().sum()) for name, x in self.tensors().items()}


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def timed(work: Callable[[], object]) -> float:
    return timed_twice(work)[0]


def timed_twice(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and processors' seconds of all ranks."""
    _together()
    start, cpu = time.perf_counter(), time.process_time()
    work()
    cpu = time.process_time() - cpu
    _together()
    seconds = time.perf_counter() - start
    return seconds, _sum(cpu)


def measure(mib: float, repeats: int, loads: int, folder: Path) -> dict[str, Any]:
    """Every line, and the state's size in bytes (over all ranks)."""
    subject = Subject(mib)
    times: dict[str, dict[str, list[float]]] = {}
    stalls: list[dict[str, float]] = []
    counts = False

    def put(what: str, who: str, work: Callable[[], object]) -> None:
        for name, seconds in zip((what, f"{what} CPU"), timed_twice(work), strict=True):
            if counts:
                times.setdefault(name, {}).setdefault(who, []).append(seconds)

    for turn in range(repeats + 1):
        counts = turn > 0  # the first is not counted
        both = _both(subject, folder / str(turn))
        for who, (save, _) in both.items():
            _settle()
            put("save", who, save)
        _settle()
        before = subject.sums()
        for what in ("load", "load from disk"):
            for number in range(loads if counts else 1):
                for who, (_, load) in both.items():
                    if what == "load from disk":
                        _drop(folder / str(turn) / who)
                    put(what, who, load)
                    assert number or before == subject.sums()
        for who in both:
            _remove(folder / str(turn) / who)
        stall = _stall(subject, folder / str(turn) / "later")
        if counts:
            stalls.append(stall)
    lines = [Line.of(what, found["ours"], found["theirs"]) for what, found in times.items()]
    saves = times["save"]["ours"]
    held, slower = ([stall[key] for stall in stalls] for key in ("held", "slower"))
    both_stalls = [a + b for a, b in zip(held, slower, strict=True)]
    stall_lines = [
        Line.of(what, x, saves) for what, x in {"held": held, "slower": slower, "stall": both_stalls}.items()
    ]
    return {"bytes": subject.bytes, "ranks": _world(), "lines": [asdict(line) for line in lines + stall_lines]}


def _both(subject: Subject, folder: Path) -> Mapping[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Who, with what saves and what loads; in another order each time."""
    ours, theirs = folder / "ours", folder / "theirs"
    program, optimizer = subject.program, subject.optimizer

    def load_theirs() -> None:
        dcp_load(subject.tensors(), checkpoint_id=theirs, no_dist=_world() == 1)

    found: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "ours": (
            lambda: program.save(ours, step=1, optimizer=optimizer),
            lambda: program.load(ours, optimizer=optimizer),
        ),
        "theirs": (
            lambda: dcp_save(subject.tensors(), checkpoint_id=theirs, no_dist=_world() == 1),
            load_theirs,
        ),
    }
    return found if int(folder.name) % 2 else dict(reversed(found.items()))


def _stall(subject: Subject, folder: Path) -> dict[str, float]:
    _settle()
    usual = [timed(subject.step) for _ in range(4)]
    _together()
    start = time.perf_counter()
    later = subject.program.save_async(folder, step=1, optimizer=subject.optimizer)
    held = time.perf_counter() - start
    during = []
    while not _all(later.done()):
        during.append(timed(subject.step))
    later.result()
    usual += [timed(subject.step) for _ in range(4)]
    _remove(folder)
    return {"held": held, "slower": sum(during) - len(during) * statistics.median(usual)}


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _together() -> None:
    if _world() > 1:
        dist.barrier()


def _all(here: bool) -> bool:
    if _world() > 1:
        found = torch.tensor(int(here))
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return bool(found)
    return here


def _sum(here: float) -> float:
    if _world() > 1:
        total = torch.tensor(here, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)
    return here


def _first() -> bool:
    return _world() == 1 or dist.get_rank() == 0


def _settle() -> None:
    if _first():
        os.sync()
    _together()


def _drop(folder: Path) -> None:
    if _first():
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    _together()


def _remove(folder: Path) -> None:
    _together()
    if _first():
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=1024, help="of state, in all")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--loads", type=int, default=3, help="of each, in a turn")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default where temporary files are")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        if options.ranks == 1:
            results = measure(options.mib, options.repeats, options.loads, Path(name))
        else:
            arguments = options.mib, options.repeats, options.loads, Path(name)
            results = quintnet.launch(measure, options.ranks, arguments, timeout=3600)[0]
    if options.json:
        print(json.dumps(results))
        return
    size = f"{results['bytes'] / 2**20:.0f} MiB, {results['ranks']} processes"
    print(f"{size}, {options.repeats} turns of {options.loads} loads, torch {torch.__version__}")
    print(f"{'':18} {'quintnet':>10} {'torch':>10}   {'ratio (quartiles)':24} {'least':>7}")
    for line in results["lines"]:
        if line["what"] == "held":
            print(f"{'save_async':18} {'quintnet':>10} {'its save':>10}   ratio (quartiles)")
        print(Line(**line))


if __name__ == "__main__":
    main()
