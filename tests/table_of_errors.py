"""Models that ``compile`` must refuse, each with its error: see ``test_table_of_errors.py``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quintnet

ROWS = 8
DICE = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, 6, generator=DICE, dtype=torch.float64)
TOKENS = torch.randn(ROWS, 4, 6, generator=DICE, dtype=torch.float64)
Y = torch.arange(ROWS) % 4
ADJACENT = torch.eye(ROWS, dtype=torch.float64).roll(1, 0)
TWO = {"dp2": {"dp": 2}}
WHOLE = {"microbatches": 2}
NORM = {"norm": lambda: nn.BatchNorm1d(8)}
Body = Callable[..., Any]


class Net(nn.Module):
    """Two linear layers, ``q`` and ``o``, and what ``body(net, *inputs)`` makes of them."""

    def __init__(self, body: Body, **parts: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.o, self.body = nn.Linear(6, 8), nn.Linear(8, 4), body
        for name, part in parts.items():
            value = part()
            if isinstance(value, Tensor) and value.layout is torch.strided:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Any) -> Any:
        return self.body(self, *inputs)


@dataclass(frozen=True)
class Program:
    """A model, its batch and its loss. ``options``: of quintnet.compile."""

    build: Callable[[], nn.Module]
    batch: Any = (X, Y)
    loss_fn: Callable[..., Tensor] | None = F.cross_entropy
    options: Mapping[str, Any] = field(default_factory=dict)
    meshes: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: TWO)

    def but(self, **changes: Any) -> Program:
        """Return this program with other fields."""
        return dataclasses.replace(self, **changes)


def net(body: Body, batch: Any = (X, Y), **fields: Any) -> Program:
    parts = fields.pop("parts", {})
    return Program(lambda: Net(body, **parts), batch, **fields)


@dataclass(frozen=True)
class Row:
    """A program that is refused. ``code``, ``cause`` (a regular expression) and ``line`` (text of the place, "" where
    there is none in the user's code) are those of the error; ``fix``: the words of its fix that ``fixed`` follows."""

    program: Program
    code: str
    cause: str
    line: str
    fix: str
    fixed: tuple[Program, ...]


# Bodies of models and losses, one on each line, so that a line says which.


def plain(m: Any, x: Tensor) -> Tensor:
    return m.o(m.q(x).tanh())  # type: ignore[no-any-return]


def _packed(m: Any, x: Tensor) -> Tensor:
    lengths = torch.full((x.shape[0],), 3)
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    return m.o(m.rnn(rows)[1][0])  # type: ignore[no-any-return]


def _padded(m: Any, x: Tensor) -> Tensor:
    return m.o(m.rnn(x)[0][:, 2])  # type: ignore[no-any-return]


def _bincount(m: Any, x: Tensor) -> Tensor:
    counts = torch.bincount(x.argmax(-1))
    return plain(m, x * counts.sum())


def _counted(m: Any, x: Tensor) -> Tensor:
    counts = (x.argmax(-1)[:, None] == torch.arange(6)).sum(0)
    return plain(m, x * counts.sum())


def _hidden_layer(m: Any, x: Tensor) -> Tensor:
    return m.o(m.hidden[0](m.q(x)))  # type: ignore[no-any-return]


@torch.library.custom_op("table_of_errors::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


double.register_fake(lambda x: torch.empty_like(x))
double.register_autograd(lambda ctx, gradient: gradient * 2)


@torch.library.custom_op("table_of_errors::double_into", mutates_args=("out",))
def double_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


def custom(m: Any, x: Tensor) -> Tensor:
    return m.o(double(m.q(x)))  # type: ignore[no-any-return]


def _doubled_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.q(x).detach()
    double_into(h, h)
    return m.o(h + m.q(x))  # type: ignore[no-any-return]


def _doubled_copy(m: Any, x: Tensor) -> Tensor:
    h = m.q(x).detach()
    double_into(h.clone(), h)
    return m.o(h + m.q(x))  # type: ignore[no-any-return]


def _segments(m: Any, x: Tensor) -> Tensor:
    sums = torch.segment_reduce(m.q(x), "sum", lengths=torch.tensor([3, 5]))
    return m.o(sums.repeat(4, 1))  # type: ignore[no-any-return]


def _sparse(m: Any, x: Tensor) -> Tensor:
    return m.o(torch.sparse.mm(ADJACENT.to_sparse(), m.q(x)))  # type: ignore[no-any-return]


def _dense(m: Any, x: Tensor) -> Tensor:
    return m.o(ADJACENT @ m.q(x))  # type: ignore[no-any-return]


def _sparse_buffer(m: Any, x: Tensor) -> Tensor:
    return m.o(torch.sparse.mm(m.near, m.q(x)))  # type: ignore[no-any-return]


def _nested(m: Any, x: Tensor) -> Tensor:
    parts = torch.nested.as_nested_tensor([x[:3], x[3:]])
    return m.o(m.q(parts.to_padded_tensor(0.0).sum((0, 1)) + x))  # type: ignore[no-any-return]


def _unnested(m: Any, x: Tensor) -> Tensor:
    parts = torch.stack([F.pad(x[:3], (0, 0, 0, 2)), x[3:]])
    return m.o(m.q(parts.sum((0, 1)) + x))  # type: ignore[no-any-return]


def _counted_again(m: Any, x: Tensor) -> Tensor:
    m.count.add_(1)
    return m.q(x).tanh() * m.count  # type: ignore[no-any-return]


def _checkpointed_counter(m: Any, x: Tensor) -> Tensor:
    return m.o(checkpoint(_counted_again, m, x, use_reentrant=False))  # type: ignore[no-any-return]


def _masked(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")[y > 0].mean()


def _weighted(z: Tensor, y: Tensor) -> Tensor:
    losses = torch.where(y > 0, F.cross_entropy(z, y, reduction="none"), 0.0)
    return losses.sum() / (y > 0).sum()


def _unruled(body: Body, line: str, operator: str) -> Row:
    program = net(body)
    fixed = program.but(options={"plan": {"unknown_ops": "replicate"}})
    return Row(program, "QN202", f"{operator} has no sharding rule", line, "unknown_ops", (fixed,))


def _cached() -> nn.Module:
    class Cached(Net):
        @functools.cached_property
        def table(self) -> Tensor:
            return torch.ones(8, dtype=torch.float64)

    return Cached(lambda m, x: m.o(m.q(x) * m.table))


def _called_once() -> nn.Module:
    model = _cached().double()
    with torch.no_grad():
        model(X)
    return model


@dataclass
class Item:
    x: Tensor
    y: Tensor


def loss_of_item(m: Any, item: Item) -> Tensor:
    return F.cross_entropy(plain(m, item.x), item.y)


def _own_loss(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = plain(m, x)
    return logits, F.cross_entropy(logits, y)


def _hooked() -> nn.Module:
    model = Net(_own_loss)
    model.register_forward_hook(lambda module, inputs, outputs: outputs[1])
    return model


RNN = {"rnn": lambda: nn.LSTM(6, 8, batch_first=True)}
COUNT = {"count": lambda: torch.zeros((), dtype=torch.float64)}
BY_VALUE = "depends on the values"
by_double = quintnet.rule("table_of_errors::double.default", "b t0d1 -> b t1d1", whole="t0d1 t1d1")


REFUSED = {
    "a packed sequence": Row(
        net(_packed, (TOKENS, Y), parts=RNN),
        "QN101",
        f"packed sequences: .*{BY_VALUE}",
        "m.o(m.rnn(rows)[1][0])",
        "run the layer on the padded batch",
        (net(_padded, (TOKENS, Y), parts=RNN),),
    ),
    "a packed sequence in a batch": Row(
        net(lambda m, x: m.o(m.rnn(x)[1][0]), (nn.utils.rnn.pack_sequence([*TOKENS]), Y), parts=RNN),
        "QN102",
        "a packed sequence",
        "",
        "pass the padded tensor",
        (net(_padded, (TOKENS, Y), parts=RNN),),
    ),
    "bincount": Row(
        net(_bincount), "QN101", f"bincount.*{BY_VALUE}", "torch.bincount(x", "use a mask", (net(_counted),)
    ),
    "a masked mean in a loss": Row(
        net(plain, loss_fn=_masked),
        "QN101",
        f"mean.*{BY_VALUE}",
        'reduction="none")[y > 0].mean()',
        "torch.where",
        (net(plain, loss_fn=_weighted),),
    ),
    "a layer that is not registered": Row(
        net(_hidden_layer, parts={"hidden": lambda: [nn.Linear(8, 8).double()]}),
        "QN105",
        r"a tensor of shape \[8, 8\] requires a gradient, and is no parameter of the model",
        "m.o(m.hidden[0](m.q(x)))",
        "make it an nn.Parameter of the model",
        (net(_hidden_layer, parts={"hidden": lambda: nn.ModuleList([nn.Linear(8, 8)])}),),
    ),
    "a cached property": Row(
        Program(_cached),
        "QN110",
        r"changes the attribute 'table' \(from nothing to a tensor of shape \[8\]\)",
        "lambda m, x: m.o(m.q(x) * m.table)",
        "call model(*batch) once under torch.no_grad() before you compile",
        (Program(_called_once),),
    ),
    "a custom operator": _unruled(custom, "m.o(double(m.q(x)))", "double.default"),
    "segment_reduce": _unruled(_segments, "torch.segment_reduce(m.q(x)", "segment_reduce.default"),
    "a custom operator, with microbatches": Row(
        net(custom, options=WHOLE),
        "QN202",
        "unsplit, .*does not split the dim of the batch",
        "m.o(double(m.q(x)))",
        'rules=[quintnet.rule("table_of_errors::double.default", "b t0d1 -> b t1d1", whole="t0d1 t1d1")]',
        (net(custom, options=WHOLE | {"rules": [by_double]}),),
    ),
    "a sparse product": Row(net(_sparse), "QN101", "sparse tensors", "to_sparse()", ".to_dense()", (net(_dense),)),
    "a sparse attribute": Row(
        net(_sparse_buffer, parts={"near": ADJACENT.to_sparse}),
        "QN101",
        "sparse tensors",
        "torch.sparse.mm(m.near",
        ".to_dense()",
        (net(lambda m, x: m.o(m.near @ m.q(x)), parts={"near": lambda: ADJACENT}),),
    ),
    "a nested tensor": Row(
        net(_nested),
        "QN101",
        "nested tensors",
        "as_nested_tensor([x[:3], x[3:]])",
        "pad to plain tensors",
        (net(_unnested),),
    ),
    "a dataclass for a batch": Row(
        net(loss_of_item, Item(X, Y), loss_fn=None),
        "QN102",
        "the batch is a Item",
        "",
        "pass a tuple, which holds it as the model's first argument: (Item(...),)",
        (net(loss_of_item, (Item(X, Y),), loss_fn=None),),
    ),
    "an operator that writes to what it reads": Row(
        net(_doubled_in_place),
        "QN105",
        r"double_into.default writes to 'out' or 'x', which have the same memory",
        "double_into(h, h)",
        "call it with a copy of one of them: .clone()",
        (net(_doubled_copy, options={"rules": [quintnet.rule(double_into, "b k, b k -> b k")]}),),
    ),
    "a tuple with a loss in it": Row(
        net(_own_loss, loss_fn=None),
        "QN103",
        "the model returned a tuple of a tensor of shape .*, a tensor of shape \\(\\)",
        "",
        "model.register_forward_hook(lambda module, inputs, outputs: outputs[1])",
        (Program(_hooked, loss_fn=None),),
    ),
    "DataParallel": Row(
        Program(lambda: nn.DataParallel(Net(plain))),
        "QN105",
        "the model is wrapped by DataParallel",
        "",
        "pass its .module",
        (Program(lambda: nn.DataParallel(Net(plain)).module),),
    ),
    "a scripted module": Row(
        net(lambda m, x: m.o(m.part(x)), parts={"part": lambda: torch.jit.script(nn.Linear(6, 8))}),
        "QN105",
        "the part 'part' was made by torch.jit.script",
        "part",
        "use what it was made of",
        (net(lambda m, x: m.o(m.part(x)), parts={"part": lambda: nn.Linear(6, 8)}),),
    ),
    "a checkpoint that reads what it changes": Row(
        net(_checkpointed_counter, parts=COUNT),
        "QN105",
        "checkpoint",
        "checkpoint(_counted_again, m, x",
        'recompute="full"',
        (net(lambda m, x: m.o(_counted_again(m, x)), parts=COUNT, options={"recompute": "full"}),),
    ),
}
