"""Lists of a batch's rows that are joined again, and what a mask puts into each row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.ops.filled_rows import alike, fill_rows
from quintnet_compiler.passes.frontend.list_rewrites import cat
from quintnet_compiler.passes.frontend.normalize import Normalize
from quintnet_compiler.passes.frontend.rewrites import REWRITES

aten = torch.ops.aten
ROWS, LENGTH, IMAGE = 4, 6, 5


class Captions(nn.Module):
    """Two patches of an image in each row of text, at places of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.patches, self.head = nn.Embedding(16, 8), nn.Linear(3, 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        features = torch.cat(list(self.patches(images)), dim=0)  # [rows * 2, 8]
        x = self.words(ids)
        x = x.masked_scatter((ids == IMAGE).unsqueeze(-1).expand_as(x), features)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _batch() -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(6, 16, (ROWS, LENGTH), generator=dice)
    for row in ids:
        row[torch.randperm(LENGTH, generator=dice)[:2]] = IMAGE
    return ids, torch.randn(ROWS, 2, 3, generator=dice, dtype=torch.float64)


def _normal(parts: int) -> set[object]:
    captured = capture(Captions().double(), _batch())
    return {node.target for node in Normalize(ROWS, torch.device("cpu"), parts=parts)(captured).graph.nodes}


def test_the_operators() -> None:
    mask = torch.tensor([[True, False, True], [False, True, True]])
    assert torch.equal(alike(mask, 2), mask)
    x, values = torch.zeros(2, 3), torch.arange(1.0, 5)
    assert fill_rows(x, mask, values).tolist() == [[1, 0, 2], [0, 3, 4]]
    mask[1, 0] = True
    with pytest.raises(quintnet.InputError, match=r"QN102[^!]*picks 3 places in row 1 of the batch[^!]*in 2 of each"):
        alike(mask, 2)


@pytest.mark.slow
def test_rows_are_filled_one_by_one_in_parts_of_a_batch_only() -> None:
    assert aten.masked_scatter.default in _normal(1) and fill_rows not in _normal(1), "any batch is allowed"
    assert {fill_rows, alike} < _normal(2) and aten.masked_scatter.default not in _normal(2)


def test_a_list_that_is_joined_again_is_what_it_was() -> None:
    assert REWRITES[aten.cat.default] is cat
    assert not _normal(1) & {aten.unbind.int, aten.cat.default}


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}])
def test_microbatches_of_text_with_images(axes: dict[str, int]) -> None:
    """Equal, and an error that names the row, before anything changes, where one row has the places of another."""
    torch.manual_seed(0)
    model, (ids, images) = Captions().double(), _batch()
    program = quintnet.compile(model, quintnet.Mesh(**axes), (ids, images), microbatches=2)
    assert program.verify().worst.error < 1e-12
    other, before = ids.clone(), {name: x.clone() for name, x in model.named_parameters()}
    other[1], other[2] = 7, 7
    other[1, :3] = other[2, :1] = IMAGE  # as many in all
    with pytest.raises(quintnet.InputError, match="picks 3 places in row 1 of the batch"):
        program.step((other, images))
    assert all(torch.equal(x, before[name]) for name, x in model.named_parameters())
    loss = program.step((ids, images))
    torch.testing.assert_close(loss.detach(), model(ids, images).detach())
