"""Whole steps as one CUDA graph beside TorchInductor's segments and generated Python: equality, and time.

python benchmarks/graph_step.py [--seconds 70] [--device cuda] [--small] [--cases equal,sizes,...]

Prints a JSON line for each case; a case that fails says why, and the others go on. ``equal``: losses, gradients and
parameters of ten steps with AdamW, clipping and evaluation between, beside the same program without graphs, as the
largest difference (0.0: the same bits). ``dropout``, ``fp16``, ``sizes``, ``batchnorm``: likewise, of what changes
between steps. The rest are times of a whole iteration (zero_grad, step, fused AdamW) and of ``program.step`` alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import Llama, Size, loss_fn, make_batch
from torch import Tensor, nn

import quintnet

TINY = Size(dim=128, layers=2, heads=4, kv_heads=2, hidden=256, vocab=512, sequence=64)
WIDE = Size(dim=1024, layers=4, heads=16, kv_heads=4, hidden=2816, vocab=8192, sequence=1024)


class Noisy(nn.Module):
    """Linear layers with dropout and, on request, batch statistics."""

    def __init__(self, *, statistics_of_batches: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(64) if statistics_of_batches else nn.LayerNorm(64)
        self.layers = nn.Sequential(nn.Linear(64, 64), norm, nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.layers(x)
        return logits if y is None else nn.functional.cross_entropy(logits, y)


@dataclass
class Setting:
    device: str
    small: bool

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def compile(self, model: nn.Module, batch: Any, backend: str, **options: Any) -> quintnet.CompiledProgram:
        model = copy.deepcopy(model).to(self.device)
        return quintnet.compile(
            model, quintnet.Mesh(dp=1), batch, backend=backend, device=self.device, check="off", **options
        )  # fmt: skip


def rows_of(batch_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(batch_rows, 64, generator=dice), torch.randint(16, (batch_rows,), generator=dice)


def difference(mine: Tensor, other: Tensor) -> float:
    """0 for the same bits, else the largest difference; infinite where only one is not a number."""
    if torch.allclose(mine, other, rtol=0, atol=0, equal_nan=True):
        return 0.0
    gap = (mine.double() - other.double()).abs().max()
    return float("inf") if gap.isnan() else float(gap)


def compare(
    setting: Setting,
    model: nn.Module,
    batches: list[Any],
    evaluated: Callable[[Any], Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train the same program with a graph and without."""
    programs = [setting.compile(model, batches[0], backend, **options) for backend in ("graph", "inductor")]
    optimizers = [torch.optim.AdamW(p.parameters(), lr=1e-3) for p in programs]
    worst = {"loss": 0.0, "gradient": 0.0, "output": 0.0, "state": 0.0}
    losses, identities = [], set()
    for batch in batches:
        both = [p.step(batch).detach().clone() for p in programs]
        losses.append(float(both[0]))
        worst["loss"] = max(worst["loss"], difference(*both))
        for mine, other in zip(programs[0].parameters(), programs[1].parameters(), strict=True):
            if mine.grad is not None and other.grad is not None:
                worst["gradient"] = max(worst["gradient"], difference(mine.grad, other.grad))
        identities.add(next(id(p.grad) for p in programs[0].parameters()))
        if evaluated is not None:
            outputs = [p(evaluated(batch)) for p in programs]
            worst["output"] = max(worst["output"], difference(*outputs))
        for program, optimizer in zip(programs, optimizers, strict=True):
            program.clip_grad_norm(1.0)
            optimizer.step()
            program.zero_grad()
    states = [p.state_dict() for p in programs]
    worst["state"] = max(difference(states[0][name], states[1][name]) for name in states[0])
    return {"differences": worst, "losses": losses, "gradient objects": len(identities)}


def equal(setting: Setting) -> dict[str, Any]:
    batches = [make_batch(TINY, 4, index) for index in range(10)]
    torch.manual_seed(0)
    return compare(setting, Llama(TINY), batches, lambda batch: batch[0], loss_fn=loss_fn, precision="bf16")


def dropout(setting: Setting) -> dict[str, Any]:
    torch.manual_seed(0)
    batches = [rows_of(32, 0)] * 10  # so that losses differ by their masks
    row = compare(setting, Noisy(statistics_of_batches=False), batches, microbatches=2)
    return row | {"different losses": len(set(row["losses"]))}


