"""The memory of arguments that an operator writes to, and the functional form of an operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import quintnet
from quintnet_compiler.capture.changes.functional_calls import have_memory_in_common
from quintnet_compiler.ops.functional_forms import functional_form, name_for_users, writing_operator

library = torch.library.Library("quintnet_forms", "DEF")  # type: ignore[no-untyped-call]
for line in (
    "double(Tensor x, Tensor(a!)? out, Tensor(b!)[] more, *, str mode='a) -> b') -> (Tensor, Tensor(a!))",
    "view(Tensor(a) x, Tensor(b!) out) -> Tensor(a)",
):
    library.define(line)  # type: ignore[no-untyped-call]


def _double(x: Tensor, out: Tensor, more: list[Tensor], *, mode: str = "") -> tuple[Tensor, Tensor]:
    out.copy_(2 * x)
    for y in more:
        y.add_(x)
    return x + 1, out


library.impl("double", _double, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def test_a_functional_form_returns_what_the_operator_writes() -> None:
    double = torch.ops.quintnet_forms.double.default
    form = functional_form(double)
    x, out, more = torch.ones(3), torch.zeros(3), [torch.zeros(3), torch.ones(3)]
    results = form(x, out, more, mode="m")
    assert [int(y[0]) for y in results] == [2, 2, 1, 2]
    assert [int(y[0]) for y in (x, out, *more)] == [1, 0, 0, 1]
    assert functional_form(double) is form
    assert name_for_users(form) == "quintnet_forms.double.default"
    writing = writing_operator(form)
    assert writing is not None and writing.returned == (None, "out")


def test_an_operator_that_writes_and_returns_a_view_is_refused() -> None:
    with pytest.raises(quintnet.QuintNetError, match="QN105"):
        functional_form(torch.ops.quintnet_forms.view.default)


WIDE = torch.arange(2 * 3 * 12).view(2, 3, 12)
PAIRS = [
    *((a, b) for a in WIDE.split([6, 3, 3], -1) for b in WIDE.split([6, 3, 3], -1)),
    *((a, b) for a in WIDE.unbind(1) for b in WIDE.unbind(1)),
    *((a, b) for a in WIDE.view(2, 3, 3, 2, 2).unbind(2) for b in WIDE.view(2, 3, 3, 2, 2).unbind(2)),
    (WIDE[:, :, :7], WIDE[:, :, 6:]),
    (WIDE[0], WIDE[1]),
    (WIDE[0, 0], WIDE[0, 1]),
    (WIDE, WIDE.clone()),
    (WIDE.view(-1)[:8], WIDE.view(-1)[7:]),
    (WIDE, WIDE[:, 1:]),
]


@pytest.mark.parametrize("pair", PAIRS)
def test_slices_of_one_tensor_have_no_memory_in_common(pair: tuple[Tensor, Tensor]) -> None:
    x, other = pair
    same_storage = x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    common = same_storage and bool(set(x.flatten().tolist()) & set(other.flatten().tolist()))
    assert have_memory_in_common(x, other) == common


def test_what_is_not_a_slice_counts_as_common_memory() -> None:
    assert have_memory_in_common(WIDE[:, :, ::2], WIDE.view(-1)[1::2])
