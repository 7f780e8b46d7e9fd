"""Train a diffusion model on handwritten digits, split over 2 ranks, and draw digits with it.

    python examples/train_diffusion.py            2 processes on this machine's CPU cores
    python examples/train_diffusion.py --local    all ranks inside this process
    python examples/train_diffusion.py --mesh dp=2,tp=2       another layout, the same noise
    torchrun --nproc-per-node 2 examples/train_diffusion.py   one GPU per rank

The model draws its noise in forward, and noise is the same on every layout: before it trains, the program is compared
with the module itself under the same noise (``verify``). The exit code is 1 if they differ, or if the loss ends above
0.15. Ten digits of each class are written to out/diffusion/digits.png.
"""

from __future__ import annotations

import argparse
import math
import struct
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from denoiser import Diffusion
from digits import Digits, bundled_digits
from torch import Tensor
from train_vit import choose_device, parse_mesh, positive, progress_bar, this_device, this_rank, warmup_then_cosine

import quintnet

MOST_LOSS = 0.15  # the mean over the last epoch
EACH = 10  # drawn digits of each class


@dataclass(frozen=True)
class Settings:
    """What defines a run; every rank gets the same."""

    epochs: int
    batch: int
    lr: float
    seed: int
    device: str
    mesh: dict[str, int]
    out: Path

    @property
    def ranks(self) -> int:
        """How many ranks share the model."""
        return math.prod(self.mesh.values())


@dataclass(frozen=True)
class Outcome:
    """Whether the program is the module, the mean loss of the last epoch, and drawn images ``[count, size, size]``."""

    equal: bool
    loss: float
    images: Tensor


def train(settings: Settings, digits: Digits) -> Outcome:
    """What each rank runs; without a process group, one call plays all ranks."""
    device, show = this_device(settings), this_rank() == 0
    torch.manual_seed(settings.seed)  # the same weights on all ranks: they need not send them to each other
    model = Diffusion().to(device)
    first = digits.first(settings.batch).tensors(device, torch.float32)
    program = quintnet.compile(model, quintnet.Mesh(**settings.mesh), first, seed=settings.seed)
    report = program.verify(steps=1)
    if show:
        print(str(report).splitlines()[0], flush=True)
    optimizer = torch.optim.AdamW(program.parameters(), lr=settings.lr)
    total, shuffle = settings.epochs * (len(digits) // settings.batch), torch.Generator().manual_seed(settings.seed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_then_cosine(step, total))
    mean = math.inf
    with progress_bar(show) as progress:
        task = progress.add_task("", total=total)
        for epoch in range(1, settings.epochs + 1):
            losses, started = list[float](), time.perf_counter()
            for chosen in digits.batches(settings.batch, shuffle):
                losses.append(float(program.step(chosen.tensors(device, torch.float32))))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                progress.update(task, advance=1, description=f"epoch {epoch}, loss {losses[-1]:.4f}")
            mean, seconds = sum(losses) / len(losses), time.perf_counter() - started
            if epoch % 10 == 0 or epoch == settings.epochs:
                progress.console.print(f"epoch {epoch:3d}/{settings.epochs}   loss {mean:.4f}   {seconds:5.1f} s")
    return Outcome(report.ok, mean, sample(program, model, digits.size, settings, device))


def sample(
    program: quintnet.CompiledProgram, model: Diffusion, size: int, settings: Settings, device: torch.device
) -> Tensor:
    """Digits of all classes, from noise (Ho et al. 2020, algorithm 2). In evaluation mode the model says what noise is
    in an image; all ranks compute it together."""
    dice = torch.Generator().manual_seed(settings.seed)
    labels = torch.arange(10).repeat(EACH).to(device)
    images = torch.randn(len(labels), size, size, generator=dice).to(device)
    with torch.no_grad():
        for t in reversed(range(model.steps)):
            noise = program(images, labels, torch.full_like(labels, t))
            kept, rate = model.kept[t], model.rates[t]
            images = (images - rate / (1 - kept).sqrt() * noise) / (1 - rate).sqrt()
            if t:
                images = images + rate.sqrt() * torch.randn(images.shape, generator=dice).to(device)
    return images.cpu()


def write_png(path: Path, pixels: Tensor) -> None:
    """A grey image ``[height, width]`` of bytes, as PNG (ISO/IEC 15948)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = pixels.shape
    rows = b"".join(b"\0" + bytes(row.tolist()) for row in pixels)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def sheet(images: Tensor, scale: int = 4) -> Tensor:
    """Images in rows of ten, ``scale`` pixels for one, as bytes; -1 is black and 1 is white."""
    size = images.shape[-1]
    grid = torch.nn.functional.pad(images, (1, 1, 1, 1), value=-1).unflatten(0, (-1, 10))
    whole = grid.transpose(1, 2).reshape(-1, 10 * (size + 2))
    large = whole.repeat_interleave(scale, 0).repeat_interleave(scale, 1)
    return ((large.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--epochs", type=positive, default=40, help="how often to see every image (%(default)s)")
    add("--batch", type=positive, default=64, help="images per step, over all ranks (%(default)s)")
    add("--lr", type=float, default=4e-3, help="AdamW's highest learning rate (%(default)s)")
    add("--seed", type=int, default=0, help="of weights, noise, and the order of images (%(default)s)")
    add("--limit", type=positive, metavar="N", help="at most N images to train on")
    add("--mesh", type=parse_mesh, default="dp=2", help="axes, outermost first (%(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if each rank has one")
    add("--local", action="store_true", help="run all ranks inside this process")
    add("--out", type=Path, default=Path("out/diffusion"), metavar="DIR", help="for the drawn digits (%(default)s)")
    return parser


def main() -> int:
    """Train, draw, and say whether all went well; returns the exit code."""
    given = argument_parser().parse_args()
    device = choose_device(given.device, math.prod(given.mesh.values()), given.local)
    settings = Settings(given.epochs, given.batch, given.lr, given.seed, device, given.mesh, given.out)
    digits = bundled_digits(given.seed)[0].first(given.limit or 10**9)
    if given.local:
        outcome = train(settings, digits)
    else:
        outcomes = quintnet.launch(train, settings.ranks, args=(settings, digits), timeout=3600.0)
        outcome = outcomes[this_rank()]
    if this_rank():
        return 0
    path = settings.out / "digits.png"
    write_png(path, sheet(outcome.images))
    print(f"digits drawn by the model are in {path}")
    missed = [] if outcome.equal else ["the program is not what the module is"]
    missed += [] if outcome.loss <= MOST_LOSS else [f"the loss {outcome.loss:.3f} is above {MOST_LOSS}"]
    for reason in missed:
        print(f"MISSED: {reason}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
