"""Draw the pictures of the pages with the tool itself, from small models that nothing trains.

    python docs/draw_pictures.py [--out docs/pictures]

Times are those of H100 nodes, as for ``program.simulate()`` without arguments. The same code draws the same pictures.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.dump import drawing
from quintnet_compiler.dump.drawing import Box

WIDTH, WORDS, POSITIONS = 256, 512, 128
Draw = Callable[[], str]


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A language model of ``blocks`` blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """Eight experts, each an MLP, of which the router chooses one for a row."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 8)
        self.up = nn.Parameter(torch.randn(8, 4 * WIDTH, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(8, WIDTH, 4 * WIDTH) * (4 * WIDTH) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        share, expert = self.router(x).softmax(-1).max(-1)
        hidden = F.gelu(quintnet.expert_linear(x, expert, self.up))
        return x + share[:, None] * quintnet.expert_linear(hidden, expert, self.down)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def program(mesh: Mesh, blocks: int = 4, rows: int = 16, **plan: Any) -> quintnet.CompiledProgram:
    """Return a language model's program."""
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (rows, POSITIONS))
    return quintnet.compile(Model(blocks), mesh, (ids, ids), loss_fn=loss_of, check="off", **plan)


def timeline(schedule: str, **plan: Any) -> str:
    """Return a predicted step of four stages and eight microbatches."""
    return program(Mesh(pp=4), microbatches=8, schedule=schedule, **plan).simulate().svg()


def tensor(name: str, mesh: Mesh, **plan: Any) -> str:
    """Return which rank has which part of a parameter, or of what an operator computes."""
    return quintnet.visualize(program(mesh, **plan), name).svg()


def blocks() -> str:
    """Return the blocks of a model, with what ranks exchange in each."""
    with tempfile.TemporaryDirectory() as folder:
        program(Mesh(pp=2, tp=2), microbatches=2).dump(folder)
        return (Path(folder) / "graph/model.svg").read_text()


def experts() -> str:
    """Return a predicted step of a mixture of experts on four ranks."""
    torch.manual_seed(0)
    rows = torch.randn(4096, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixture(), nn.Linear(WIDTH, WIDTH), Mixture())
    return quintnet.compile(model, Mesh(ep=4), (rows, rows), loss_fn=F.mse_loss, check="off").simulate().svg()


def passes() -> str:
    """Return the passes that a program went through, each with how many operators there are after it."""
    with tempfile.TemporaryDirectory() as folder:
        program(Mesh(dp=2, tp=2, pp=2), microbatches=2, zero=1, recompute="selective").dump(folder)
        texts = {path.stem.partition("_")[2]: path.read_text() for path in sorted(Path(folder).glob("passes/*.txt"))}
    counts = {name: len(re.findall(r"^%.* = (?!parameter|input|buffer)", text, re.M)) for name, text in texts.items()}
    drawn = [Box(name, count, 1, None, (), frozenset(), frozenset()) for name, count in counts.items() if count]
    return str(drawing.draw_boxes(drawn, [(i, i + 1) for i in range(len(drawn) - 1)]))


def front() -> str:
    """Return the layouts of a model on eight devices, by memory and time."""
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (16, POSITIONS))
    report = quintnet.plan(Model(4), quintnet.Cluster("h100", 8), (ids, ids), loss_fn=loss_of, seconds=60)
    return report.svg()


PICTURES: Mapping[str, Draw] = MappingProxyType(
    {
        "schedule_1f1b": lambda: timeline("1f1b"),
        "schedule_zero_bubble": lambda: timeline("zb-h1"),
        "passes": passes,
        "blocks_and_collectives": blocks,
        "experts_dispatch": experts,
        "column_parallel_weight": lambda: tensor("blocks.0.up.weight", Mesh(tp=4)),
        "row_parallel_weight": lambda: tensor("blocks.0.down.weight", Mesh(tp=4)),
        "zero_parameter": lambda: tensor("blocks.0.up.weight", Mesh(dp=4), zero=3),
        "context_positions": lambda: tensor("blocks.0", Mesh(cp=4), context="ring"),
        "ring_attention": lambda: program(Mesh(cp=4), blocks=1, context="ring").simulate().svg(),
        "planned_layouts": front,
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pictures")
    parser.add_argument("--only", help="comma-separated names")
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    for name in options.only.split(",") if options.only else PICTURES:
        text = PICTURES[name]()
        (options.out / f"{name}.svg").write_text(text + "\n" * (not text.endswith("\n")))
        print(options.out / f"{name}.svg")


if __name__ == "__main__":
    main()
