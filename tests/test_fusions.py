"""Kernels and bytes of compiled layers, losses and embeddings on a GPU have budgets: see :mod:`.fusions`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.runtime.execute import engines
from quintnet_compiler.runtime.execute.gradient_kernels import _module

from .fusions import FUSED, Traffic, kernels_of_module, traffic

pytestmark = pytest.mark.skipif(
    torch.__version__ < (2, 13) or torch.__version__ >= (2, 14), reason="its budgets are those of torch 2.13"
)

ROWS, WIDTH, HIDDEN, HEADS, HEAD = 8192, 4096, 14336, 32, 128  # of Llama 8B; Mixtral's experts have its sizes, too
WORDS = 128256
EXPERTS, CHOSEN = 8, 2

PRODUCTS = frozenset((
    "mm", "_scaled_mm", "quintnet.accumulate_matmul", "quintnet.grouped_linear", "quintnet.grouped_weight_grad",
))  # fmt: skip
ATTENTION = frozenset(("aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_cudnn_attention_backward"))
DISPATCH = frozenset(("aten.topk", "quintnet.group_plan", "quintnet.group_rows", "quintnet.ungroup_rows"))
GRADIENTS = frozenset(("accumulate",))
PICKS = frozenset(("MultiOutput",))  # one of several results
# Of what runs once a step: casts of parameters and of the batch, and parts of one microbatch, which are views.
ONCE = ("_to_copy", "reshape", "repeat_interleave", "ne", "sum")


class Layer(nn.Module):
    """A layer of Llama, without its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 4, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (project(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for project in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """Routing, and SwiGLU experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(EXPERTS, 2 * HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        share, ids = self.router(x).softmax(-1).topk(CHOSEN)
        rows, ids = x.repeat_interleave(CHOSEN, 0), ids.flatten()
        gate, up = quintnet.expert_linear(rows, ids, self.up).chunk(2, -1)
        outputs = quintnet.expert_linear(F.silu(gate) * up, ids, self.down)
        return (outputs.unflatten(0, (-1, CHOSEN)) * share.unsqueeze(-1)).sum(1)


class Head(nn.Module):
    """The last norm of a language model, and its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.words = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(self.norm(x))  # type: ignore[no-any-return]


def _product(y: Tensor, target: Tensor) -> Tensor:
    return (y.flatten(0, -2) * target.flatten(0, -2)).sum()


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Case:
    """A module, and the most that ``once``, ``forward`` and ``backward`` may run.

    Attributes:
        module: makes it.
        batch: makes the inputs and targets.
        loss: of results and targets.
        kernels: inductor's.
        mib: what all but products and attention reads and writes.
        plan: options of compile.
    """

    module: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    kernels: tuple[int, int, int]
    mib: tuple[int, int, int]
    plan: dict[str, Any] = field(default_factory=lambda: {"precision": "bf16"})


def _rows() -> Tensor:
    return torch.zeros(2, ROWS // 2, WIDTH)


def _words() -> Tensor:
    return torch.zeros(2, ROWS // 2, dtype=torch.long)


def _layer(kernels: tuple[int, int, int], mib: tuple[int, int, int], **plan: str) -> Case:
    return Case(Layer, lambda: (_rows(), _rows()), _product, kernels, mib, plan)


CASES = {
    "bf16": _layer((0, 5, 6), (0, 1248, 1826), precision="bf16"),
    "fp8 tensorwise": _layer((24, 20, 36), (1373, 1795, 4485), precision="fp8", fp8_recipe="tensorwise"),
    "fp8 rowwise": _layer((18, 16, 31), (1525, 1924, 5605), precision="fp8", fp8_recipe="rowwise"),
    "mixture": Case(Mixture, lambda: (_rows(), _rows()), _product, (0, 4, 5), (0, 2113, 11074)),
    "loss": Case(Head, lambda: (_rows(), _words()), _cross_entropy, (0, 4, 3), (0, 3943, 3944)),
    "embedding": Case(
        lambda: nn.Embedding(WORDS, WIDTH), lambda: (_words(), _rows()), _product, (0, 3, 2), (0, 129, 6332)
    ),
}


def _counted(case: Case) -> list[Traffic]:
    """Return what ``once``, ``forward`` and ``backward`` run, for one microbatch on one GPU."""
    with torch.device("meta"):
        module, batch = case.module(), case.batch()
    program = quintnet.compile(
        module, quintnet.Mesh(dp=1), batch, loss_fn=case.loss, device="cuda", check="off", backend="inductor",
        **case.plan,
    )  # fmt: skip
    counts = traffic(program)
    return [counts[name] for name in ("once", "forward", "backward")]


def _mib(count: Traffic) -> float:
    """Return MiB of what is no product and no attention."""
    return sum(size for name, size in count.bytes.items() if name not in PRODUCTS | ATTENTION) / 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "fp8 rowwise" else name for name in CASES]
)
def test_kernels_and_bytes_stay_within_their_budgets(name: str) -> None:
    """And between inductor's kernels run products, attention and dispatch alone."""
    case = CASES[name]
    counts = _counted(case)
    kernels = [count.kernels[FUSED] for count in counts]
    mib = [_mib(count) for count in counts]
    assert [number <= most for number, most in zip(kernels, case.kernels, strict=True)] == [True] * 3, kernels
    assert [size <= most + 1 for size, most in zip(mib, case.mib, strict=True)] == [True] * 3, mib
    once, *directions = counts
    for count in directions:
        others = count.kernels.keys() - PRODUCTS - ATTENTION - DISPATCH - GRADIENTS - PICKS - {FUSED}
        assert not others and not count.eager and not any(count.calls.values())
    assert once.kernels.keys() <= {FUSED}
    assert all(any(part in operator for part in ONCE) for operator in once.eager), once.eager


@pytest.mark.slow
def test_an_operator_that_inductor_does_not_see_costs_bytes_and_is_named() -> None:
    case = Case(
        lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 64, bias=False)),
        lambda: (_rows(), torch.zeros(2, ROWS // 2, 64)), _product, (0, 0, 0), (0, 0, 0),
        {"precision": "fp8", "fp8_recipe": "tensorwise"},
    )  # fmt: skip
    _, seen, _ = _counted(case)
    with mock.patch.object(engines, "_own_decompositions", lambda graph, on_gpu: {}):
        _, unseen, _ = _counted(case)
    assert "quintnet.scaled_cast" in unseen.kernels and "quintnet.scaled_cast" not in seen.kernels
    assert _mib(unseen) > 1.2 * _mib(seen) > 0


@pytest.mark.parametrize("name", ["put", "add"])
def test_a_narrow_gradient_is_added_to_its_sum_by_one_kernel(name: str) -> None:
    slot, gradient = torch.zeros(2**20), torch.zeros(2**20, dtype=torch.bfloat16)
    read_and_written = gradient.nbytes + 2 * slot.nbytes  # inductor counts what is written in place as read, too
    assert kernels_of_module(_module(name), [slot, gradient]) == [(FUSED, read_and_written)]
