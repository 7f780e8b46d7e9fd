"""Training in 8 bits beside 16 and 32: losses of a small GPT on text, and gradients' distance from float64.

python benchmarks/fp8.py [--steps 300] [--recipes tensorwise,rowwise] [--width 64] [--layers 2] [--json]

On the CPU, where products of 8-bit numbers are computed as what these stand for: this is about rounding, not about
speed. If torchao is installed, its layers (``convert_to_float8_training``, emulated, under autocast) train the unsplit
model beside it.
A row's loss is the mean over the last tenth of the steps; its distance is the norm of gradient minus float64's over
that of float64's, at the first step, the mean over the weights of the blocks' linear layers.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
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


def batches(steps: int) -> Iterator[dict[str, Tensor]]:
    """Rows of text, as bytes."""
    text = torch.tensor(list(TEXT.read_bytes()), dtype=torch.int64) % 128
    dice = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (ROWS,), generator=dice)
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        yield {"ids": rows[:, :-1], "labels": rows[:, 1:]}


def trained(
    step: Callable[[dict[str, Tensor]], Tensor], parameters: list[tuple[str, nn.Parameter]], steps: int
) -> tuple[list[float], Gradients]:
    """The losses, and the gradients of the first step. ``step`` leaves gradients in ``parameters``."""
    optimizer = torch.optim.AdamW([p for _, p in parameters], lr=2e-3)
    losses, first = [], {}
    for batch in batches(steps):
        losses.append(float(step(batch)))
        first = first or {name: p.grad.double().clone() for name, p in parameters if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


def eager(model: nn.Module, *, narrow: bool = False) -> Callable[[dict[str, Tensor]], Tensor]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", default="tensorwise,rowwise,rowwise_with_gw_hp,mxfp8")
    for name, usual in (("steps", 300), ("width", 64), ("layers", 2)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    given = parser.parse_args()
    recipes = given.recipes.split(",")
    torch.manual_seed(0)
    model = Gpt(128, given.width, given.layers, LENGTH)
    one = next(batches(1))
    exact = copy.deepcopy(model).double()
    eager(exact)(one)
    modules = exact.blocks.named_modules(prefix="blocks")
    layers = [f"{name}.weight" for name, module in modules if isinstance(module, nn.Linear)]
    right = {name: exact.get_parameter(name).grad for name in layers}
    found = {}

    def ours(name: str, mesh: Mesh, **plan: str) -> None:
        program = quintnet.compile(copy.deepcopy(model), mesh, one, **plan)  # type: ignore[arg-type]
        found[name] = trained(program.step, list(program.named_parameters()), given.steps)

    plain = copy.deepcopy(model)
    found["float32"] = trained(eager(plain), list(plain.named_parameters()), given.steps)
    cast = copy.deepcopy(model)
    found["torch.autocast, bf16"] = trained(eager(cast, narrow=True), list(cast.named_parameters()), given.steps)
    ours("bf16", Mesh(dp=1), precision="bf16")
    for recipe in recipes:
        ours(f"fp8 {recipe}", Mesh(dp=1), precision="fp8", fp8_recipe=recipe)
    ours(f"fp8 {recipes[0]}, dp=2 tp=2", Mesh(dp=2, tp=2), precision="fp8", fp8_recipe=recipes[0])
    if importlib.util.find_spec("torchao"):
        for recipe in (name for name in recipes if name in ("tensorwise", "rowwise")):
            other = of_torchao(copy.deepcopy(model), recipe)
            found[f"torchao {recipe}"] = trained(eager(other, narrow=True), list(other.named_parameters()), given.steps)
    rows = []
    for name, (losses, first) in found.items():
        last = losses[-max(1, given.steps // 10) :]
        away = [float((first[n] - g).norm() / g.norm()) for n, g in right.items()]
        rows.append(
            {"what": name, "first": losses[0], "last": sum(last) / len(last), "distance": sum(away) / len(away)}
        )
    if given.json:
        print(json.dumps(rows))
        return
    print(f"{'':32} first loss  last loss  distance of gradients")
    for row in rows:
        print(f"{row['what']:32} {row['first']:10.4f} {row['last']:10.4f}  {row['distance']:.2e}")


if __name__ == "__main__":
    main()