def batchnorm(setting: Setting) -> dict[str, Any]:
    torch.manual_seed(0)
    batches = [rows_of(32, seed) for seed in range(10)]
    return compare(setting, Noisy(statistics_of_batches=True), batches, lambda batch: batch[0])


def fp16(setting: Setting) -> dict[str, Any]:
    torch.manual_seed(0)
    batches = [(x * (300 if seed in (0, 5) else 1), y) for seed, (x, y) in enumerate(rows_of(32, s) for s in range(12))]
    return compare(setting, Noisy(statistics_of_batches=False), batches, microbatches=2, precision="fp16")


def sizes(setting: Setting) -> dict[str, Any]:
    torch.manual_seed(0)
    rows = [32, 32, 32, 24, 32, 24, 24, 16, 24, 32, 16, 16, 32]
    batches = [rows_of(count, seed) for seed, count in enumerate(rows)]
    return compare(setting, Noisy(statistics_of_batches=True), batches)


def timed(setting: Setting, size: Size, rows: int, **options: Any) -> dict[str, Any]:
    """Milliseconds of each backend, and of the module under autocast."""
    size, rows = (TINY, 4) if setting.small else (size, rows)
    torch.manual_seed(0)
    model = Llama(size)
    batch = tuple(x.to(setting.device) for x in make_batch(size, rows, 0))
    row: dict[str, Any] = {}
    for backend in ("eager", "inductor", "graph"):
        begun = time.perf_counter()
        program = setting.compile(model, batch, backend, loss_fn=loss_fn, precision="bf16", **options)
        optimizer = torch.optim.AdamW(program.parameters(), lr=1e-5, fused=setting.device == "cuda")
        for _ in range(4):
            iterate(program, optimizer, batch)
        setting.wait()
        build_seconds = time.perf_counter() - begun
        if setting.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row[backend] = {
            "iteration": median(setting, lambda p=program, o=optimizer: iterate(p, o, batch)),
            "step": median(setting, lambda p=program: only_step(p, batch)),
            "build, s": build_seconds,
        }
        if setting.device == "cuda":
            row[backend]["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
            row[backend]["reserved GiB"] = torch.cuda.memory_reserved() / 2**30
        row[backend]["loss"] = float(program.step(batch))
        program.close()
        del program, optimizer
        if setting.device == "cuda":
            torch.cuda.empty_cache()
    return row


def iterate(program: quintnet.CompiledProgram, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    program.zero_grad()
    program.step(batch)
    optimizer.step()


def only_step(program: quintnet.CompiledProgram, batch: Any) -> None:
    program.zero_grad()
    program.step(batch)


def median(setting: Setting, work: Callable[[], object], times: int = 12) -> float:
    seconds = []
    for _ in range(2 if setting.small else times):
        setting.wait()
        begun = time.perf_counter()
        work()
        setting.wait()
        seconds.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(seconds)


def time_of_one(setting: Setting) -> dict[str, Any]:
    return timed(setting, WIDE, 4)


def time_of_four(setting: Setting) -> dict[str, Any]:
    return timed(setting, WIDE, 4, microbatches=4)


def time_unchecked(setting: Setting) -> dict[str, Any]:
    return timed(setting, WIDE, 4, check_finite=False)


CASES: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "equal": equal,
    "time_of_one": time_of_one,
    "time_of_four": time_of_four,
    "dropout": dropout,
    "fp16": fp16,
    "sizes": sizes,
    "batchnorm": batchnorm,
    "time_unchecked": time_unchecked,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=70, help="no case begins after that many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script on a CPU")
    parser.add_argument("--cases", default=",".join(CASES))
    args = parser.parse_args()
    setting, begun = Setting(args.device, args.small), time.perf_counter()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(json.dumps({"device": name, "torch": torch.__version__}), flush=True)
    for case in args.cases.split(","):
        if time.perf_counter() - begun > args.seconds:
            print(json.dumps({"case": case, "skipped": "no time is left"}), flush=True)
            continue
        start, row = time.perf_counter(), {"case": case}
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", quintnet.BackendWarning)
            try:
                row |= CASES[case](setting)
            except Exception as error:  # the other cases go on
                row |= {"error": f"{type(error).__name__}: {error}"[:600]}
                row |= {"at": "".join(traceback.format_tb(error.__traceback__)[-3:])[-900:]}
        texts = [str(w.message)[:300] for w in warned if issubclass(w.category, quintnet.BackendWarning)]
        row |= {"warnings": list(dict.fromkeys(texts)), "seconds": time.perf_counter() - start}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
