"""Measure this machine: how long operators and collectives take, as :class:`..cost_models.calibration.Calibration`.

As many processes measure at once as a program would use, because they share memory and cores.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.mesh import Mesh
from ..cost_models.calibration import Calibration, MeasuredCollective, MeasuredMatmul, Point
from ..runtime.launch.accelerator import group_accelerator
from ..runtime.launch.launch import launch
from ..runtime.transport.connections import Connection
from ..runtime.transport.distributed import DistributedTransport, device_mesh
from ..runtime.transport.transport import VALUES

aten = torch.ops.aten
SIDES = (32, 128, 512, 2048)  # of matrix products
MOST_FLOPS = 1.2e9  # of one of them
ROWS = (4, 64, 1024, 8192)  # of 256 columns each: the sizes of what operators read
MESSAGES = (2**9, 2**13, 2**16, 2**19, 2**22)  # bytes
TRIAL_SECONDS, TRIALS = 0.004, 5
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class CalibrationEffort:
    """How much to measure: ``trials`` of at least ``seconds`` each, of which the median counts; products of all
    ``sides`` with at most ``most_flops``, everything in ``dtype``."""

    trials: int = TRIALS
    seconds: float = TRIAL_SECONDS
    sides: tuple[int, ...] = SIDES
    rows: tuple[int, ...] = ROWS
    messages: tuple[int, ...] = MESSAGES
    most_flops: float = MOST_FLOPS
    dtype: torch.dtype = torch.float32


def calibrate(
    ranks: Sequence[int] = (2,), effort: CalibrationEffort | None = None, *, timeout: float = 600.0
) -> Calibration:
    """Measure operators with as many processes as there are cores (at most two), collectives over each of ``ranks``.

    Raises:
        RunError: QN302 if a process fails.
    """
    effort = effort or CalibrationEffort()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    together = 1 if torch.cuda.is_available() else min(2, cores)
    local = launch(_operators, together, (effort,), timeout=timeout)
    found = [_median(measured) for measured in zip(*(one[0] for one in local), strict=True)]
    products, operators, view = _sorted(local[0][1], found)
    collectives: list[MeasuredCollective] = []
    for count in sorted(set(ranks)):
        collectives += launch(_collectives, count, (effort, count), timeout=timeout)[0]
    gpu = torch.cuda.is_available()
    return Calibration(
        machine=torch.cuda.get_device_name() if gpu else f"{platform.machine()}, {cores} cores",
        torch=torch.__version__,
        device="cuda" if gpu else "cpu",
        dtype=str(effort.dtype).removeprefix("torch."),
        cores=0 if gpu else cores,
        overlaps=gpu,
        action_seconds=operators["action"][0].seconds,
        view_seconds=view,
        products=tuple(products),
        operators={name: points for name, points in operators.items() if name != "action"},
        collectives=tuple(collectives),
    )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


@dataclass(frozen=True)
class Sample:
    """What is measured: a product (its order and sizes), an operator (its family and size), or a view."""

    family: str
    size: float = 0.0
    sides: tuple[int, int, int] = (0, 0, 0)


def _sorted(
    samples: Sequence[Sample], seconds: Sequence[float]
) -> tuple[list[MeasuredMatmul], dict[str, tuple[Point, ...]], float]:
    products: list[MeasuredMatmul] = []
    operators: dict[str, list[Point]] = {}
    view = 1e-7
    for sample, took in zip(samples, seconds, strict=True):
        if sample.family in ("nn", "nt", "tn"):
            m, k, n = sample.sides
            products.append(MeasuredMatmul(order=sample.family, m=m, k=k, n=n, seconds=took))  # type: ignore[arg-type]
        elif sample.family == "view":
            view = took
        else:
            operators.setdefault(sample.family, []).append(Point(size=sample.size, seconds=took))
    return products, {name: tuple(sorted(found, key=lambda p: p.size)) for name, found in operators.items()}, view


# -- in each process


def _operators(effort: CalibrationEffort) -> tuple[list[float], list[Sample]]:
    device = _device()
    taken: list[float] = []
    samples: list[Sample] = []
    with torch.no_grad():
        for sample, call in _calls(effort, device):
            samples.append(sample)
            taken.append(timed(call, effort, device))
    return taken, samples


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def timed(call: Callable[[], object], effort: CalibrationEffort, device: torch.device) -> float:
    """Seconds of one call: the median of several trials."""
    call()
    count = 1
    while (took := _trial(call, count, device)) < effort.seconds:
        count = max(count + 1, int(count * min(10.0, 1.2 * effort.seconds / max(took, 1e-9))))
    return statistics.median(_trial(call, count, device) / count for _ in range(effort.trials))


def _trial(call: Callable[[], object], count: int, device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    _synchronize(device)
    return time.perf_counter() - start


def _group_device() -> torch.device:
    """Where processes communicate: with fewer accelerators than processes, on the CPU."""
    return group_accelerator() or torch.device("cpu")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Case = tuple[Sample, Callable[[], object]]


def _calls(effort: CalibrationEffort, device: torch.device) -> list[Case]:
    small, dtype = torch.randn(8, 8, device=device), effort.dtype
    found: list[Case] = [(Sample("view"), lambda: torch.transpose(small, 0, 1)), _action(small)]
    for m in effort.sides:
        for k in effort.sides:
            for n in effort.sides:
                if 2.0 * m * k * n <= effort.most_flops:
                    found += _products(m, k, n, device, dtype)
    for rows in effort.rows:
        found += _elementwise(rows, 256, device, dtype)
    return found + _attentions(device, dtype, max(effort.rows))


def _action(x: Tensor, arguments: int = 64) -> Case:
    """What a schedule's action takes besides its nodes: a generated function is called, and what it returns is kept."""
    graph = torch.fx.Graph()
    names = [graph.placeholder(f"value_{index}") for index in range(arguments)]
    graph.output(tuple(names))
    module = torch.fx.GraphModule({}, graph)
    kept: dict[str, Tensor] = {}

    def call() -> None:
        kept.update(zip([str(name) for name in names], module(*[x] * arguments), strict=True))

    return Sample("action", float(arguments)), call


