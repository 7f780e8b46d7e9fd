"""Every operator of PyTorch's own database of samples, through the public API.

A module's parameter meets the batch, and what comes out is an argument of the operator; the loss weighs its results.
One step of the program must give the loss and the gradients of the plain module in float64, or an error must say why
there is none: never other numbers, never an exception without a code, never QN209. Samples are also taken with inputs
and gradients that are transposed in memory or expanded.

As a program it prints counts: ``python -m tests.test_opinfo PART PARTS SAMPLES [LAYOUT ...]``.
"""

from __future__ import annotations

import gc
import itertools
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quintnet

PARTS = 24
SAMPLES = 2  # of each entry
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "tp2": {"mesh": {"tp": 2}},
    "pp2": {"mesh": {"pp": 2}, "microbatches": 2},
}
FORMS = ("contiguous", "transposed", "expanded")  # of the input, and of the gradient that arrives
LIMIT = 1e-9
ROWS = 4
# They draw random numbers, or their results are not determined (eigenvectors' signs, uninitialised memory).
_UNDETERMINED = (
    "dropout", "rrelu", "empty", "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial",
    "normal", "rand", "uniform", "pca_lowrank", "svd_lowrank", "eig", "gumbel",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """``kind``: equal, an error's code, ``different``, ``raw``, or ``no reference``."""

    kind: str
    text: str = ""


class One(nn.Module):
    """``function`` of a parameter that lies in memory as ``form`` says, and a loss of its results and of the batch."""

    def __init__(self, x: Tensor, rest: Any, kwargs: Any, function: Callable[..., Any], form: str) -> None:
        super().__init__()
        self.shape, self.form, self.function = x.shape, form, function
        self.rest, self.kwargs = rest, kwargs
        if form == "transposed":
            x = x.permute(_reversed(x)).contiguous()
        elif form == "expanded" and x.dim():
            x = x[:1]
        self.values, self.linear = nn.Parameter(x.detach().clone()), nn.Linear(2, 2).double()

    def forward(self, rows: Tensor) -> Tensor:
        x = self.values
        if self.form == "transposed":
            x = x.permute(_reversed(x))
        elif self.form == "expanded":
            x = x.expand(self.shape)
        made = self.function(x, *self.rest, **self.kwargs)
        outs = [o for o in pytree.tree_leaves(made) if isinstance(o, Tensor) and o.is_floating_point()]
        loss = self.linear(rows).square().mean()
        for out in outs:
            loss = loss + (out.sum() if self.form == "expanded" else (_back(out) * _weights(out)).sum())
        return loss


def _reversed(x: Tensor) -> list[int]:
    return list(reversed(range(x.dim())))


def _back(out: Tensor) -> Tensor:
    """The gradient that arrives at ``out`` is transposed in memory."""
    return out.transpose(0, -1) if out.dim() > 1 else out


def _weights(out: Tensor) -> Tensor:
    """Numbers of the shape that :func:`_back` gives."""
    size = list(out.shape)
    if out.dim() > 1:
        size[0], size[-1] = size[-1], size[0]
    return torch.arange(out.numel(), dtype=out.dtype).remainder(7).div(4).add(0.5).reshape(size)


def entries() -> list[Any]:
    """Those that have gradients, or float results, and are determined."""
    if find_spec("expecttest") is None:  # the database's module imports it, and nothing here uses it
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    chosen = (op for op in op_db if op.supports_autograd and torch.float64 in op.supported_dtypes("cpu"))
    return [op for op in chosen if not any(word in op.name for word in _UNDETERMINED)]


def samples(op: Any, count: int) -> Iterator[Any]:
    """The first ``count`` whose input is one small float tensor."""
    torch.manual_seed(0)
    fits = (
        sample
        for sample in op.sample_inputs("cpu", torch.float64, requires_grad=False)
        if isinstance(x := sample.input, Tensor)
        and x.layout is torch.strided
        and x.is_floating_point()
        and x.numel() <= 2000
    )
    yield from itertools.islice(fits, count)


def compare(op: Any, sample: Any, form: str, layout: Mapping[str, Any]) -> Found:
    def build() -> One:
        torch.manual_seed(0)
        return One(sample.input, sample.args, sample.kwargs, op.op, form)

    rows = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = build()
    try:
        expected = plain(rows)
        expected.backward()
        gradient = plain.values.grad
    except Exception as error:
        return Found("no reference", str(error)[:100])
    if not bool(expected.isfinite()) or (gradient is not None and not bool(gradient.isfinite().all())):
        return Found("no reference", "not finite")
    try:
        options = {name: value for name, value in layout.items() if name != "mesh"}
        program = quintnet.compile(build(), quintnet.Mesh(**layout["mesh"]), (rows,), **options)
        loss = program.step((rows,))
    except quintnet.QuintNetError as error:
        return Found(error.code, str(error)[:600])
    except Exception as error:
        return Found("raw", f"{type(error).__name__}: {str(error)[:300]}")
    mine = {name: p.grad for name, p in program.named_parameters()}["values"]
    return _verdict(loss, mine, expected.detach(), gradient)


def _verdict(loss: Tensor, mine: Tensor | None, expected: Tensor, gradient: Tensor | None) -> Found:
    pairs: Sequence[tuple[str, Tensor | None, Tensor | None]] = (
        ("loss", loss, expected),
        ("gradient", mine, gradient),
    )
    for what, have, want in pairs:
        if have is None or want is None:
            other = want if have is None else have
            if other is not None and bool((_whole(other) != 0).any()):
                return Found("different", f"{what}: {'none' if have is None else 'one'} where there should be another")
            continue
        size = max(float(want.abs().max()) if want.numel() else 0.0, 1.0)
        gap = float((_whole(have) - want).abs().max()) / size if want.numel() else 0.0
        if not gap <= LIMIT:
            return Found("different", f"{what}: off by {gap:.2g}")
    return Found("equal")


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def sweep(
    part: int, parts: int, count: int = SAMPLES, layouts: Sequence[str] = tuple(LAYOUTS)
) -> Iterator[tuple[str, Found]]:
    """Every ``parts``-th entry: its first ``count`` samples on ``layouts``, the first of these in all forms."""
    for op in entries()[part::parts]:
        for number, sample in enumerate(samples(op, count)):
            for layout in layouts:
                for form in FORMS if layout == layouts[0] else FORMS[:1]:
                    found = compare(op, sample, form, LAYOUTS[layout])
                    yield f"{op.formatted_name} {number} {layout} {form}", found
                    if found.kind == "QN202":
                        break  # whatever the form
        gc.collect()


def wrong(found: Found) -> bool:
    return found.kind in ("different", "raw", "QN209")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_entry_is_equal_or_refused(part: int) -> None:
    found = list(sweep(part, PARTS))
    assert any(one.kind == "equal" for _, one in found)
    assert not [f"{name}: {one.kind} {one.text}" for name, one in found if wrong(one)]


def _main(part: int, parts: int, count: int, *layouts: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runs: Counter[str] = Counter()
    operators: dict[str, set[str]] = {}
    for name, found in sweep(part, parts, count, layouts or tuple(LAYOUTS)):
        runs[found.kind] += 1
        operators.setdefault(name.split()[0], set()).add(found.kind)
        if found.kind != "no reference":
            print(name, found.kind, " ".join(found.text.split("\n")[:2]), flush=True)
    whole = Counter(kinds.pop() if len(kinds) == 1 else "several" for kinds in operators.values())
    for what, counts in (("runs", runs), ("entries", whole)):
        print(f"{sum(counts.values())} {what}:", ", ".join(f"{n} {kind}" for kind, n in counts.most_common()))


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:4]), *sys.argv[4:])
