"""Vocabulary parallelism: embedding and cross entropy without a gather of logits, gradients of the unsplit model."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

torch.set_num_threads(1)
VOCAB = 512


class Bigram(nn.Module):
    """Embedding, one layer, head (tied or not); a loss with ignored labels."""

    def __init__(self, tied: bool, ignore: int = -100) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16, padding_idx=3)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.ignore = ignore

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.layer(self.embed(ids))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=self.ignore)


def _batch(ignore: int) -> tuple[Tensor, Tensor]:
    ids, labels = torch.randint(0, VOCAB, (2, 8, 8)).unbind(0)
    ids[0, :3] = 3
    labels[:3] = ignore  # unevenly over microbatches and ranks
    labels[5, 1:7] = ignore
    return ids, labels


@pytest.mark.sample(1)
@pytest.mark.parametrize("ignore", [-100, 7])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("axes", [{"tp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 4}, {"cp": 2, "tp": 2}], ids=str)
def test_split_vocabularies_are_exact(axes: dict[str, int], tied: bool, ignore: int) -> None:
    batch = _batch(ignore)
    mesh = quintnet.Mesh(**axes)
    program = quintnet.compile(Bigram(tied, ignore).double(), mesh, batch, microbatches=2)
    assert program.plan.parameters["head.weight" if not tied else "embed.weight"]["tp"] == "S(0)"
    last = program.ranks[-1].stages[-1]
    code = last.forward.code
    calls = re.findall(r"comm\.(\w+)\(", code)
    assert calls.count("nll_terms") == 1 and "comm.all_gather(nll_terms, 'tp'" in code
    assert calls[calls.index("nll_terms") + 1 :] == ["all_gather"]  # one message, and no other for the loss
    shapes = {tuple(n.meta["val"].shape) for n in last.forward.module.graph.nodes if "val" in n.meta}
    assert not any(shape[-1:] == (VOCAB,) for shape in shapes)  # nobody has whole rows of logits
    assert program.verify().ok


def test_bfloat16_logits_add_up_in_float32() -> None:
    batch = _batch(-100)
    torch.manual_seed(0)
    model = Bigram(False).bfloat16()
    exact = _as_double(model)(*batch).item()
    program = quintnet.compile(model, quintnet.Mesh(tp=4), batch)
    unsplit = abs(model(*batch).item() - exact)
    assert abs(program.step(batch).item() - exact) <= 2 * unsplit + 2**-8 * exact


def _as_double(model: Bigram) -> Bigram:
    twin = Bigram(False).double()
    twin.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    return twin


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"reduction": "sum"}, {"reduction": "none"}], ids=str)
def test_other_cross_entropies(options: dict[str, object]) -> None:
    class Loss(Bigram):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.embed(ids)).transpose(1, 2)  # classes in the middle
            return F.cross_entropy(logits, labels, **options).sum()  # type: ignore[arg-type]

    batch = _batch(-100)
    assert quintnet.compile(Loss(True).double(), quintnet.Mesh(dp=2, tp=2), batch, microbatches=2).verify().ok


def test_probabilities_as_targets() -> None:
    class Loss(Bigram):
        def forward(self, ids: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), target.flatten(0, 1))

    ids = torch.randint(0, VOCAB, (8, 8))
    target = torch.softmax(torch.randn(8, 8, VOCAB, dtype=torch.float64), -1)
    assert quintnet.compile(Loss(True).double(), quintnet.Mesh(dp=2, tp=2), (ids, target)).verify().ok


def test_two_axes_may_split_the_classes() -> None:
    batch, split = _batch(-100), {"head.weight": {"ep": "S(0)", "tp": "S(0)"}}
    mesh = quintnet.Mesh(ep=2, tp=2)
    program = quintnet.compile(Bigram(False).double(), mesh, batch, plan={"parameters": split})
    (given,) = re.findall(r"comm\.nll_terms\((.*?)\)", program.ranks[-1].stages[-1].forward.code)
    assert "['ep', 'tp'], [2, 2]" in given
    assert program.verify().ok


def test_a_rank_may_have_only_masked_classes() -> None:
    class Masked(Bigram):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.embed(ids))
            usable = torch.arange(VOCAB, device=ids.device) < VOCAB // 2
            return F.cross_entropy(logits.masked_fill(~usable, -math.inf).flatten(0, 1), labels.flatten())

    ids, labels = torch.randint(0, VOCAB // 2, (2, 4, 8)).unbind(0)
    program = quintnet.compile(Masked(False).double(), quintnet.Mesh(tp=4), (ids, labels))
    assert program.plan.parameters["head.weight"]["tp"] == "S(0)"
    assert program.verify().ok
