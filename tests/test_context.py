"""Context parallelism: sequences split over ranks, attention over all of them, gradients of the unsplit model."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

from .models import CASES, GPT, build

pytestmark = pytest.mark.usefixtures("shared_captures")

torch.set_num_threads(1)
MESHES = [
    (quintnet.Mesh(cp=2), 1),
    (quintnet.Mesh(dp=2, cp=4), 2),
    (quintnet.Mesh(pp=2, cp=2, tp=2), 2),
    (quintnet.Mesh(pp=2, dp=2, cp=2, tp=2), 2),
]
FAST = {"gpt": (0, 2), "encoder": (0,), "hf_llama_double": (0,)}


def _calls(program: quintnet.CompiledProgram) -> Counter[str]:
    return Counter(re.findall(r"comm\.(\w+)\(", program.ranks[0].forward.code))


@pytest.mark.slow
@pytest.mark.parametrize("context", ["all_gather", "ulysses", "ring"])
@pytest.mark.parametrize(
    ("name", "mesh", "microbatches"),
    [
        (name, *mesh) if index in FAST.get(name, ()) else pytest.param(name, *mesh, marks=pytest.mark.slow)
        for name in ("gpt", "encoder", "hf_llama_double", "hf_gpt2_double")
        for index, mesh in enumerate(MESHES)
    ],
    ids=str,
)
def test_context_parallelism_equals_the_module(name: str, mesh: quintnet.Mesh, microbatches: int, context: str) -> None:
    case = CASES[name]
    options = {"loss_fn": case.loss_fn, "microbatches": microbatches, "context": context}
    try:
        program = quintnet.compile(build(name), mesh, case.batch(8), **options)  # type: ignore[arg-type]
    except quintnet.CompileError as error:  # 4 heads, or 2 key heads, do not go into tp=2 x cp=4 and the like
        assert error.code == "QN203" and "heads" in str(error) and context == "ulysses"
        return
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


@pytest.mark.slow
def test_all_gather_moves_keys_and_values_and_ulysses_exchanges_heads() -> None:
    case = CASES["gpt"]
    gathered = _calls(quintnet.compile(build("gpt"), quintnet.Mesh(cp=2), case.batch(4)))
    assert gathered == {"all_gather": 6, "rows_of": 3}  # keys and values of three layers
    swapped = _calls(quintnet.compile(build("gpt"), quintnet.Mesh(cp=2), case.batch(4), context="ulysses"))
    assert swapped["all_to_all"] >= 6 and not swapped["all_gather"] and not swapped["rows_of"]


def test_a_ring_gathers_nothing() -> None:
    case = CASES["gpt"]
    assert _calls(quintnet.compile(build("gpt"), quintnet.Mesh(cp=2), case.batch(4), context="ring")) == {
        "ring_attention": 3,
        "send_runs": 9,
        "return_runs": 3,
    }


def test_activations_are_split_along_the_sequence_even_where_the_batch_divides() -> None:
    program = quintnet.compile(GPT().double(), quintnet.Mesh(cp=2), CASES["gpt"].batch(4))
    nodes = program.ranks[0].stages[0].forward.module.graph.nodes
    shapes = {tuple(node.meta["val"].shape) for node in nodes if "val" in node.meta}
    assert (4, 4, 32) in shapes and (2, 8, 32) not in shapes  # four rows of half a sequence


class Windowed(nn.Module):
    """Attention with a mask of the user's own: each position sees the three before it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 4, 4).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        place = torch.arange(t, device=x.device)
        near = (place[:, None] >= place[None, :]) & (place[:, None] - place[None, :] < 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=near)
        return self.head(y.transpose(1, 2).reshape(b, t, c))


@pytest.mark.slow
def test_sliding_windows_and_dropout() -> None:
    batch = (torch.randn(4, 8, 16, dtype=torch.float64), torch.randint(0, 8, (4, 8)))

    def loss(out: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), labels.flatten())

    for context in ("all_gather", "ulysses", "ring"):
        program = quintnet.compile(
            Windowed().double(), quintnet.Mesh(cp=4), batch, loss_fn=loss, microbatches=2, context=context
        )
        assert program.verify().ok
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True).double()
    model = nn.Sequential(layer, nn.Linear(16, 8).double())
    program = quintnet.compile(model, quintnet.Mesh(dp=2, cp=2), batch, loss_fn=loss, microbatches=2)
    assert program.verify().ok


@pytest.mark.slow
def test_a_sequence_that_does_not_divide_is_still_exact() -> None:
    case = CASES["vit"]  # 17 tokens
    program = quintnet.compile(build("vit"), quintnet.Mesh(cp=2), case.batch(4), loss_fn=case.loss_fn)
    assert program.verify().ok


@pytest.mark.slow
def test_one_sequence_of_a_batch_of_one() -> None:
    ids, labels = CASES["gpt"].batch(1)
    assert quintnet.compile(GPT().double(), quintnet.Mesh(cp=4), (ids, labels)).verify().ok


class ApartFeatures(nn.Module):
    """Queries, keys and values one after the other in memory, feature by feature."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 4, 8, 3).transpose(1, 2).unbind(-1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.sample(1)
@pytest.mark.parametrize("context", ["all_gather", "ulysses", "ring"])
def test_features_need_not_be_beside_each_other(context: str) -> None:
    """Kernels of attention that a ring calls read them as if they were."""
    batch = torch.randn(4, 16, 32).double(), torch.randn(4, 16, 32).double()
    model, options = ApartFeatures().double(), {"loss_fn": F.mse_loss, "context": context}
    report = quintnet.compile(model, quintnet.Mesh(cp=2), batch, **options).verify()  # type: ignore[arg-type]
    assert report.ok and report.worst.error < 1e-12, str(report)
