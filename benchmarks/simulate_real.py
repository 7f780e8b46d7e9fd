"""Simulated against measured steps on this machine: calibrated CPU, gloo, 2 and 4 processes.

    python benchmarks/simulate_real.py [--json] [--rounds 2] [--save machine.json] [--alone]

Calibration and measurement take turns, so that both see what else the machine does; every process has one thread.
Where there are more processes than cores, the calibration says how many cores they share. Run it on a quiet machine,
or, as root on Linux, with --alone: while something is measured, the processes have real-time priority, and what else
runs waits; between two steps it goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.cost_models.calibrated import CalibratedCosts
from quintnet_compiler.cost_models.calibration import Calibration, MeasuredCollective, MeasuredMatmul, Point
from quintnet_compiler.reports.calibrate import CalibrationEffort, calibrate, run_alone

WARMUP, STEPS = 2, 5


class MLP(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        q, k, v = (f(y).unflatten(-1, (8, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, vocab: int = 1024, length: int = 128) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


@dataclass(frozen=True)
class Config:
    """A model and how it is run."""

    model: str
    width: int
    depth: int
    rows: int
    mesh: tuple[tuple[str, int], ...]
    microbatches: int = 1
    schedule: str = "1f1b"
    more: tuple[tuple[str, Any], ...] = ()  # options of compile

    def __str__(self) -> str:
        mesh = " ".join(f"{axis}{size}" for axis, size in self.mesh)
        more = " ".join(f"{name}={value}" for name, value in self.more)
        return f"{self.model} {self.width}x{self.depth} {mesh} mb{self.microbatches} {self.schedule} {more}".rstrip()

    @property
    def ranks(self) -> int:
        return quintnet.Mesh(**dict(self.mesh)).size

    def compile(self) -> tuple[Any, Any]:
        torch.manual_seed(0)
        if self.model == "mlp":
            model: nn.Module = MLP(self.width, self.depth)
            batch = torch.randn(self.rows, self.width), torch.randn(self.rows, self.width)
            loss: Any = F.mse_loss
        else:
            model = GPT(self.width, self.depth)
            batch = torch.randint(0, 1024, (self.rows, 128)), torch.randint(0, 1024, (self.rows, 128))
            loss = token_loss
        mesh = quintnet.Mesh(**dict(self.mesh))
        options = {"microbatches": self.microbatches, "schedule": self.schedule, **dict(self.more)}
        return quintnet.compile(model, mesh, batch, loss_fn=loss, **options), batch


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels.flatten())


def _mesh(**axes: int) -> tuple[tuple[str, int], ...]:
    return tuple(axes.items())


CONFIGS = (
    Config("mlp", 512, 4, 512, _mesh(dp=2)),
    Config("mlp", 512, 4, 1024, _mesh(tp=2)),
    Config("mlp", 384, 6, 1024, _mesh(pp=2), 4),
    Config("gpt", 256, 4, 8, _mesh(dp=2)),
    Config("gpt", 256, 4, 8, _mesh(tp=2)),
    Config("gpt", 256, 4, 16, _mesh(pp=2), 4),
    Config("gpt", 384, 4, 16, _mesh(pp=2), 8),
    Config("gpt", 256, 4, 16, _mesh(pp=2), 4, "gpipe"),
    Config("mlp", 512, 4, 1024, _mesh(dp=4)),
    Config("mlp", 512, 4, 1024, _mesh(dp=2, tp=2)),
    Config("gpt", 256, 4, 16, _mesh(pp=2, dp=2), 4),
    Config("gpt", 256, 4, 16, _mesh(pp=2, tp=2), 4),
    Config("gpt", 256, 4, 16, _mesh(pp=4), 8),
    Config("gpt", 384, 4, 16, _mesh(dp=2, tp=2)),
    Config("mlp", 512, 4, 512, _mesh(dp=2), more=(("zero", 1),)),
    Config("gpt", 256, 4, 8, _mesh(dp=2), more=(("zero", 2),)),
    Config("gpt", 256, 4, 8, _mesh(dp=2), more=(("zero", 3),)),
    Config("gpt", 256, 4, 8, _mesh(dp=2), more=(("recompute", "full"),)),
    Config("gpt", 256, 4, 8, _mesh(cp=2)),
    Config("gpt", 256, 4, 16, _mesh(pp=2), 4, "zb-h1"),
    Config("gpt", 256, 4, 16, _mesh(pp=2), 4, "interleaved", (("virtual_stages", 2),)),
)


SIDE = 512  # of the product that tells whether the machine is as fast as it was


def measure(configs: tuple[Config, ...], alone: bool = False) -> list[float]:
    """On each process: the median step of each configuration, in seconds. Steps of all take turns, and last in turn is
    a matrix product that the calibration has measured too. ``alone``: what else the machine does waits meanwhile."""

    def begin() -> float:
        dist.barrier()
        if alone:
            run_alone()
        return time.perf_counter()

    def taken_since(start: float) -> float:
        seconds = time.perf_counter() - start
        if alone:
            run_alone(False)
            time.sleep(seconds / 2)
        return seconds

    programs = [config.compile() for config in configs]
    taken: list[list[float]] = [[] for _ in programs]
    square, products = torch.randn(SIDE, SIDE), []
    for step in range(WARMUP + STEPS):
        for times, (program, batch) in zip(taken, programs, strict=True):
            program.zero_grad()
            start = begin()
            program.step(batch)
            seconds = taken_since(start)
            if step >= WARMUP:
                times.append(seconds)
        start = begin()
        for _ in range(5):
            torch.mm(square, square)
        products.append(taken_since(start) / 5)
    return [statistics.median(times) for times in (*taken, products)]


def square_seconds(calibration: Calibration) -> float:
    return next(p.seconds for p in calibration.products if (p.order, p.m, p.k, p.n) == ("nn", SIDE, SIDE, SIDE))


def merged(calibrations: list[Calibration]) -> Calibration:
    """Each time is the median of those of all calibrations."""

    def middle(points: list[tuple[Point, ...]]) -> tuple[Point, ...]:
        return tuple(
            Point(size=measurements[0].size, seconds=statistics.median(p.seconds for p in measurements))
            for measurements in zip(*points, strict=True)
        )

    first = calibrations[0]
    products = tuple(
        MeasuredMatmul(
            **{**measurements[0].model_dump(), "seconds": statistics.median(p.seconds for p in measurements)}
        )
        for measurements in zip(*(calibration.products for calibration in calibrations), strict=True)
    )
    collectives = tuple(
        MeasuredCollective(
            name=measurements[0].name, ranks=measurements[0].ranks, points=middle([c.points for c in measurements])
        )
        for measurements in zip(*(calibration.collectives for calibration in calibrations), strict=True)
    )
    operators = {
        name: middle([calibration.operators[name] for calibration in calibrations]) for name in first.operators
    }
    changes = {"products": products, "collectives": collectives, "operators": operators}
    return first.model_copy(update=changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=2, help="calibrations, each followed by a measurement")
    parser.add_argument("--save", help="write the calibration here")
    parser.add_argument("--only", default="", help="configurations whose name has this in it")
    parser.add_argument("--alone", action="store_true", help="measure at real-time priority (Linux, as root)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    configs = [config for config in CONFIGS if options.only in str(config)]
    calibrations: list[Calibration] = []
    measured: dict[Config, list[float]] = {config: [] for config in configs}
    speeds: list[float] = []  # of the machine while measuring, relative to while calibrating
    for _ in range(options.rounds):
        calibrations.append(calibrate(sorted({2, *(c.ranks for c in configs)}), CalibrationEffort(alone=options.alone)))
        for ranks in sorted({config.ranks for config in configs}):
            group = tuple(config for config in configs if config.ranks == ranks)
            times_of_ranks = list(zip(*quintnet.launch(measure, ranks, (group, options.alone)), strict=True))
            for config, times in zip(group, times_of_ranks, strict=False):
                measured[config].append(max(times))
            crowd = max(1.0, ranks / calibrations[-1].cores) if calibrations[-1].cores else 1.0
            speeds.append(square_seconds(calibrations[-1]) * crowd / statistics.mean(times_of_ranks[-1]))
    calibration = merged(calibrations)
    if options.save:
        calibration.save(options.save)
    costs = CalibratedCosts(calibration)
    rows = []
    for config, times in measured.items():
        program, _ = config.compile()
        predicted, real = program.simulate(costs).seconds, statistics.median(times)
        rows.append({"config": str(config), "predicted": predicted, "measured": real, "error": predicted / real - 1})
    middle = statistics.median(abs(row["error"]) for row in rows)
    if options.json:
        named = [{**row, **asdict(config)} for row, config in zip(rows, configs, strict=True)]
        print(json.dumps({"rows": named, "median_absolute_error": middle, "speeds": speeds}, indent=1))
        return
    for row in rows:
        times = f"predicted {row['predicted'] * 1e3:8.1f} ms  measured {row['measured'] * 1e3:8.1f} ms"
        print(f"{row['config']:<36} {times}  {row['error']:+7.1%}")
    print(f"median absolute error {middle:.1%}")
    print(f"speed of products while measuring, over that while calibrating: {', '.join(f'{s:.2f}' for s in speeds)}")
    if any(abs(speed - 1) > 0.15 for speed in speeds):
        print("the machine was not quiet: its speed changed, and the errors above say little")


if __name__ == "__main__":
    main()
