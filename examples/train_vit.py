"""Train a Vision Transformer on handwritten digits, split 2 x 2 x 2 over 8 ranks, beside the unsplit model.

    python examples/train_vit.py                  8 processes on this machine's CPU cores
    python examples/train_vit.py --local          all ranks inside this process
    torchrun --nproc-per-node 8 examples/train_vit.py        one GPU per rank
    python examples/train_vit.py --mnist DIR --epochs 3      MNIST, from its IDX files

Both models start from the same seed and see the same batches. The exit code is 1 if the split model ends
below 95% validation accuracy or its losses differ from the unsplit model's by more than rounding explains.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from digits import Digits, bundled_digits, mnist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, distributed, nn
from vit import VisionTransformer

import quintnet

LEAST_ACCURACY = 0.95  # of the split model on the validation images, after the last epoch


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how if the command line says nothing else.

    ``build``: from the side of an image, a model of ten classes; ``optimizer``: of parameters and a learning rate.
    ``float64``: whether it computes in float64, as rounding in float32 alone would set two runs apart.
    """

    build: Callable[[int], nn.Module]
    optimizer: Callable[[Iterable[Tensor], float], torch.optim.Optimizer]
    mesh: str
    microbatches: int
    epochs: int
    lr: float
    dump: Path
    float64: bool = False


@dataclass(frozen=True)
class Settings:
    """What defines a run; every rank gets the same."""

    recipe: Recipe
    epochs: int
    batch: int
    microbatches: int
    lr: float
    seed: int
    dtype: torch.dtype
    device: str
    mesh: dict[str, int]
    dump: Path

    @property
    def ranks(self) -> int:
        """How many ranks share the split model."""
        return math.prod(self.mesh.values())


@dataclass(frozen=True)
class Data:
    """The images to learn from and those to check with."""

    training: Digits
    validation: Digits


@dataclass
class History:
    """What a run did: the loss of every step, and the validation accuracy after every epoch."""

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, losses: list[float], accuracy: float, seconds: float) -> None:
        """Record one epoch."""
        self.losses += losses
        self.accuracies.append(accuracy)
        self.seconds += seconds


class Trainee(Protocol):
    """What the training loop needs; quintnet's programs have it."""

    def parameters(self) -> Iterable[Tensor]: ...

    def step(self, batch: tuple[Tensor, Tensor], /) -> Tensor: ...

    def __call__(self, images: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Unsplit:
    """A model on one device, trained by plain PyTorch."""

    model: nn.Module

    def parameters(self) -> Iterable[Tensor]:
        return self.model.parameters()

    def step(self, batch: tuple[Tensor, Tensor], /) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return loss.detach()

    def __call__(self, images: Tensor, /) -> Tensor:
        self.model.eval()
        logits: Tensor = self.model(images)
        self.model.train()
        return logits


def train(trainee: Trainee, settings: Settings, data: Data, device: torch.device, show: bool) -> History:
    """Train, validate after each epoch, and tell so in one line per epoch if ``show``."""
    history = History()
    shuffle = torch.Generator().manual_seed(settings.seed)
    total = settings.epochs * (len(data.training) // settings.batch)
    optimizer = settings.recipe.optimizer(trainee.parameters(), settings.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_then_cosine(step, total))
    with progress_bar(show) as progress:
        task = progress.add_task("", total=total)
        for epoch in range(1, settings.epochs + 1):
            started = time.perf_counter()
            losses = []
            for chosen in data.training.batches(settings.batch, shuffle):
                losses.append(float(trainee.step(chosen.tensors(device, settings.dtype))))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                progress.update(task, advance=1, description=f"epoch {epoch}, loss {losses[-1]:.4f}")
            validation_loss, accuracy = validate(trainee, settings, data.validation, device)
            seconds = time.perf_counter() - started
            history.add(losses, accuracy, seconds)
            train_loss = sum(losses) / len(losses)
            progress.console.print(
                f"epoch {epoch:2d}/{settings.epochs}   train loss {train_loss:.4f}   validation loss"
                f" {validation_loss:.4f}   validation accuracy {accuracy:6.2%}   {seconds:5.1f} s"
            )
    return history


def warmup_then_cosine(step: int, total: int) -> float:
    """The learning rate's factor: up in the first tenth of all steps, then down to nothing."""
    return min(1.0, 10 * (step + 1) / total) * (1 + math.cos(math.pi * step / total)) / 2


def validate(trainee: Trainee, settings: Settings, images: Digits, device: torch.device) -> tuple[float, float]:
    """Loss and accuracy over all of ``images``."""
    logits, labels = [], []
    with torch.no_grad():
        for padded, real in images.padded_batches(settings.batch):
            batch_images, batch_labels = padded.tensors(device, settings.dtype)
            logits.append(trainee(batch_images)[:real])
            labels.append(batch_labels[:real])
    guess, truth = torch.cat(logits), torch.cat(labels)
    return float(F.cross_entropy(guess, truth)), float((guess.argmax(dim=1) == truth).double().mean())


def progress_bar(show: bool) -> Progress:
    """A bar on a terminal; elsewhere only the lines printed beside it, and nothing at all unless ``show``."""
    # Lines stay whole in a file, whatever the width that a missing terminal is given.
    console = Console(quiet=not show, soft_wrap=True, highlight=False)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal))