def _products(m: int, k: int, n: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    shapes = (m, k), (k, n), (k, m), (n, k), (n,)
    a, b, at, bt, bias = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    return [
        (Sample("nn", sides=(m, k, n)), lambda: torch.mm(a, b)),
        (Sample("nt", sides=(m, k, n)), lambda: F.linear(a, bt, bias)),
        (Sample("tn", sides=(m, k, n)), lambda: torch.mm(at.t(), b)),
    ]


def _elementwise(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    x, y = (torch.randn(rows, columns, device=device, dtype=dtype) for _ in range(2))
    scale = torch.randn(columns, device=device, dtype=dtype)
    ids = torch.randint(0, rows, (rows,), device=device)
    size = float(x.nbytes)
    _, mean, rstd = torch.native_layer_norm(x, [columns], scale, scale, 1e-5)
    soft = torch.log_softmax(x, -1)
    norm = aten.native_layer_norm_backward.default
    return [
        (Sample("add", 3 * size), lambda: torch.add(x, y)),
        (Sample("copy", 2 * size), lambda: x.clone()),
        (Sample("sum", size), lambda: torch.sum(x, [0])),
        (Sample("tanh", 2 * size), lambda: torch.tanh(x)),
        (Sample("gelu", 2 * size), lambda: F.gelu(x)),
        (Sample("gelu_backward", 3 * size), lambda: aten.gelu_backward.default(y, x)),
        (Sample("layer_norm", 2 * size), lambda: torch.native_layer_norm(x, [columns], scale, scale, 1e-5)),
        (
            Sample("layer_norm_backward", 3 * size),
            lambda: norm(y, x, [columns], mean, rstd, scale, scale, [True, True, True]),
        ),
        (Sample("softmax", 2 * size), lambda: torch.log_softmax(x, -1)),
        (Sample("softmax_backward", 3 * size), lambda: aten._log_softmax_backward_data.default(y, soft, -1, x.dtype)),
        (Sample("embedding", 2 * size), lambda: torch.embedding(x, ids)),
        (
            Sample("embedding_backward", 2 * size),
            lambda: aten.embedding_dense_backward.default(y, ids, rows, -1, False),
        ),
    ]


def _attentions(device: torch.device, dtype: torch.dtype, most: int) -> list[Case]:
    """Forward and backward, by arithmetic; causal, which counts half of the keys."""
    found: list[Case] = []
    for batch, length in ((1, 32), (4, 64), (4, 128), (8, 256), (16, 256)):
        if batch * length > most:
            continue
        q, k, v = (torch.randn(batch, 4, length, 32, device=device, dtype=dtype) for _ in range(3))
        flops = 2.0 * batch * 4 * length * length * 64 * 0.5
        found.append((Sample("attention", flops), _attend(q, k, v)))
        found.append((Sample("attention_backward", 2.5 * flops), _attend_backward(q, k, v)))
    return found


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attend_backward(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _collectives(effort: CalibrationEffort, count: int) -> list[MeasuredCollective]:
    """Over all processes, through the transport that programs use. Times of several are told apart by a meeting."""
    device = _group_device()
    mesh = Mesh(pp=count, tp=1)
    transport = DistributedTransport(mesh, device_mesh(mesh, device.type))
    transport.connect([Connection(VALUES, 0, 1), Connection(VALUES, 1, 0)])
    found = []
    for name in COLLECTIVES:
        points = [
            Point(size=size, seconds=_collective(transport, name, size, count, effort)) for size in effort.messages
        ]
        found.append(MeasuredCollective(name=name, ranks=count, points=tuple(points)))
    points = [Point(size=size, seconds=_send(transport, size, effort)) for size in effort.messages]
    return [*found, MeasuredCollective(name="send", ranks=count, points=tuple(points))]


def _collective(transport: DistributedTransport, name: str, size: int, count: int, effort: CalibrationEffort) -> float:
    """``size``: of the full tensor."""
    rows = max(count, size // (4 * 64) // count * count)
    whole = torch.zeros(rows, 64, device=_group_device())
    part = whole[: rows // count].contiguous()
    calls: dict[str, Callable[[], Tensor]] = {
        "all_reduce": lambda: transport.run("all_reduce", whole, "pp", 0),
        "all_gather": lambda: transport.run("all_gather", part, "pp", 0, 1, 0),
        "reduce_scatter": lambda: transport.run("reduce_scatter", whole, "pp", 0, 1, 0),
        "all_to_all": lambda: transport.run("all_to_all", part.view(-1, 64), "pp", 0, 1, 1, 1, 0),
    }
    return _met(transport, calls[name], 20 if size < 2**20 else 5, effort)


def _met(transport: DistributedTransport, call: Callable[[], object], repeats: int, effort: CalibrationEffort) -> float:
    meet = torch.zeros(1, device=_group_device())
    everyone = tuple(range(transport.mesh.size))
    call()
    times = []
    for _ in range(effort.trials):
        transport.start_sum(meet, everyone, "start")()
        times.append(_trial(call, repeats, _group_device()) / repeats)
    taken = torch.tensor([statistics.median(times)], device=_group_device())
    return float(transport.start_sum(taken, everyone, "mean")()) / len(everyone)


def _send(transport: DistributedTransport, size: int, effort: CalibrationEffort) -> float:
    """There and back between the first two ranks; the others only meet."""
    x = torch.zeros(size // 4, device=_group_device())

    def there_and_back() -> None:
        other = 1 - transport.rank
        if transport.rank == 0:
            transport.send(x, other, VALUES, "")()
            transport.receive(tuple(x.shape), x.dtype, other, VALUES, "")()
        elif transport.rank == 1:
            transport.receive(tuple(x.shape), x.dtype, other, VALUES, "")()
            transport.send(x, other, VALUES, "")()

    pairs = 2.0 if transport.mesh.size == 2 else 2.0 * 2 / transport.mesh.size  # the mean counts those that do nothing
    return max(1e-7, _met(transport, there_and_back, 10, effort) / pairs)
