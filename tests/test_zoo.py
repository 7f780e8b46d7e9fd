"""Models of transformers, unmodified, on every axis and on composed layouts: gradients of the unsplit model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quintnet

from .zoo import ZOO, InDouble, Layout, columns, outcome

pytest.importorskip("transformers")
torch.set_num_threads(1)
ALL = [(name, layout) for name in ZOO for layout in columns(ZOO[name])]


def _check(name: str, layout: Layout) -> None:
    found = outcome(ZOO[name], layout)
    assert found.ok or (found.error is None and layout.context == "ulysses" and "heads" in found.reason), found


# one composed layout of each kind of model, another for the next one; the slow tests have every model
KINDS = ("GPT-2", "Llama", "Gemma 2", "BERT", "T5", "CLIP", "DeepSeek-V3", "gpt-oss")
SAMPLE = [(name, columns(ZOO[name])[-1 - i % 3]) for i, name in enumerate(ZOO) if name in KINDS]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["Llama", "ViT", *(name for name in ZOO if name not in ("Llama", "ViT"))])
def test_nothing_runs_whole_over_tp(name: str) -> None:
    """No matmul, attention or convolution, and no value of other data ranks; but for the similarities of eight texts
    and images, which cost less than adding up those of both ranks."""
    with InDouble():
        program = quintnet.compile(ZOO[name].build(), quintnet.Mesh(tp=2), ZOO[name].batch(8), check="off")
    assert all("[8, 16] x [16, 8]" in one and name == "CLIP" for one in program.unsplit)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), SAMPLE, ids=str)
def test_a_composed_layout_of_each_kind(name: str, layout: Layout) -> None:
    _check(name, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [pair for pair in ALL if pair not in SAMPLE], ids=str)
def test_every_axis_of_each_model(name: str, layout: Layout) -> None:
    _check(name, layout)


@pytest.mark.slow
def test_frozen_parameters_of_an_adapted_model_get_no_gradients() -> None:
    entry = ZOO["IA3 of Llama"]
    model, batch = entry.build(), entry.batch(4)
    quintnet.compile(model, quintnet.Mesh(dp=2), batch, check="off").step(batch)
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if name.endswith("scale")}


def test_the_positions_of_an_image_are_those_of_the_model() -> None:
    entry = ZOO["Qwen2-VL"]
    model, batch = entry.build().model, entry.batch(2)
    given = {"input_ids": batch["input_ids"], "mm_token_type_ids": (batch["input_ids"] == 5).int()}
    found, _ = model.model.get_rope_index(**given, image_grid_thw=torch.tensor([[1, 4, 4]] * 2))
    assert torch.equal(found.transpose(0, 1), batch["position_ids"])


class Splits(nn.Module):
    """Sizes of parts are Python values that become a tensor on the way, as grids of images do."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.sizes = nn.Linear(6, 6), [[1, 2], [2, 2]]

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.net(x).split(torch.tensor(self.sizes).prod(-1).tolist(), dim=1)
        return one.square().mean() + two.cos().mean()


def test_tensors_that_forward_makes_of_numbers_may_decide_sizes() -> None:
    torch.manual_seed(0)
    model, x = Splits().double(), torch.randn(8, 6, dtype=torch.float64)
    program = quintnet.compile(model, quintnet.Mesh(dp=2, tp=2), (x,))
    assert program.verify().worst.error < 1e-12
    model.sizes = [[2, 2], [1, 2]]  # another program
    assert abs(float(program.step((x,)).detach()) - float(model(x).detach())) < 1e-12


def test_numbers_that_decide_sizes_are_known_when_a_graph_is_traced_again() -> None:
    """As that of Qwen2-VL is: what only ``tolist`` read is not in it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            sizes = torch.repeat_interleave(torch.tensor([2, 1]), torch.tensor([2, 2])).tolist()
            total = torch.zeros(())
            for part in self.net(x).split(sizes, dim=1):
                total += part.square().mean()  # in place
            return total

    program = quintnet.compile(Net(), quintnet.Mesh(dp=2), (torch.randn(4, 6),))
    assert program.verify().worst.error < 1e-5


def test_a_number_that_was_written_over_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            count = torch.tensor([1])
            count[0] = (x > 0).sum()  # torch's export would go on with 1
            return self.net(x).square().mean() * count.item()

    with pytest.raises(quintnet.CompileError, match="value") as error:
        quintnet.compile(Net(), quintnet.Mesh(dp=1), (torch.randn(8, 4),), check="off")
    assert error.value.code == "QN101"


@pytest.mark.slow
def test_ctc_of_a_speech_model_over_rows_and_microbatches() -> None:
    assert outcome(ZOO["wav2vec 2.0, CTC"], Layout({"dp": 2}, 2)).ok
