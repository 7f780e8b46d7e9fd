"""A layer of a mixture of experts on one device: the program beside the module itself, under autograd.

Programs keep float32 parameters and cast them in each step, as people train; the peers without a word on it keep 16-bit
parameters. So each program has a peer that does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

from .entries import Entry, Figures
from .peers import OURS, Step, ceiling, compared
from .races import host_waits
from .setting import Setting


@dataclass(frozen=True)
class Shape:
    """``rows`` tokens of ``width``; each goes to ``chosen`` of ``experts`` with ``hidden`` units."""

    rows: int
    width: int
    hidden: int
    experts: int
    chosen: int

    @property
    def flops(self) -> int:
        """Return the FLOPs of the experts' products, forward and backward."""
        return 3 * 2 * self.rows * self.chosen * self.width * 3 * self.hidden


MIXTRAL = Shape(rows=8192, width=4096, hidden=14336, experts=8, chosen=2)  # a layer of Mixtral 8x7B
SMALL = Shape(rows=64, width=32, hidden=64, experts=4, chosen=2)


class Layer(nn.Module):
    """Routing, and SwiGLU experts. Its loss makes every gradient different."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.up = nn.Parameter(torch.randn(shape.experts, 2 * shape.hidden, shape.width) * shape.width**-0.5)
        self.down = nn.Parameter(torch.randn(shape.experts, shape.width, shape.hidden) * shape.hidden**-0.5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        weights, chosen = torch.topk(torch.softmax(self.router(x), -1), self.shape.chosen)
        rows, ids = x.repeat_interleave(self.shape.chosen, 0), chosen.flatten()
        gate, up = quintnet.expert_linear(rows, ids, self.up).chunk(2, -1)
        outputs = quintnet.expert_linear(F.silu(gate) * up, ids, self.down)
        mixed = (outputs.view(-1, self.shape.chosen, x.shape[1]) * weights.unsqueeze(-1)).sum(1)
        return (x + mixed - target).float().pow(2).mean()


def run(setting: Setting) -> Iterator[Entry]:
    shape = SMALL if setting.emulated else MIXTRAL
    for name, value in vars(shape).items():
        yield Figures("setting", {"what": name, "value": value})
    builders: dict[str, Callable[[], Step]] = {name: lambda name=name: _ours(setting, shape, name) for name in OURS}  # type: ignore[misc]
    builders |= {
        "plain": lambda: _plain(setting, shape, torch.bfloat16, compiled=False),
        "compiled": lambda: _plain(setting, shape, torch.bfloat16, compiled=True),
        "compiled, float32 parameters": lambda: _plain(setting, shape, torch.float32, compiled=True),
        "inductor, bf16 parameters": lambda: _ours(setting, shape, "inductor", torch.bfloat16),
    }
    yield from compared(setting, "a layer", builders, ceiling(setting), shape.flops)
    step = _ours(setting, shape, "eager")
    step()
    waits = host_waits(setting, step)
    yield Figures("host waits of a step", {"count": len(waits), "where": ", ".join(dict.fromkeys(waits))})


def _layer(setting: Setting, shape: Shape, dtype: torch.dtype) -> tuple[Layer, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    with torch.device("cpu" if setting.emulated else setting.device):
        model = Layer(shape).to(dtype)
        batch = torch.randn(shape.rows, shape.width), torch.randn(shape.rows, shape.width)
    return model.to(setting.device), (batch[0].to(setting.device), batch[1].to(setting.device))


def _ours(setting: Setting, shape: Shape, engine: str, dtype: torch.dtype = torch.float32) -> Step:
    model, batch = _layer(setting, shape, dtype)
    batch = batch[0].to(dtype), batch[1]
    program = quintnet.compile(
        model,
        quintnet.Mesh(dp=1),
        batch,
        device=setting.device,
        backend=engine,  # type: ignore[arg-type]
        precision="model" if dtype == torch.bfloat16 else "bf16",
        check="off",
    )

    def step() -> None:
        program.step(batch)
        program.zero_grad()

    return step


class Cast(nn.Module):
    """A layer whose parameters are cast to bf16 in each forward."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        parameters = {name: parameter.bfloat16() for name, parameter in self.layer.named_parameters()}
        loss: Tensor = torch.func.functional_call(self.layer, parameters, (x, target))
        return loss


def _plain(setting: Setting, shape: Shape, dtype: torch.dtype, *, compiled: bool) -> Step:
    layer, batch = _layer(setting, shape, dtype)
    model = Cast(layer) if dtype == torch.float32 else layer
    run = torch.compile(model) if compiled else model

    def step() -> None:
        run(batch[0].bfloat16(), batch[1]).backward()
        model.zero_grad()

    return step
