"""Measure this machine: how long operators and collectives take, as :class:`..cost_models.calibration.Calibration`.

As many processes measure at once as a program would use, because they share memory and cores.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.mesh import Mesh
from ..cost_models.calibration import Calibration, MeasuredCollective, MeasuredMatmul, Point
from ..runtime.execute.malloc import tune_malloc
from ..runtime.launch.accelerator import group_accelerator
from ..runtime.launch.launch import launch
from ..runtime.transport.connections import Connection
from ..runtime.transport.distributed import DistributedTransport, device_mesh
from ..runtime.transport.transport import VALUES

aten = torch.ops.aten
SIDES = (32, 128, 512, 2048)  # of matrix products
MOST_FLOPS = 1.2e9  # of one of them
ROWS = (4, 64, 1024, 8192)  # of 256 columns each: the sizes of what operators read
MESSAGES = (2**9, 2**13, 2**16, 2**19, 2**22, 2**25)  # bytes
POOL = 2**23  # bytes of operands that take turns: more than a core's own caches hold, and less than all share
MOST_TURNS = 256
TRIAL_SECONDS, TRIALS = 0.004, 5
ATTENTIONS = (  # rows, heads, length, features of a head
    (1, 4, 32, 32), (4, 4, 64, 32), (4, 4, 128, 32), (8, 4, 256, 32), (16, 4, 256, 32),
    (4, 16, 1024, 128), (4, 16, 2048, 128), (4, 16, 4096, 128),
)  # fmt: skip
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class CalibrationEffort:
    """The amount to measure: ``trials`` of at least ``seconds``, products of ``sides`` with at most ``most_flops``.

    ``pool``: bytes of operands that take turns. ``alone``: other programs of the machine wait (Linux, as root).
    """

    trials: int = TRIALS
    seconds: float = TRIAL_SECONDS
    sides: tuple[int, ...] = SIDES
    rows: tuple[int, ...] = ROWS
    messages: tuple[int, ...] = MESSAGES
    most_flops: float = MOST_FLOPS
    dtype: torch.dtype = torch.float32
    pool: int = POOL
    alone: bool = False


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
    medians = [_median(measured) for measured in zip(*(seconds for seconds, _ in local), strict=True)]
    products, operators, view = _sorted(local[0][1], medians)
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
    """A measured call: a product (its order and sizes), an operator (its family and size), or a view."""

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
    return products, {name: tuple(sorted(points, key=lambda p: p.size)) for name, points in operators.items()}, view


# -- in each process


def _operators(effort: CalibrationEffort) -> tuple[list[float], list[Sample]]:
    device = _device()
    tune_malloc()  # as programs do
    if effort.alone:
        run_alone()
    taken: list[float] = []
    samples: list[Sample] = []
    with torch.no_grad():
        for sample, call in _calls(effort, device):
            samples.append(sample)
            taken.append(timed(call, effort, device))
    return taken, samples


def run_alone(wanted: bool = True) -> None:
    """Let all threads of this process run before those of all usual processes (``SCHED_FIFO``), none of them before
    another; or as usual again. Linux leaves others a twentieth of each second.

    Raises:
        PermissionError: for whom may not ask for that; OSError: where the system has no such thing.
    """
    policy = os.SCHED_FIFO if wanted else os.SCHED_OTHER
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), policy, os.sched_param(int(wanted)))


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
    """Return the device with which processes communicate: with fewer accelerators than processes, the CPU."""
    return group_accelerator() or torch.device("cpu")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Case = tuple[Sample, Callable[[], object]]


class _Operands:
    """Parts of one piece of memory that is larger than any cache, one after the other: what an operator of a step reads
    and writes is seldom in a cache. Results of earlier calls are kept, so that new ones lie elsewhere too."""

    def __init__(self, effort: CalibrationEffort, device: torch.device) -> None:
        self.pool = torch.randn(effort.pool // effort.dtype.itemsize, device=device, dtype=effort.dtype)
        self.device, self.at = device, 0

    def __call__(self, *shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        if size > len(self.pool):
            return torch.randn(shape, device=self.device, dtype=self.pool.dtype)
        self.at = 0 if self.at + size > len(self.pool) else self.at
        self.at += -(-size // 16) * 16  # a line of the cache, of 32-bit numbers
        return self.pool[self.at - -(-size // 16) * 16 :][:size].view(shape)

    def turns(self, size: float, make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
        """Return calls of ``make()`` that take turns; ``size``: bytes that one of them reads and writes."""
        calls = [make() for _ in range(max(1, min(MOST_TURNS, int(self.pool.nbytes / max(size, 1.0)))))]
        results: list[object] = [None] * len(calls)
        order = itertools.cycle(range(len(calls)))

        def call() -> None:
            index = next(order)
            results[index] = calls[index]()

        return call


def _calls(effort: CalibrationEffort, device: torch.device) -> Iterator[Case]:
    small, operands = torch.randn(8, 8, device=device), _Operands(effort, device)
    yield Sample("view"), lambda: torch.transpose(small, 0, 1)
    yield _action(small)
    for m in effort.sides:
        for k in effort.sides:
            for n in effort.sides:
                if 2.0 * m * k * n <= effort.most_flops:
                    yield from _products(m, k, n, operands)
    for rows in effort.rows:
        yield from _elementwise(rows, 256, operands)
    yield from _attentions(operands, effort.most_flops)


def _action(x: Tensor, arguments: int = 64) -> Case:
    """Return a schedule's action without its nodes: a generated function is called, and its results are kept."""
    graph = torch.fx.Graph()
    names = [graph.placeholder(f"value_{index}") for index in range(arguments)]
    graph.output(tuple(names))
    module = torch.fx.GraphModule({}, graph)
    results: dict[str, Tensor] = {}

    def call() -> None:
        results.update(zip([str(name) for name in names], module(*[x] * arguments), strict=True))

    return Sample("action", float(arguments)), call


