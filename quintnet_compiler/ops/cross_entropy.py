"""Cross entropy of rows as operators: whole, and over classes that ranks share."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compat.torch_codegen import SHIPPED
from ..core.precision import widened
from .define import define_composite, define_operator


def _row_nll(logits: Tensor, labels: Tensor, ignore: int) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=ignore)


# the negative log-likelihood of each row's label, 0 for ``ignore``: cross entropy without a reduction
row_nll = define_composite("row_nll(Tensor logits, Tensor labels, int ignore) -> Tensor", _row_nll)
# this rank's terms of a cross entropy whose classes ``axes`` split: of each row its largest logit (top, a constant of
# the derivative), the sum of exp(logits - top), and the label's logit
nll_terms = define_operator(
    "nll_terms(Tensor logits, Tensor labels, str[] axes, int[] sizes) -> Tensor",
    lambda logits, labels, axes, sizes: logits.new_empty([1, 3, logits.shape[0]], dtype=widened(logits.dtype)),
)
nll_terms_backward = define_operator(
    "nll_terms_backward(Tensor grad, Tensor logits, Tensor terms, Tensor labels, str[] axes, int[] sizes) -> Tensor",
    lambda grad, logits, terms, labels, axes, sizes: SHIPPED.empty_like(logits),
)
