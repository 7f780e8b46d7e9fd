"""What sizes that do not divide cost: a rank's memory and what it sends are those of full chunks, by closed forms that
the program's own report and the counters of processes equal byte by byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.core.annotations import num_bytes, values
from quintnet_compiler.ops.collectives import COLLECTIVES, STARTS
from quintnet_compiler.runtime.transport.distributed import DistributedTransport
from quintnet_compiler.simulation.rehearsal import rehearse

from .models import EXPERTS, WIDTH, Mixture
from .test_uneven_zero import Odd

torch.set_num_threads(1)
VOCAB, HEADS, SIZE, POSITIONS = 50257, 4, 2, 17
FLOAT, INT = 8, 8  # bytes of float64 and int64


def chunk(size: int, ranks: int) -> int:
    """How many of ``size`` indices every rank has room for."""
    return -(-size // ranks)


class Head(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(ids)), labels)


class Heads(nn.Module):
    """Attention behind a linear layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(HEADS, SIZE, width) * 0.3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k, v = (torch.einsum("btw,hsw->bhts", x, one) for one in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (x + torch.einsum("bhts,hsw->btw", y, self.o)).square().mean()


class Layers(nn.Module):
    """The same with linear layers, which a context axis always splits."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k, v = (each(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (x + self.o(y.transpose(1, 2).flatten(2))).square().mean()


@dataclass(frozen=True)
class Cost:
    """``parameters`` and ``gradients``: bytes that a rank holds. ``gives``: bytes that a rank gives to collectives of
    its program in a step, by their kind (of rows on their way to experts: the mean over ranks, as the report has it).
    ``sums``: bytes of gradients that it adds up with other ranks."""

    model: Callable[[], nn.Module]
    axes: Mapping[str, int]
    batch: tuple[Tensor, ...]
    parameters: int
    gradients: int
    gives: Mapping[str, int]
    sums: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def compiled(self) -> quintnet.CompiledProgram:
        torch.manual_seed(0)
        return quintnet.compile(self.model().double(), Mesh(**self.axes), self.batch, **self.options)


def _vocabulary(ranks: int, width: int = 4, rows: int = 2) -> Cost:
    """The table's rows and the head's are split. Rows of the width are added up, forward for the table and backward for
    the head; of each row of logits three numbers are gathered."""
    state = 2 * chunk(VOCAB, ranks) * width * FLOAT
    plan = {"parameters": {name: {"tp": "S(0)"} for name in ("table.weight", "head.weight")}}
    batch = torch.tensor([0, VOCAB - 1]), torch.tensor([VOCAB - 1, 25129])
    gives = {"all_reduce": 2 * rows * width * FLOAT, "all_gather": 3 * rows * FLOAT}
    options = {"plan": plan, "sequence_parallel": False}
    return Cost(Head, {"tp": ranks}, batch, state, state, gives, options=options)


def _heads(ranks: int, rows: int = 1, length: int = 5, width: int = 8) -> Cost:
    """Heads are split; what they make is added up, and backward the gradient of what they read."""
    state = (4 * chunk(HEADS, ranks) * SIZE * width + width * width) * FLOAT
    plan = {"parameters": {name: {"tp": "S(0)"} for name in "qkvo"} | {"first.weight": {"tp": "I"}}}
    batch = (torch.randn(rows, length, width, dtype=torch.float64),)
    gives = {"all_reduce": 2 * rows * length * width * FLOAT}
    options = {"plan": plan, "sequence_parallel": False}
    return Cost(Heads, {"tp": ranks}, batch, state, state, gives, options=options)


def _positions(ranks: int, rows: int = 2, width: int = 8) -> Cost:
    """Positions are split; keys and values are gathered, forward and again backward, and their gradients scattered."""
    state = 5 * width * width * FLOAT
    part = 2 * rows * HEADS * SIZE * chunk(POSITIONS, ranks) * FLOAT  # of keys and values
    batch = (torch.randn(rows, POSITIONS, width, dtype=torch.float64),)
    gives = {"all_gather": 2 * part, "reduce_scatter": ranks * part}
    return Cost(Layers, {"cp": ranks}, batch, state, state, gives, sums=state)


def _experts(ranks: int, rows: int = 12) -> Cost:
    """Experts are split, and each row of a rank goes to two of them: its number and itself, and back; backward, twice
    itself. Ranks tell each other how many rows come for each expert, and for none."""
    held = chunk(EXPERTS, ranks)
    own = held * (2 * WIDTH * WIDTH + 2 * WIDTH + WIDTH * WIDTH)
    rest = WIDTH * WIDTH + WIDTH + WIDTH * 8 + 8 + WIDTH * EXPERTS + EXPERTS
    routed = 2 * rows // ranks
    gives = {"rows": routed * INT + 4 * routed * WIDTH * FLOAT, "plan": ranks * (held + 1) * INT}
    batch = torch.randn(rows, WIDTH, dtype=torch.float64), torch.randint(0, 8, (rows,))
    buffer = EXPERTS * FLOAT
    return Cost(Mixture, {"ep": ranks}, batch, (own + rest) * FLOAT + buffer, (own + rest) * FLOAT, gives, rest * FLOAT)


def _slices(ranks: int, zero: int, width: int = 15) -> Cost:
    """Of each matrix every rank has a chunk of its rows. They are gathered once, or in the forward and the backward
    (which does not read the first), and their gradients scattered."""
    part, count = chunk(width, ranks) * width * FLOAT, 4
    whole = count * ranks * part
    batch = (torch.randn(4 * ranks, width, dtype=torch.float64),)
    if zero == 1:
        return Cost(Odd, {"dp": ranks}, batch, whole, whole, {"gather": count * part}, whole, {"zero": 1})
    gives = {"all_gather": (2 * count - 1) * part, "reduce_scatter": whole}
    return Cost(Odd, {"dp": ranks}, batch, count * part, count * part, gives, options={"zero": 3})


COSTS: Mapping[str, Callable[[], Cost]] = {
    "vocabulary, tp=2": lambda: _vocabulary(2),
    "vocabulary, tp=4": lambda: _vocabulary(4),
    "heads, tp=3": lambda: _heads(3),
    "positions, cp=2": lambda: _positions(2),
    "experts, ep=3": lambda: _experts(3),
    "zero=1, dp=2": lambda: _slices(2, 1),
    "zero=3, dp=2": lambda: _slices(2, 3),
    "zero=3, dp=4": lambda: _slices(4, 3),
}
KINDS = {
    "all_reduce_": "all_reduce", "gather_together": "all_gather", "scatter_together": "reduce_scatter",
    "gather_states": "gather", "gather_early": "gather", "dispatch": "rows", "combine": "rows",
}  # fmt: skip


def _told(program: quintnet.CompiledProgram) -> Counter[str]:
    """What the program's own graph says that a rank gives."""
    begun = {start: op for op, start in STARTS.items()}
    names = {one.op: one.name for one in COLLECTIVES.values()}
    told: Counter[str] = Counter()
    for node in program._primary().program.source.graph.nodes:
        name = names.get(begun.get(node.target, node.target))
        if name is None or (name == "all_reduce_" and values(node)[0].shape == ()):  # the loss
            continue
        first: Any = node.args[0]
        given = first if isinstance(first, (list, tuple)) else [first]
        if name == "dispatch_plan":
            told["plan"] += num_bytes(values(node)[1]) // 2
        else:
            told[KINDS.get(name, name)] += sum(num_bytes(values(x)[0]) for x in given)
    return told


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", COSTS)
def test_the_report_equals_the_closed_forms(name: str) -> None:
    cost = COSTS[name]()
    program = cost.compiled()
    (found,) = rehearse(program._primary().program)
    assert (found.parameters, found.gradients) == (cost.parameters, cost.gradients)
    assert _told(program) == cost.gives


# -- processes


def _counted(names: list[str]) -> list[tuple[int, Counter[str], int]]:
    """For each case: the bytes of a rank's parameters, what it gave to collectives in a step, and to sums of
    gradients."""
    torch.set_num_threads(1)
    sent: Counter[str] = Counter()
    begin, gather = DistributedTransport._begin, DistributedTransport.begin_gather
    add, scatter = DistributedTransport.start_sum, DistributedTransport.start_scatter

    def begun(self: Any, collective: str) -> Any:
        started, kind = begin(self, collective), KINDS.get(collective, collective)

        def call(x: Any, *rest: Any, **more: Any) -> Any:
            given = [x] if isinstance(x, Tensor) else x
            told = "plan" if kind == "exchange_rows" and x.dim() == 2 and x.dtype is torch.int64 else kind
            if any(one.dim() for one in given):  # no loss
                sent["rows" if told == "exchange_rows" else told] += sum(one.nbytes for one in given)
            return started(x, *rest, **more)

        return call

    def gathered(self: Any, xs: Any, *rest: Any) -> Any:
        sent["gather"] += sum(x.nbytes for x in xs)
        return gather(self, xs, *rest)

    def summed(how: Any) -> Any:
        def call(self: Any, x: Tensor, ranks: Any, label: str) -> Any:
            sent["sums"] += x.nbytes if label.startswith("gradients") else 0
            return how(self, x, ranks, label)

        return call

    DistributedTransport._begin, DistributedTransport.begin_gather = begun, gathered  # type: ignore[method-assign]
    DistributedTransport.start_sum, DistributedTransport.start_scatter = summed(add), summed(scatter)  # type: ignore[method-assign]
    results = []
    for name in names:
        cost = COSTS[name]()
        program = cost.compiled()
        program.step(cost.batch)
        sent.clear()
        program.step(cost.batch)
        memory = {}
        for p in program.parameters():
            storage = p.to_local().untyped_storage()  # type: ignore[attr-defined]
            memory[storage.data_ptr()] = storage.nbytes()
        results.append((sum(memory.values()), Counter(sent), sent.pop("sums", 0)))
    return results


WORLDS = {
    2: ["vocabulary, tp=2", "positions, cp=2", "zero=1, dp=2", "zero=3, dp=2"],
    3: ["heads, tp=3", "experts, ep=3"],
    4: ["vocabulary, tp=4", "zero=3, dp=4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_processes_hold_and_send_what_the_closed_forms_say(ranks: int) -> None:
    names = WORLDS[ranks]
    everyone = quintnet.launch(_counted, ranks, (names,), timeout=240)
    for number, name in enumerate(names):
        cost, found = COSTS[name](), [one[number] for one in everyone]
        buffers = EXPERTS * FLOAT if "experts" in name else 0
        assert [memory for memory, _, _ in found] == [cost.parameters - buffers] * ranks, name
        assert [sums for _, _, sums in found] == [cost.sums] * ranks, name
        total: Counter[str] = Counter()
        for _, sent, _ in found:
            total += Counter({kind: count for kind, count in sent.items() if kind != "sums"})
        assert total == {kind: ranks * count for kind, count in cost.gives.items()}, name
        if "experts" not in name:  # routing is uneven
            assert all(Counter(sent) - Counter(sums=cost.sums) == Counter(cost.gives) for _, sent, _ in found), name
