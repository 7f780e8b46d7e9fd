"""Train a Hugging Face GPT-2 on Shakespeare, split 2 x 2 x 2 over 8 ranks, and load the result in plain transformers.

    python examples/finetune_gpt2.py                    a small GPT-2 from scratch, on bytes, on CPU cores
    python examples/finetune_gpt2.py --model FOLDER     a checkpoint on this disk (safetensors), with its tokenizer
    python examples/finetune_gpt2.py --text FILE        another text; its last tenth is for validation
    python examples/finetune_gpt2.py --local            all ranks inside this process

The model is transformers' own class, unchanged. It is built on the meta device: no process ever holds all of it. The
exit code is 1 if training does not help, or if plain transformers finds another perplexity in the saved folder.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from train_vit import choose_device, parse_mesh, positive, progress_bar, this_rank, warmup_then_cosine

import quintnet

DATA = Path(__file__).parent / "data" / "shakespeare.txt"
LIMIT = 1e-4  # how far two perplexities of the same weights may be apart in float32, relatively


@dataclass(frozen=True)
class Settings:
    """What defines a run; every rank gets the same."""

    model: Path | None
    steps: int
    batch: int
    length: int
    microbatches: int
    lr: float
    seed: int
    device: str
    mesh: dict[str, int]
    out: Path

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())


@dataclass(frozen=True)
class Text:
    """Tokens to learn from, ``[count]``, and windows of tokens to validate with, ``[batches, batch, length]``."""

    training: Tensor
    validation: Tensor

    def batches(self, settings: Settings) -> Iterator[dict[str, Tensor]]:
        """Windows from anywhere in the training part: the same on every rank."""
        generator = torch.Generator().manual_seed(settings.seed)
        for _ in range(settings.steps):
            starts = torch.randint(len(self.training) - settings.length + 1, (settings.batch, 1), generator=generator)
            yield batch_of(self.training[starts + torch.arange(settings.length)])


@dataclass(frozen=True)
class Outcome:
    """Perplexities of the validation part before and after training."""

    before: float
    after: float


def batch_of(ids: Tensor) -> dict[str, Tensor]:
    """What GPT-2 takes. It shifts the labels itself: each position predicts the token after it."""
    return {"input_ids": ids, "labels": ids}


def read_text(path: Path, settings: Settings) -> Text:
    """The text as tokens: of the model's tokenizer if it comes with one, else its bytes."""
    ids = torch.tensor(tokens_of(path, settings.model))
    held_out = len(ids) // 10
    window = settings.batch * settings.length
    count = held_out // window
    if count < 1 or len(ids) - held_out < settings.length:
        raise ValueError(f"{path}: {len(ids)} tokens; a tenth of them must fill a batch of {window} tokens")
    training, validation = ids[:-held_out], ids[-held_out:][: count * window]
    return Text(training, validation.reshape(count, settings.batch, settings.length))