def _products(m: int, k: int, n: int, new: _Operands) -> Iterator[Case]:
    size = new.pool.element_size() * (m * k + k * n + m * n)

    def plain() -> Callable[[], object]:
        a, b = new(m, k), new(k, n)
        return lambda: torch.mm(a, b)

    def linear() -> Callable[[], object]:
        a, b, bias = new(m, k), new(n, k), new(n)
        return lambda: F.linear(a, b, bias)

    def turned() -> Callable[[], object]:
        a, b = new(k, m), new(k, n)
        return lambda: torch.mm(a.t(), b)

    for order, make in (("nn", plain), ("nt", linear), ("tn", turned)):
        yield Sample(order, sides=(m, k, n)), new.turns(size, make)


def _elementwise(rows: int, columns: int, new: _Operands) -> Iterator[Case]:
    scale, ids = new(columns), torch.randint(0, rows, (rows,), device=new.device)
    size = float(rows * columns * new.pool.element_size())
    _, mean, rstd = torch.native_layer_norm(new(rows, columns), [columns], scale, scale, 1e-5)
    norm, soft, dtype = aten.native_layer_norm_backward.default, aten._log_softmax_backward_data.default, new.pool.dtype

    def one(operator: Callable[[Tensor], object]) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            x = new(rows, columns)
            return lambda: operator(x)

        return make

    def two(operator: Callable[[Tensor, Tensor], object]) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            x, y = new(rows, columns), new(rows, columns)
            return lambda: operator(x, y)

        return make

    for name, moved, make in (
        ("add", 3, two(torch.add)),
        ("copy", 2, one(torch.clone)),
        ("sum", 1, one(lambda x: torch.sum(x, [0]))),
        ("tanh", 2, one(torch.tanh)),
        ("gelu", 2, one(F.gelu)),
        ("gelu_backward", 3, two(aten.gelu_backward.default)),
        ("layer_norm", 2, one(lambda x: torch.native_layer_norm(x, [columns], scale, scale, 1e-5))),
        ("layer_norm_backward", 3,
         two(lambda x, y: norm(y, x, [columns], mean, rstd, scale, scale, [True, True, True]))),
        ("softmax", 2, one(lambda x: torch.log_softmax(x, -1))),
        ("softmax_backward", 3, two(lambda x, y: soft(y, x, -1, dtype))),
        ("embedding", 2, one(lambda x: torch.embedding(x, ids))),
        ("embedding_backward", 2, one(lambda x: aten.embedding_dense_backward.default(x, ids, rows, -1, False))),
    ):  # fmt: skip
        yield Sample(name, moved * size), new.turns(moved * size, make)


def _attentions(new: _Operands, most_flops: float) -> Iterator[Case]:
    """Forward and backward, by arithmetic; causal, which counts half of the keys. The backward has 2.5 times the
    arithmetic, ``most_flops`` of it at most."""
    for shape in ATTENTIONS:
        batch, heads, length, features = shape
        size, flops = new.pool.element_size() * math.prod(shape), 2.0 * batch * heads * length * length * features
        if 2.5 * flops > most_flops:
            continue

        def forward(shape: tuple[int, ...] = shape) -> Callable[[], object]:
            return _attend(*(new(*shape) for _ in range(3)))

        def backward(shape: tuple[int, ...] = shape) -> Callable[[], object]:
            return _attend_backward(*(new(*shape) for _ in range(4)))

        yield Sample("attention", flops), new.turns(4.0 * size, forward)
        yield Sample("attention_backward", 2.5 * flops), new.turns(8.0 * size, backward)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attend_backward(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Callable[[], object]:
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _collectives(effort: CalibrationEffort, count: int) -> list[MeasuredCollective]:
    """Measure collectives over all processes, through the transport of programs; a meeting separates calls."""
    device = _group_device()
    mesh = Mesh(pp=count, tp=1)
    transport = DistributedTransport(mesh, device_mesh(mesh, device.type))
    transport.connect([Connection(VALUES, 0, 1), Connection(VALUES, 1, 0)])
    if effort.alone:
        run_alone()
    measured = []
    for name in COLLECTIVES:
        points = [
            Point(size=size, seconds=_collective(transport, name, size, count, effort)) for size in effort.messages
        ]
        measured.append(MeasuredCollective(name=name, ranks=count, points=tuple(points)))
    points = [Point(size=size, seconds=_send(transport, size, effort)) for size in effort.messages]
    return [*measured, MeasuredCollective(name="send", ranks=count, points=tuple(points))]


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