def vision_transformer(size: int) -> nn.Module:
    """Images of 8 x 8 have patches of 2 x 2, larger ones of 4 x 4."""
    return VisionTransformer(size, patch=2 if size == 8 else 4)


def build_model(settings: Settings, data: Data, device: torch.device) -> nn.Module:
    """The same weights wherever it is called: ranks need not send them to each other."""
    torch.manual_seed(settings.seed)
    return settings.recipe.build(data.training.size).to(device, settings.dtype)


def train_unsplit(settings: Settings, data: Data) -> History:
    """The reference: the whole model on one device."""
    device = this_device(settings)
    return train(Unsplit(build_model(settings, data, device)), settings, data, device, show=True)


def train_split(settings: Settings, data: Data) -> History:
    """What each rank runs; without a process group, one call plays all ranks."""
    device = this_device(settings)
    program = quintnet.compile(
        build_model(settings, data, device),
        quintnet.Mesh(**settings.mesh),
        data.training.first(settings.batch).tensors(device, settings.dtype),
        loss_fn=F.cross_entropy,
        microbatches=settings.microbatches,
        schedule="1f1b",
    )
    first = this_rank() == 0
    if first:
        program.dump(settings.dump)
    return train(program, settings, data, device, show=first)


def launch_split(settings: Settings, data: Data) -> History:
    """Train on processes of this machine, or under torchrun as the rank that this process is."""
    steps = settings.epochs * (len(data.training) // settings.batch)
    # Ten minutes to start, then far more than a step takes: only a run that stands still is ended.
    histories = quintnet.launch(train_split, settings.ranks, args=(settings, data), timeout=600 + 5.0 * steps)
    history: History = histories[this_rank()]
    return history


def this_rank() -> int:
    """This process' rank; torchrun's variable counts before there is a process group."""
    if distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def this_device(settings: Settings) -> torch.device:
    """The CPU, or this rank's own GPU of its machine; made ready for use."""
    if settings.device == "cpu":
        # Such small matrices gain little from threads, and ranks that share cores lose much.
        torch.set_num_threads(1)
        return torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK", str(this_rank() % torch.cuda.device_count()))
    device = torch.device("cuda", int(local_rank))
    torch.cuda.set_device(device)
    return device


def relative_differences(split: History, unsplit: History) -> Tensor:
    """How far apart the two losses are after every step, as a share of the unsplit model's."""
    ours, plain = (torch.tensor(history.losses, dtype=torch.float64) for history in (split, unsplit))
    return ((ours - plain) / plain).abs()


def print_comparison(split: History, unsplit: History, differences: Tensor) -> None:
    """Print a dozen points of both loss curves, the largest differences, and both accuracies."""
    print("\nstep   loss, split   loss, unsplit   relative difference")
    last = len(differences) - 1
    for step in sorted({round(last * point / 11) for point in range(12)}):
        losses = f"{split.losses[step]:11.6f}   {unsplit.losses[step]:13.6f}"
        print(f"{step + 1:4d}   {losses}   {float(differences[step]):19.1e}")
    print("\nlargest relative difference of the losses")
    print(f"  first 100 steps       {float(differences[:100].max()):.1e}")
    print(f"  all {last + 1:5d} steps       {float(differences.max()):.1e}")
    print(f"validation accuracy     {split.accuracies[-1]:.2%} split, {unsplit.accuracies[-1]:.2%} unsplit")
    print(f"seconds of training     {split.seconds:.0f} split, {unsplit.seconds:.0f} unsplit")


def shortcomings(split: History, differences: Tensor | None, settings: Settings) -> list[str]:
    """What is worse than it must be, one sentence each."""
    found = []
    if split.accuracies[-1] < LEAST_ACCURACY:
        found.append(f"validation accuracy {split.accuracies[-1]:.2%} is below {LEAST_ACCURACY:.0%}")
    exact = settings.dtype == torch.float64
    if differences is not None and (exact or not settings.recipe.float64):
        # In float32, what rounding sets apart grows with every step; float64 leaves room for all of them.
        limit, steps = (1e-9, len(differences)) if exact else (1e-4, min(100, len(differences)))
        largest = float(differences[:steps].max())
        if not largest <= limit:  # so that a loss that is not a number is found too
            found.append(f"losses differ by {largest:.1e} in {steps} steps; the limit is {limit:.0e}")
    return found


def report(split: History, unsplit: History | None, settings: Settings) -> int:
    """Print the outcome; returns the exit code."""
    differences = None
    if unsplit is not None:
        differences = relative_differences(split, unsplit)
        print_comparison(split, unsplit, differences)
    missed = shortcomings(split, differences, settings)
    for reason in missed:
        print(f"MISSED: {reason}")
    print(f"the programs of all ranks are in {settings.dump}{os.sep}")
    return 1 if missed else 0


def parse_mesh(text: str) -> dict[str, int]:
    """Turns ``pp=2,dp=2,tp=2`` into axes with their sizes, outermost first."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not size.isdecimal() or int(size) < 1 or name in axes:
            raise argparse.ArgumentTypeError(f"{text!r}: write each axis once, as in pp=2,dp=2,tp=2")
        axes[name] = int(size)
    return axes


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def adamw(parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """With torch's defaults."""
    return torch.optim.AdamW(parameters, lr=lr)


def argument_parser(recipe: Recipe, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--epochs", type=positive, default=recipe.epochs, help="how often to see every image (%(default)s)")
    add("--batch", type=positive, default=128, help="images per step, over all ranks (128)")
    add("--microbatches", type=positive, default=recipe.microbatches, help="parts of a rank's share (%(default)s)")
    add("--lr", type=float, default=recipe.lr, help="the highest learning rate (%(default)s)")
    add("--seed", type=int, default=0, help="of the weights, the split of the images and their order (0)")
    add("--float64", action=argparse.BooleanOptionalAction, default=recipe.float64, help="with a tighter limit")
    add("--mnist", type=Path, metavar="DIR", help="MNIST's IDX files, not scikit-learn's digits")
    add("--limit", type=positive, metavar="N", help="at most N images to train on and N to validate with")
    add("--mesh", type=parse_mesh, default=recipe.mesh, help="axes, outermost first (%(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if each rank has one")
    add("--local", action="store_true", help="run all ranks inside this process")
    add("--dump", type=Path, default=recipe.dump, metavar="DIR", help="for the programs (%(default)s)")
    add("--no-reference", action="store_true", help="do not train the unsplit model")
    return parser


def choose_device(wanted: str, ranks: int, local: bool) -> str:
    """GPUs where there is one for each rank of this machine; one suffices if all ranks are one process."""
    if wanted != "auto":
        return wanted
    needed = 1 if local else int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= needed else "cpu"


def load_data(folder: Path | None, limit: int | None, seed: int) -> Data:
    """MNIST from ``folder``, or scikit-learn's digits; at most ``limit`` images of either part."""
    parts = mnist(folder) if folder else bundled_digits(seed)
    return Data(*(part.first(limit or len(part)) for part in parts))


def prepare(parser: argparse.ArgumentParser, given: argparse.Namespace, recipe: Recipe) -> tuple[Settings, Data]:
    """Settings and data that fit each other; ends the program with a usage message where they do not."""
    shares = given.mesh.get("dp", 1) * given.microbatches
    if given.batch % shares:
        parser.error(f"--batch {given.batch} does not divide by dp x microbatches = {shares}")
    try:
        data = load_data(given.mnist, given.limit, given.seed)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if len(data.training) < given.batch:
        parser.error(f"--batch {given.batch} is more than the {len(data.training)} images to train on")
    settings = Settings(
        recipe=recipe,
        epochs=given.epochs,
        batch=given.batch,
        microbatches=given.microbatches,
        lr=given.lr,
        seed=given.seed,
        dtype=torch.float64 if given.float64 else torch.float32,
        device=choose_device(given.device, math.prod(given.mesh.values()), given.local),
        mesh=given.mesh,
        dump=given.dump,
    )
    return settings, data


def announce(settings: Settings, data: Data) -> None:
    """Say what is about to be trained, on what."""
    axes = " x ".join(f"{name}{size}" for name, size in settings.mesh.items())
    print(f"{len(data.training)} images to train on, {len(data.validation)} to validate with")
    print(f"\nsplit model: {axes} = {settings.ranks} ranks on {settings.device}", flush=True)


def main(recipe: Recipe, description: str | None) -> int:
    """Train the split model, then the unsplit one, and compare; returns the exit code."""
    parser = argument_parser(recipe, description)
    given = parser.parse_args()
    settings, data = prepare(parser, given, recipe)
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or the launcher would connect the ranks' GPUs
    first = this_rank() == 0
    if first:
        announce(settings, data)
    split = train_split(settings, data) if given.local else launch_split(settings, data)
    if not first:
        return 0
    unsplit = None
    if not given.no_reference:
        # Now no rank waits for another: nothing can time out, however long this takes.
        print("\nunsplit model: plain PyTorch on one device", flush=True)
        unsplit = train_unsplit(settings, data)
    return report(split, unsplit, settings)


VIT = Recipe(vision_transformer, adamw, mesh="pp=2,dp=2,tp=2", microbatches=4, epochs=20, lr=2e-3, dump=Path("out/vit"))

if __name__ == "__main__":
    sys.exit(main(VIT, __doc__))
