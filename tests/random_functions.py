"""Random functions of torch in a forward, by name: each makes a value of what a layer computed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NOISY: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda h: h * torch.rand(h.shape, dtype=h.dtype),
    "rand_like": lambda h: h * torch.rand_like(h),
    "randn": lambda h: h + torch.randn(h.shape[0], h.shape[1], dtype=h.dtype),
    "randn_like": lambda h: h + torch.randn_like(h),
    "of no generator": lambda h: h + torch.randn(h.shape, generator=None, dtype=h.dtype, layout=torch.strided),
    "one for each row": lambda h: h * torch.randn(h.shape[0], 1, dtype=h.dtype),
    "one for each column": lambda h: h * torch.randn(h.shape[1], dtype=h.dtype),
    "randint": lambda h: h * torch.randint(-2, 5, (h.shape[0], 1)),
    "randint_like": lambda h: h * torch.randint_like(h, 7),
    "random_": lambda h: h * torch.empty_like(h).random_(6),
    "uniform_": lambda h: h * torch.empty_like(h).uniform_(-1.0, 2.0),
    "normal_": lambda h: h * h.new_empty(h.shape).normal_(1.0, 0.1),
    "torch.normal": lambda h: h * torch.normal(0.0, 1.0, (h.shape[1],)),
    "normal of tensors": lambda h: h * torch.normal(h, h.abs()),
    "bernoulli": lambda h: h * torch.bernoulli(h.sigmoid()),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.3),
    "bernoulli_ of tensors": lambda h: h * torch.empty_like(h).bernoulli_(h.detach().sigmoid()),
    "exponential_": lambda h: h * torch.empty_like(h).exponential_(2.0),
    "log_normal_": lambda h: h * torch.empty_like(h).log_normal_(0.1, 0.2),
    "cauchy_": lambda h: torch.tanh(h * torch.empty_like(h).cauchy_(0.1, 0.2)),
    "geometric_": lambda h: h * torch.empty_like(h).geometric_(0.4),
    "randperm": lambda h: h[:, torch.randperm(h.shape[1])] * h,
    "multinomial": lambda h: h * torch.multinomial(h.softmax(-1), 1),
    "multinomial, several": lambda h: h.sum(1, keepdim=True) * torch.multinomial(h.softmax(-1), 3),
    "multinomial, with replacement": lambda h: h[:, :1] * torch.multinomial(h.softmax(-1), 5, replacement=True),
    "dropout1d": lambda h: F.dropout1d(h.unsqueeze(-1).expand(-1, -1, 3), 0.4),
    "dropout2d": lambda h: F.dropout2d(h[:, :, None, None].expand(-1, -1, 2, 3), 0.4),
    "dropout3d": lambda h: F.dropout3d(h[:, :, None, None, None].expand(-1, -1, 2, 1, 3), 0.4),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.4, True),
    "feature_alpha_dropout": lambda h: F.feature_alpha_dropout(h.unsqueeze(-1).expand(-1, -1, 3), 0.4, True),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h, tau=0.7),
    "hard gumbel_softmax": lambda h: F.gumbel_softmax(h, hard=True),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "rrelu in evaluation": lambda h: F.rrelu(h),
    "rsample": lambda h: torch.distributions.Normal(h, 0.5, validate_args=False).rsample(),
    "drop path": lambda h: h + h * h.new_empty((h.shape[0], 1)).bernoulli_(0.8).div_(0.8),
    "several": lambda h: F.dropout(h + torch.randn_like(h), 0.3) * torch.rand_like(h) + F.dropout(h, 0.5),
    "in a checkpoint": lambda h: checkpoint(lambda x: F.dropout(x * torch.rand_like(x), 0.3), h, use_reentrant=False),  # type: ignore[no-any-return]
}
