"""masked_scatter on a part of a batch, as operators: where every row of a mask has as many places as any other, what
fills a row is known without the rows before it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compat.torch_codegen import SHIPPED
from ..core.errors import InputError
from .define import define_composite, define_operator

aten = torch.ops.aten


def _alike(mask: Tensor, places: int) -> Tensor:
    counts = mask.flatten(1).sum(1)
    other = counts.ne(places).nonzero().flatten().tolist()
    if other:
        row = other[0]
        raise InputError(
            "QN102",
            f"the mask of masked_scatter picks {int(counts[row])} places in row {row} of the batch, and there is "
            f"something to put in {places} of each row",
            fix="give every row as many places (image tokens) as it has values, or use microbatches=1",
        )
    return mask.clone()


# the mask [rows, ...], if each row has ``places`` times True: an error that names the first row that has not
alike = define_operator(
    "alike(Tensor mask, int places) -> Tensor", lambda mask, places: SHIPPED.empty_like(mask), _alike
)
# masked_scatter of values [rows * n, ...], of which each row of the mask takes n
fill_rows = define_composite(
    "fill_rows(Tensor x, Tensor mask, Tensor values) -> Tensor",
    lambda x, mask, values: aten.masked_scatter.default(x, mask, values),
)