def tokens_of(path: Path, model: Path | None) -> list[int]:
    if model and any((model / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
        found: list[int] = tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"]
        return found
    return list(path.read_bytes())


def configuration(settings: Settings) -> Any:
    """The checkpoint's, or that of a GPT-2 with 0.9 million parameters which reads bytes."""
    if settings.model:
        if not settings.model.is_dir():  # transformers would look for it on the internet
            raise ValueError(f"there is no folder {settings.model}")
        config = transformers.AutoConfig.from_pretrained(settings.model, local_files_only=True)
    else:
        config = transformers.GPT2Config(
            vocab_size=256, n_positions=settings.length, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
        )
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0  # so short a training does not overfit
    config.use_cache = False  # of keys and values: for generating, not for training
    return config


def initial_values(layers: int) -> dict[str, quintnet.Normal | quintnet.Constant]:
    """GPT-2's: residual projections get smaller values the deeper the model is. The same on every mesh."""
    return {
        "*.weight": quintnet.Normal(0.02),
        "*.c_proj.weight": quintnet.Normal(0.02 / math.sqrt(2 * layers)),
        "*.ln_*.weight": quintnet.Constant(1.0),
        "*.bias": quintnet.Constant(0.0),
    }


def train(settings: Settings, text: Text) -> Outcome:
    """What each rank runs; without a process group, one call plays all ranks."""
    quiet()
    torch.set_num_threads(1)
    config = configuration(settings)
    with torch.device("meta"):  # shapes and names only
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    text = Text(*(x.to(device_of(settings)) for x in (text.training, text.validation)))
    program = quintnet.compile(
        model,
        quintnet.Mesh(**settings.mesh),
        batch_of(text.validation[0]),
        microbatches=settings.microbatches,
        device=device_of(settings),
    )
    if settings.model:
        program.load_pretrained(settings.model)  # each rank reads its own slices
    else:
        program.initialize(initial_values(config.n_layer), seed=settings.seed)
    show = this_rank() == 0
    before = perplexity(program, text)
    if show:
        print(f"validation perplexity before training   {before:9.3f}", flush=True)
    optimize(program, settings, text, show)
    after = perplexity(program, text)
    if show:
        print(f"validation perplexity after training    {after:9.3f}", flush=True)
    program.save_pretrained(settings.out)
    return Outcome(before, after)


def optimize(program: quintnet.CompiledProgram, settings: Settings, text: Text, show: bool) -> None:
    """The training loop, as for any model."""
    optimizer = torch.optim.AdamW(program.parameters(), lr=settings.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_then_cosine(step, settings.steps))
    started = time.perf_counter()
    with progress_bar(show) as progress:
        task = progress.add_task("", total=settings.steps)
        for step, batch in enumerate(text.batches(settings), start=1):
            loss = program.step(batch)
            program.clip_grad_norm(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.update(task, advance=1, description=f"loss {float(loss):.4f}")
            if step % max(1, settings.steps // 10) == 0:
                seconds = time.perf_counter() - started
                progress.console.print(f"step {step:4d}/{settings.steps}   loss {float(loss):.4f}   {seconds:5.1f} s")


def perplexity(program: quintnet.CompiledProgram, text: Text) -> float:
    losses = [float(program.evaluate(batch_of(ids))) for ids in text.validation]
    return math.exp(sum(losses) / len(losses))


def plain_perplexity(settings: Settings, text: Text) -> float:
    """The same, by transformers alone, from the saved folder."""
    quiet()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(settings.out, local_files_only=True)
    model.eval()
    with torch.no_grad():
        losses = [float(model(**batch_of(ids)).loss) for ids in text.validation]
    return math.exp(sum(losses) / len(losses))


def device_of(settings: Settings) -> torch.device:
    if settings.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", str(this_rank() % torch.cuda.device_count()))))
    torch.cuda.set_device(device)
    return device


def quiet() -> None:
    """Only this script reports: transformers has progress bars and warnings of its own."""
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def new_folder(wanted: Path | None) -> Path:
    """Where the model goes: as asked, or the first of out/gpt2, out/gpt2-2, ... that is free."""
    number, path = 1, wanted or Path("out/gpt2")
    while wanted is None and path.exists():
        number += 1
        path = Path(f"out/gpt2-{number}")
    if path.exists():
        raise ValueError(f"{path} exists; the model is saved into a new folder")
    return path


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="FOLDER", help="a GPT-2 checkpoint on this disk, not a new model")
    add("--text", type=Path, metavar="FILE", default=DATA, help="to train on (examples/data/shakespeare.txt)")
    add("--steps", type=positive, default=200, help="optimizer steps (200)")
    add("--batch", type=positive, default=16, help="windows per step, over all ranks (16)")
    add("--length", type=positive, default=128, help="tokens of a window (128)")
    add("--microbatches", type=positive, default=2, help="parts of each rank's share of a batch (2)")
    add("--lr", type=float, help="AdamW's highest learning rate (0.003; for a checkpoint 0.0001)")
    add("--seed", type=int, default=0, help="of the weights and of the windows (0)")
    add("--mesh", type=parse_mesh, default="pp=2,dp=2,tp=2", help="axes, outermost first (pp=2,dp=2,tp=2)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if each rank has one")
    add("--local", action="store_true", help="run all ranks inside this process")
    add("--out", type=Path, metavar="FOLDER", help="a new folder for the model (out/gpt2)")
    return parser


def prepare(parser: argparse.ArgumentParser, given: argparse.Namespace) -> tuple[Settings, Text]:
    """Settings and text that fit each other; ends the program with a usage message where they do not."""
    shares = given.mesh.get("dp", 1) * given.microbatches
    if given.batch % shares:
        parser.error(f"--batch {given.batch} does not divide by dp x microbatches = {shares}")
    with usage_errors(parser):
        settings = Settings(
            model=given.model,
            steps=given.steps,
            batch=given.batch,
            length=given.length,
            microbatches=given.microbatches,
            lr=given.lr or (1e-4 if given.model else 3e-3),
            seed=given.seed,
            device=choose_device(given.device, math.prod(given.mesh.values()), given.local),
            mesh=given.mesh,
            out=new_folder(given.out),
        )
        config, text = configuration(settings), read_text(given.text, settings)
        most = max(int(x.max()) for x in (text.training, text.validation))
        if most >= config.vocab_size or settings.length > config.n_positions:
            raise ValueError(
                f"the text has tokens up to {most} in windows of {settings.length}, and the model knows"
                f" {config.vocab_size} tokens in windows of {config.n_positions}"
            )
    return settings, text


@contextlib.contextmanager
def usage_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        parser.error(str(error))


def report(outcome: Outcome, plain: float, settings: Settings) -> int:
    """Print the last figure and the verdict; returns the exit code."""
    print(f"the same of the folder in transformers  {plain:9.3f}")
    print(f"the model is in {settings.out}{os.sep}")
    missed = []
    if not outcome.after < outcome.before:
        missed.append("training did not lower the perplexity")
    if not abs(plain - outcome.after) <= LIMIT * outcome.after:  # so that a NaN is found too
        missed.append(f"transformers finds {plain:.6f} where {outcome.after:.6f} was measured")
    for reason in missed:
        print(f"MISSED: {reason}")
    return 1 if missed else 0


def main() -> int:
    """Train, save, load again in transformers, compare; returns the exit code."""
    quiet()
    parser = argument_parser()
    given = parser.parse_args()
    settings, text = prepare(parser, given)
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or the launcher would connect the ranks' GPUs
    first = this_rank() == 0
    if first:
        axes = " x ".join(f"{name}{size}" for name, size in settings.mesh.items())
        tokens = f"{len(text.training)} tokens to train on, {text.validation.numel()} to validate with"
        print(f"{tokens}\n{axes} = {settings.ranks} ranks on {settings.device}", flush=True)
    if given.local:
        outcome: Outcome = train(settings, text)
    else:
        timeout = 600 + 10.0 * settings.steps  # only a run that stands still is ended
        outcome = quintnet.launch(train, settings.ranks, args=(settings, text), timeout=timeout)[this_rank()]
    return report(outcome, plain_perplexity(settings, text), settings) if first else 0


if __name__ == "__main__":
    sys.exit(main())
