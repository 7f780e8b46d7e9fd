"""Replacements of torch's functions for a trace: theirs ask for values, or have effects that schemas hide."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat.torch import FakeTensor
from ..compat.torch_foreach import FOREACH
from ..ops.ctc import ctc_loss, masked_select, total


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Compute torch.cov, which asks whether there are enough observations."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    weights = [w for w in (fweights, aweights) if w is not None]
    if weights:
        weight = weights[0] if len(weights) == 1 else weights[0] * weights[1]
        total = weight.sum()
        removed = correction if aweights is None else correction * (weight * aweights).sum() / total
        centred = x - ((x * weight).sum(1) / total).unsqueeze(1)
        count = (total - removed).clamp(min=0)
        return ((centred @ (centred * weight).mH) / count).squeeze()
    centred = x - x.mean(1, keepdim=True)
    observed: Any = torch.sym_max(x.shape[1] - correction, 0)  # type: ignore[no-untyped-call]
    covariance: Tensor = (centred @ centred.mH) / observed
    return covariance.squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Compute torch.corrcoef by :func:`cov`."""
    matrix = cov(input)
    if not matrix.dim():
        return matrix / matrix
    deviation = matrix.diagonal().real.sqrt() if matrix.is_complex() else matrix.diagonal().sqrt()
    matrix = matrix / deviation.unsqueeze(1) / deviation.unsqueeze(0)
    if matrix.is_complex():
        return torch.complex(matrix.real.clamp(-1, 1), matrix.imag.clamp(-1, 1))
    return matrix.clamp(-1, 1)


def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Compute torch.combinations, which selects by a mask."""
    if r == 1:
        return input.unsqueeze(1)
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    chosen = torch.tensor(list(choose(range(int(input.shape[0])), r)), dtype=torch.long, device=input.device).reshape(
        -1, r
    )
    return input[chosen]


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute torch.nn.functional.instance_norm, with running statistics as averages over rows.

    torch writes them to copies, one for each row, which a trace loses.
    """
    if not use_input_stats or running_mean is None or running_var is None:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    x = input.detach()
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    variance, mean = torch.var_mean(x.flatten(2), 2)
    with torch.no_grad():
        for old, new in ((running_mean, mean), (running_var, variance)):
            old.mul_(1 - momentum).add_(new.mean(0), alpha=momentum)
    return F.instance_norm(input, None, None, weight, bias, True, momentum, eps)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Compute torch.nn.functional.dropout, and return the input itself if nothing is dropped.

    torch's trace makes a copy, which would not change with the input.
    """
    return F.dropout(input, p, training, inplace) if (training and p) or not 0 <= p <= 1 else input


def fill_diagonal_(self: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """Compute Tensor.fill_diagonal_, which writes by strides; the diagonal of a matrix is a view."""
    if self.dim() != 2 or wrap:
        return Tensor.fill_diagonal_(self, fill_value, wrap)
    self.diagonal().fill_(fill_value)
    return self


_BASIC = (slice, int, type(None), type(Ellipsis))


def getitem(self: Tensor, index: Any) -> Tensor:
    """Compute Tensor.__getitem__, which asks for the value of an index that is a tensor without dims."""
    entries = list(index) if isinstance(index, tuple) else [index]
    tensor_places = [i for i, entry in enumerate(entries) if _is_number(entry)]
    others = [entry for i, entry in enumerate(entries) if i not in tensor_places]
    if len(tensor_places) != 1 or not all(isinstance(entry, _BASIC) for entry in others):
        return self[index]
    place = tensor_places[0]
    dropped = self.dim() - sum(entry is not None and entry is not Ellipsis for entry in entries)
    leading = [entry for entry in entries[:place] if not isinstance(entry, int)]
    dim = sum(dropped if entry is Ellipsis else 1 for entry in leading)
    entries[place] = entries[place].reshape(1)
    return self[tuple(entries)].squeeze(dim)


def _is_number(entry: Any) -> bool:
    whole = isinstance(entry, FakeTensor) and not entry.dim() and not entry.is_floating_point()
    return whole and entry.dtype is not torch.bool


_MANY_ROWS = 25  # with more, torch.cdist computes products of matrices


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary") -> Tensor:
    """Compute torch.cdist, which chooses its algorithm by the numbers of points.

    A number that varies does not count: a fixed number of many points chooses products of matrices; if both are few or
    vary, distances are computed one by one.
    """
    if compute_mode == "use_mm_for_euclid_dist_if_necessary" and p == 2.0:
        fixed = [x.shape[-2] for x in (x1, x2) if x.dim() > 1 and isinstance(x.shape[-2], int)]
        many = any(size > _MANY_ROWS for size in fixed)
        compute_mode = "use_mm_for_euclid_dist" if many else "donot_use_mm_for_euclid_dist"
    return torch.cdist(x1, x2, p, compute_mode)


TRACED_AS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        **FOREACH,
        Tensor.data.__get__: Tensor.detach,  # type: ignore[attr-defined]
        F.ctc_loss: ctc_loss,
        F.instance_norm: instance_norm,
        F.dropout: dropout,
        torch.dropout: lambda input, p, train: dropout(input, p, train),
        torch.cdist: cdist,
        Tensor.fill_diagonal_: fill_diagonal_,
        Tensor.__getitem__: getitem,
        torch.combinations: combinations,
        torch.corrcoef: corrcoef,
        torch.cov: cov,
        Tensor.corrcoef: corrcoef,
        Tensor.cov: cov,
        **dict.fromkeys((torch.masked_select, Tensor.masked_select), masked_select),
        **dict.fromkeys((torch.sum, Tensor.sum), total),
    }
)
