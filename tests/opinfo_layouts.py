"""Every operator of PyTorch's own database that has a derivative, on five layouts, against the plain module in float64.

An operator whose rows are independent (tried on the sample: of two halves it makes the halves of the whole) reads
rows of the batch, each times a parameter; any other reads parameters, and on layouts without microbatches its first
input depends on the batch too. Every result is multiplied by a parameter, so that the gradients of one step are all
results and all gradients of the operator. They are equal, or an error says why there are none.

Several operators share a program; where it is not equal, each half is a program of its own, down to one operator.

    python -m tests.opinfo_layouts FIRST LAST [NAME ...]

prints one line of JSON for each of these entries: what became of it on each layout.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quintnet
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.driver import variants
from quintnet_compiler.ir.program import Captured

from .opinfo_samples import NoSample, Sample, database, gap, results, samples

ROWS = 4
GROUP = 16  # operators that share a program
LAYOUTS: Mapping[str, tuple[Mapping[str, int], Mapping[str, Any]]] = {
    "1": ({}, {}),
    "dp2": ({"dp": 2}, {}),
    "tp2": ({"tp": 2}, {}),
    "pp2": ({"pp": 2}, {}),
    "dp2, 2 microbatches": ({"dp": 2}, {"microbatches": 2}),
}
# They trust the sizes that they are given, and read beyond a tensor that is smaller.
_UNCHECKED = ("native_", "_native_", "_batch_norm", "_softmax_backward")
EVERYWHERE = ("QN101", "QN105", "QN109", "QN110")  # refused whatever the layout


@dataclass(frozen=True)
class Case:
    """A sample; ``rows``: the positions of its leaves that are rows of the batch, where rows are independent."""

    name: str
    sample: Sample
    rows: tuple[int, ...]

    def made(self, leaves: Sequence[Any]) -> list[Tensor]:
        given, args, kwargs = pytree.tree_unflatten(list(leaves), self.sample.spec)
        return results(self.sample.function(given, *args, **kwargs))

    @property
    def floats(self) -> list[int]:
        """Positions of the leaves that are float tensors, in the order of ``sample.floats``."""
        return [i for i, x in enumerate(self.sample.leaves) if _is_float(x)]

    @property
    def trained(self) -> list[int]:
        return [self.floats[k] for k in self.sample.trained]


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.float64


def case_of(op: Any) -> Case | NoSample:
    """The first small sample whose rows are independent, or else the first."""
    given = samples(op, 3)
    if isinstance(given, NoSample):
        return given
    cases = [Case(op.formatted_name.replace(".", "_"), one, _independent(op.formatted_name, one)) for one in given]
    return next((case for case in cases if case.rows), cases[0])


def _independent(name: str, sample: Sample) -> tuple[int, ...]:
    """Which leaves are rows: all tensors of as many rows, or the first float tensor alone."""
    if name.startswith(_UNCHECKED):
        return ()
    case, leaves = Case(name, sample, ()), list(sample.leaves)
    rows = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.dim() > 0 and len(x) == ROWS]
    first = case.floats[:1]
    for some in (rows, [i for i in first if i in rows]):
        if not some or not set(some) & set(case.floats):
            continue
        try:
            half = ROWS // 2
            parts = [
                case.made([x[at : at + half] if i in some else x for i, x in enumerate(leaves)]) for at in (0, half)
            ]
        except Exception:  # a size that is written as a number
            continue
        joined = [torch.cat(pair) if pair[0].dim() else pair[0] for pair in zip(*parts, strict=True)]
        same = len(joined) == len(sample.outs) and all(
            a.shape == b.shape and torch.equal(a.nan_to_num(0.25), b.nan_to_num(0.25))
            for a, b in zip(joined, sample.outs, strict=True)
        )
        if same and all(out.dim() and len(out) == ROWS for out in sample.outs):
            return tuple(some)
    return ()


class Sums(nn.Module):
    """The sum of what ``cases`` return, each result times a parameter. ``coupled``: whether an operator whose rows are
    not independent reads something of the batch."""

    def __init__(self, cases: Sequence[Case], *, coupled: bool) -> None:
        super().__init__()
        self.cases, self.coupled, self.linear = tuple(cases), coupled, nn.Linear(2, 2).double()
        for case in cases:
            for i in case.floats:
                x, trained = case.sample.leaves[i].detach(), i in case.trained
                if i not in case.rows:
                    value = x.clone(memory_format=torch.contiguous_format) / 2  # so that it enters as a value, twice
                elif trained:
                    value = torch.linspace(0.9, 1.1, max(x[0].numel(), 1), dtype=x.dtype)[: x[0].numel()]
                    value = value.reshape(x[0].shape)
                else:
                    continue
                self.register_parameter(f"{case.name}_in{i}", nn.Parameter(value, trained))
        with torch.no_grad():
            for case, outs in zip(cases, self._results(batch_of(cases)), strict=True):
                for k, out in enumerate(outs):
                    like = out[0] if case.rows else out
                    count = torch.arange(like.numel(), dtype=torch.float64)
                    weight = count.remainder(7).div(4).add(0.5).reshape(like.shape)
                    self.register_parameter(f"{case.name}_out{k}", nn.Parameter(weight))

    def forward(self, *batch: Tensor) -> Tensor:
        loss = self.linear(batch[0]).square().mean()
        for case, outs in zip(self.cases, self._results(batch), strict=True):
            for k, out in enumerate(outs):
                loss = loss + (out * self.get_parameter(f"{case.name}_out{k}")).sum()
        return loss

    def _results(self, batch: Sequence[Tensor]) -> list[list[Tensor]]:
        first, *rest = batch
        given, made = iter(rest), []
        for case in self.cases:
            leaves = [next(given) if i in case.rows else x for i, x in enumerate(case.sample.leaves)]
            for i in case.floats:
                name = f"{case.name}_in{i}"
                if i not in case.rows:
                    leaves[i] = self.get_parameter(name) * 2
                elif i in case.trained:
                    leaves[i] = leaves[i] * self.get_parameter(name)
            if not case.rows and self.coupled:
                start, shape = case.floats[0], leaves[case.floats[0]].shape
                zero = first[:, 0].mul(0.0) if shape[:1] == (ROWS,) else first.sum().mul(0.0)
                leaves[start] = leaves[start] + (zero.reshape(ROWS, *[1] * (len(shape) - 1)) if zero.dim() else zero)
            made.append(case.made(leaves))
        return made

    def split(self) -> dict[str, dict[str, str]]:
        """A plan in which every input is split over tp, along the last dim that two ranks can share."""
        found = {}
        for name, value in self.named_parameters():
            fits = [dim for dim, size in enumerate(value.shape) if size and size % 2 == 0]
            if "_in" in name and fits:
                found[name] = {"tp": f"S({fits[-1]})"}
        return found


def batch_of(cases: Sequence[Case]) -> tuple[Tensor, ...]:
    rows = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return rows, *(case.sample.leaves[i].detach() for case in cases for i in case.rows)


class Changes(Sums):
    """The same with a change in place, for which the whole module is traced once more."""

    def forward(self, *batch: Tensor) -> Tensor:
        first = batch[0] * 1
        first.mul_(1.0)
        return super().forward(first, *batch[1:])


@dataclass(frozen=True)
class Group:
    """Operators that share a program. A module is traced once for all layouts, as tracing takes most of the time."""

    cases: Sequence[Case]
    kind: type[Sums] = Sums
    traced: dict[bool, tuple[Sums, tuple[Tensor | None, dict[str, Tensor | None]], list[Captured]]] = field(
        default_factory=dict
    )

    def compare(self, layout: str) -> tuple[str, str]:
        """``equal``, an error's id, ``different`` or ``raw``, and what is said of it."""
        axes, options = LAYOUTS[layout]
        batch, coupled = batch_of(self.cases), "microbatches" not in options
        if all(case.rows for case in self.cases):
            coupled = True
        if coupled not in self.traced:
            model = self.kind(self.cases, coupled=coupled)
            loss = model(*batch)
            loss.backward()
            self.traced[coupled] = model, (loss.detach(), {name: p.grad for name, p in model.named_parameters()}), []
        model, (expected, gradients), kept = self.traced[coupled]
        model.zero_grad(set_to_none=True)

        def once(*args: Any, **kwargs: Any) -> Captured:
            if not kept:
                kept.append(capture(*args, **kwargs))
            return kept[0]

        plan = {"parameters": model.split()} if "tp" in axes else None
        try:
            with mock.patch.object(variants, "capture", once):
                mesh = quintnet.Mesh(**axes)
                program = quintnet.compile(model, mesh, batch, plan=plan, check="off", check_finite=False, **options)
            found = program.step(batch)
        except quintnet.QuintNetError as error:
            return error.code, str(error)[:600]
        except Exception as error:
            return "raw", f"{type(error).__name__}: {str(error)[:300]}"
        mine = {name: p.grad for name, p in program.named_parameters()}
        for name, want in gradients.items():
            if text := gap(mine[name], want):
                return "different", f"{name}: {text}"
        text = gap(found.detach(), expected)
        return ("different", f"loss: {text}") if text else ("equal", "")

    def halves(self) -> tuple[Group, Group]:
        half = len(self.cases) // 2
        return Group(self.cases[:half], self.kind), Group(self.cases[half:], self.kind)


