"""Training in 8 bits beside 16 and 32: losses of a small GPT on text, and gradients' distance from float64.

python benchmarks/fp8.py [--steps 300] [--recipes tensorwise,rowwise] [--width 64] [--layers 2] [--seeds 8] [--json]

On the CPU, where products of 8-bit numbers are computed as what these stand for: this is about rounding, not about
speed. If torchao is installed, its layers (``convert_to_float8_training``, emulated) train the unsplit model beside it,
under autocast, where values between layers have 32 bits, and as a model in bfloat16, where they have 16 as in programs.
A row's loss is the mean over the last tenth of the steps; its distance is the norm of gradient minus float64's over
that of float64's, at the first step, the mean over the weights of the blocks' linear layers and over ``--seeds`` models
and batches; and the standard error of that mean over seeds.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from loss_chunks import Gpt
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

TEXT = Path(__file__).parent.parent / "examples" / "data" / "shakespeare.txt"
ROWS, LENGTH = 8, 64
Gradients = Mapping[str, Tensor]
Step = Callable[[dict[str, Tensor]], Tensor]
Parameters = list[tuple[str, nn.Parameter]]


def batches(steps: int, seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Rows of text, as bytes."""
    text = torch.tensor(list(TEXT.read_bytes()), dtype=torch.int64) % 128
    dice = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (ROWS,), generator=dice)
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        yield {"ids": rows[:, :-1], "labels": rows[:, 1:]}


def trained(step: Step, parameters: Parameters, steps: int, seed: int) -> tuple[list[float], Gradients]:
    """The losses, and the gradients of the first step. ``step`` leaves gradients in ``parameters``."""
    optimizer = torch.optim.AdamW([p for _, p in parameters], lr=2e-3)
    losses, first = [], {}
    for batch in batches(steps, seed):
        losses.append(float(step(batch)))
        first = first or {name: p.grad.double().clone() for name, p in parameters if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


def eager(model: nn.Module, *, narrow: bool = False) -> Step:
    """``narrow``: with 16-bit activations, as programs have."""

    def step(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss: Tensor = model(**batch)
        loss.backward()
        return loss.detach()

    return step


def of_torchao(model: nn.Module, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = type(config)(**{**vars(config), "emulate": True})
    found: nn.Module = convert_to_float8_training(model, config=config)
    return found


def of_model(model: nn.Module, *, narrow: bool = False) -> tuple[Step, Parameters]:
    return eager(model, narrow=narrow), list(model.named_parameters())


def runs(model: nn.Module, one: dict[str, Tensor], recipes: list[str]) -> Iterator[tuple[str, Step, Parameters]]:
    """What trains copies of ``model``, by name."""

    def ours(mesh: Mesh, **plan: str) -> tuple[Step, Parameters]:
        program = quintnet.compile(copy.deepcopy(model), mesh, one, **plan)  # type: ignore[arg-type]
        return program.step, list(program.named_parameters())  # type: ignore[arg-type]

    yield "float32", *of_model(copy.deepcopy(model))
    yield "torch.autocast, bf16", *of_model(copy.deepcopy(model), narrow=True)
    yield "bf16", *ours(Mesh(dp=1), precision="bf16")
    for recipe in recipes:
        yield f"fp8 {recipe}", *ours(Mesh(dp=1), precision="fp8", fp8_recipe=recipe)
    yield f"fp8 {recipes[0]}, dp=2 tp=2", *ours(Mesh(dp=2, tp=2), precision="fp8", fp8_recipe=recipes[0])
    if importlib.util.find_spec("torchao"):
        for recipe in (name for name in recipes if name in ("tensorwise", "rowwise")):
            yield f"torchao {recipe}", *of_model(of_torchao(copy.deepcopy(model), recipe), narrow=True)
            whole = of_torchao(copy.deepcopy(model).bfloat16(), recipe)
            yield f"torchao {recipe}, 16-bit model", *of_model(whole)


def distances(
    width: int, layers: int, recipes: list[str], seed: int, steps: int
) -> Iterator[tuple[str, list[float], float]]:
    """Of each run its losses, and how far gradients of the first step are from float64's."""
    torch.manual_seed(seed)
    model = Gpt(128, width, layers, LENGTH)
    one = next(batches(1, seed))
    exact = copy.deepcopy(model).double()
    eager(exact)(one)
    modules = exact.blocks.named_modules(prefix="blocks")
    names = [f"{name}.weight" for name, module in modules if isinstance(module, nn.Linear)]
    right = {name: exact.get_parameter(name).grad for name in names}
    for name, step, parameters in runs(model, one, recipes):
        losses, first = trained(step, parameters, steps, seed)
        away = [float((first[n] - g).norm() / g.norm()) for n, g in right.items() if g is not None]
        yield name, losses, sum(away) / len(away)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", default="tensorwise,rowwise,rowwise_with_gw_hp,mxfp8")
    for name, usual in (("steps", 300), ("width", 64), ("layers", 2), ("seeds", 8)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    given = parser.parse_args()
    losses, away = dict[str, list[float]](), defaultdict[str, list[float]](list)
    for seed in range(given.seeds):
        steps = 1 if seed else given.steps
        for name, found, distance in distances(given.width, given.layers, given.recipes.split(","), seed, steps):
            losses.setdefault(name, found)
            away[name].append(distance)
    rows = []
    for name, found in losses.items():
        last, off = found[-max(1, given.steps // 10) :], away[name]
        error = statistics.stdev(off) / len(off) ** 0.5 if len(off) > 1 else 0.0
        distance = {"distance": statistics.mean(off), "error": error}
        rows.append({"what": name, "first": found[0], "last": sum(last) / len(last), **distance})
    if given.json:
        print(json.dumps(rows))
        return
    print(f"{'':34} first loss  last loss  distance of gradients")
    for row in rows:
        print(f"{row['what']:34} {row['first']:10.4f} {row['last']:10.4f}  {row['distance']:.2e} +- {row['error']:.0e}")


if __name__ == "__main__":
    main()
