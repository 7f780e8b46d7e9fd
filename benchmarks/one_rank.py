"""One rank's program of a large plan, alone on one device: model FLOP utilisation against what products reach there.

python benchmarks/one_rank.py [--model llama-70b|tiny|small|medium] [--mesh tp=8,pp=8] [--microbatches 8] [--rows 8]
                              [--rank R] [--steps 5] [--peers eager,inductor,plain,compiled]
                              [--precision model|bf16] [--json]

Nothing is sent: what other ranks would send is made up, with the copies that a real transfer makes on this rank. So
this is the time of everything but communication. ``plain`` is one device's module with this rank's share of heads and
hidden units, under autograd; ``compiled`` is the same under torch.compile. FLOPs are those of products and attention
(counted whole, as it is written) by torch's own counter. ``--precision bf16`` is how users train: float32 parameters
and sums of gradients, computing in bf16; ``model`` has one dtype for everything, as ``plain`` and ``compiled`` have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from models import SIZES, Block, Llama, Size, loss_fn, rotary_tables
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import quintnet
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.core import slices
from quintnet_compiler.core.sharding import local_shape
from quintnet_compiler.driver.compiler import Runner, compile_program
from quintnet_compiler.driver.pipeline import Request
from quintnet_compiler.ir.distributed_program import DistributedProgram, RankProgram
from quintnet_compiler.runtime.execute.engines import ENGINES
from quintnet_compiler.runtime.execute.executor import Executor, Run
from quintnet_compiler.runtime.execute.gradient_kernels import gradient_store
from quintnet_compiler.runtime.execute.malloc import tune_malloc
from quintnet_compiler.runtime.execute.whole_steps import step_function
from quintnet_compiler.runtime.transport.local import LocalTransport, LocalWorld
from quintnet_compiler.runtime.transport.transport import Wait

MODELS = SIZES | {
    "llama-70b": Size(dim=8192, layers=80, heads=64, kv_heads=8, hidden=28672, vocab=128256, sequence=4096),
}
Step = Callable[[], object]


class Alone(LocalTransport):
    """A rank whose peers are made up: they have what it has."""

    def __init__(self, program: DistributedProgram, rank: int, device: torch.device) -> None:
        world = LocalWorld(program.mesh, program.sites)
        world.present = frozenset([rank])
        super().__init__(world, rank)
        self.device = device
        self.made: dict[tuple[Any, ...], Tensor] = {}

    def _meet(self, kind: str, x: Tensor, ranks: tuple[int, ...], label: str, *detail: Any, runs: Any = None) -> Tensor:
        if kind == "sum":  # others add up meanwhile
            return x.clone()
        if kind == "scatter":
            return slices.slice_of_rank(x, *detail, len(ranks), ranks.index(self.rank)).clone()
        return super()._meet(kind, x, ranks, label, *detail, runs=runs)

    def start_sum(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        return lambda: x

    def send(self, x: Tensor, to: int, channel: int, label: str) -> Wait:
        return lambda: x

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, channel: int, label: str) -> Wait:
        key = *shape, dtype
        if key not in self.made:
            self.made[key] = _random(shape, dtype, self.device)
        return self.made[key].clone


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, below: int = 2) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).mul_(0.02).to(dtype)
    return torch.randint(below, shape, dtype=dtype, device=device)


def ours(program: DistributedProgram, part: RankProgram, device: torch.device, size: Size, engine: str) -> Step:
    """Steps of one rank. Parameters have random values."""
    transport = Alone(program, part.rank, device)
    sizes = [axis.size for axis in program.axes]
    mine = {name for stage in part.stages for name in stage.state.values()}
    state = {
        spec.name: _random(tuple(local_shape(spec.shape, spec.sharding, sizes)), spec.dtype, device)
        for spec in program.state.values()
        if spec.name in mine
    }
    inputs = [
        _random(tuple(local_shape(spec.shape, spec.sharding, sizes)), spec.dtype, device, size.vocab)
        for spec in program.inputs
    ]
    runs = ENGINES[engine].make()
    store = gradient_store(program, part, transport, device, runs)
    if device.type == "cpu":
        tune_malloc()  # as programs do
    run_step = step_function(Executor(program, part, transport, device, store, runs))

    def step() -> object:
        with torch.no_grad():
            return run_step(state, inputs, Run(train=True, check_finite=False))

    return step


class Blocks(nn.Module):
    """Blocks of one rank's width: its heads and hidden units, on whole sequences."""

    def __init__(self, size: Size, tensor: int, count: int) -> None:
        super().__init__()
        mine = replace(size, hidden=size.hidden // tensor)
        self.layers = nn.ModuleList(Block(mine) for _ in range(count))
        for block in self.layers:
            at = block.attention
            for name, heads in (("q", size.heads), ("k", size.kv_heads), ("v", size.kv_heads)):
                setattr(at, name, nn.Linear(size.dim, max(1, heads // tensor) * size.head_dim, bias=False))
            at.o = nn.Linear(size.heads // tensor * size.head_dim, size.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def plain(
    size: Size, tensor: int, count: int, shape: tuple[int, ...], device: torch.device, *, compiled: bool, times: int
) -> Step:
    """Forward and backward of the same blocks on ``times`` microbatches of ``shape``, under autograd."""
    dtype = _dtype(device)
    with torch.device(device):
        model = Blocks(size, tensor, count).to(dtype)
    cos, sin = (x.to(device, dtype) for x in rotary_tables(size.sequence, size.head_dim))
    run = torch.compile(model) if compiled else model
    x, grad = _random(shape, dtype, device).requires_grad_(), _random(shape, dtype, device)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        for _ in range(times):
            x.grad = None
            run(x, cos, sin).backward(grad)

    return step


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _seconds(step: Step, device: torch.device) -> float:
    _settle(device)
    start = time.perf_counter()
    step()
    _settle(device)
    return time.perf_counter() - start


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def ceiling(device: torch.device, side: int) -> float:
    """FLOP/s of square products."""
    a, b = (_random((side, side), _dtype(device), device) for _ in range(2))
    seconds = [_seconds(lambda: a @ b, device) for _ in range(12)]
    return float(2 * side**3 / statistics.median(seconds[2:]))


def program_of(
    size: Size, mesh: quintnet.Mesh, plan: quintnet.Plan, rows: int, device: torch.device
) -> DistributedProgram:
    """The program for batches of ``rows`` sequences. The model has no values, and the plan's dtypes."""
    with torch.device("meta"):
        model = Llama(size).to(torch.float32 if plan.precision != "model" else _dtype(device))
        tokens = torch.zeros(rows, size.sequence, dtype=torch.long)
    request = Request(mesh, plan, rows, device)
    return compile_program(capture(model, (tokens, tokens), loss_fn), request, Runner()).program


def blocks_of(part: RankProgram) -> int:
    """Return the number of the model's blocks on a rank."""
    names = [name for stage in part.stages for name in stage.state.values()]
    return len({name.split(".")[1] for name in names if name.startswith("layers.")})


def builders(
    program: DistributedProgram, part: RankProgram, size: Size, rows: int, device: torch.device
) -> dict[str, Callable[[], Step]]:
    """Return builders of each peer's step: the engines of a program, and torch's own two."""
    mesh, times = program.mesh, program.schedule.num_microbatches
    shape = (rows // times // mesh["dp"], size.sequence, size.dim)
    blocks = blocks_of(part)
    peers: dict[str, Callable[[], Step]] = {name: partial(ours, program, part, device, size, name) for name in ENGINES}
    for name in ("plain", "compiled"):
        compiled = name == "compiled"
        peers[name] = partial(plain, size, mesh["tp"], blocks, shape, device, compiled=compiled, times=times)
    return peers


def flops_of(name: str, step: Step, peers: Mapping[str, Callable[[], Step]]) -> int:
    """FLOPs of a step of the peer ``name``: of code that is compiled or captured, those of what it was made from."""
    with FlopCounterMode(display=False) as counter:
        (step if name in ("eager", "plain") else peers["eager" if name in ENGINES else "plain"]())()
    return int(counter.get_total_flops())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds and utilisation of each peer."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(kind.type, 0) if kind is not None else torch.device("cpu")
    size, mesh = MODELS[args.model], quintnet.Mesh(**{k: int(n) for k, n in (a.split("=") for a in args.mesh)})
    start = time.perf_counter()
    plan = quintnet.Plan(microbatches=args.microbatches, precision=args.precision)
    program = program_of(size, mesh, plan, args.rows, device)
    compile_seconds = time.perf_counter() - start
    part = program.rank(mesh.rank({"pp": mesh["pp"] // 2}) if args.rank is None else args.rank)
    peers = builders(program, part, size, args.rows, device)
    top = ceiling(device, 8192 if device.type != "cpu" else 512)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "model": args.model,
        "mesh": str(mesh),
        "rank": part.rank,
        "blocks": blocks_of(part),
        "compile_seconds": compile_seconds,
        "ceiling_tflops": top / 1e12,
        "peers": {},
    }
    for name in args.peers.split(","):
        step = peers[name]()
        first = _seconds(step, device)
        flops = flops_of(name, step, peers)
        seconds = statistics.median([_seconds(step, device) for _ in range(args.steps)])
        report["peers"][name] = {
            "ms": 1e3 * seconds,
            "first_step_seconds": first,
            "tflop": flops / 1e12,
            "utilisation": flops / seconds / top,
        }
    return report


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--model", choices=MODELS, default="llama-70b" if torch.cuda.is_available() else "small")
    options.add_argument("--mesh", type=lambda text: text.split(","), default="tp=8,pp=8")
    options.add_argument("--microbatches", type=int, default=8)
    options.add_argument("--rows", type=int, default=8)
    options.add_argument("--rank", type=int)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--peers", default="eager,inductor,plain,compiled")
    options.add_argument("--precision", choices=("model", "bf16"), default="model")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    found = measure(given)
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        print("{model} {mesh}, rank {rank} ({blocks} blocks), {device}, torch {torch}".format(**found))
        print(
            "products of this device: {ceiling_tflops:.2f} TFLOP/s; compiled in {compile_seconds:.1f} s".format(**found)
        )
        for name, row in found["peers"].items():
            print(
                f"{name:<10}{row['ms']:>10.1f} ms/step{row['tflop']:>9.3f} TFLOP"
                f"{100 * row['utilisation']:>7.1f}% of products   first step {row['first_step_seconds']:.1f} s"
            )