def _judge(group: Group, layouts: Sequence[str], found: dict[str, dict[str, tuple[str, str]]]) -> None:
    """Put into ``found`` what becomes of a group on ``layouts``: all in one program, or each half in its own."""
    apart = []
    for layout in layouts:
        result = group.compare(layout)
        if len(group.cases) > 1 and result[0] != "equal":
            apart.append(layout)
            if result[0] in EVERYWHERE:
                apart = list(layouts)
                break
            continue
        for case in group.cases:
            found[case.name][layout] = result
        if result[0] in EVERYWHERE:
            return
    if apart:
        for half in group.halves():
            _judge(half, apart, found)


def sweep(
    ops: Sequence[Any], layouts: Sequence[str] = tuple(LAYOUTS), kind: type[Sums] = Sums
) -> Iterator[dict[str, Any]]:
    """What became of each of ``ops``, in modules of this kind."""
    for at in range(0, len(ops), GROUP):
        made = [(op.formatted_name, case_of(op)) for op in ops[at : at + GROUP]]
        cases = [case for _, case in made if isinstance(case, Case)]
        found: dict[str, dict[str, tuple[str, str]]] = {case.name: {} for case in cases}
        if cases:
            _judge(Group(cases, kind), layouts, found)
        for name, case in made:
            if isinstance(case, NoSample):
                yield {"name": name, "none": case.reason}
                continue
            kept = found[case.name]
            refused = _everywhere(kept)
            yield {"name": name, "rows": bool(case.rows), "found": {one: kept.get(one, refused) for one in layouts}}
        gc.collect()


def _everywhere(kept: Mapping[str, tuple[str, str]]) -> tuple[str, str] | None:
    return next((one for one in kept.values() if one[0] in EVERYWHERE), None)


def entries() -> list[Any]:
    """The entries that have a derivative."""
    return [op for op in database() if op.supports_autograd]


def main(first: int, last: int, names: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = [op for op in entries() if not names or op.formatted_name in names]
    for line in sweep(chosen[first:last]):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
