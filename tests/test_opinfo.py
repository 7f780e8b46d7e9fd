"""Every operator of PyTorch's own database of samples, through the public API.

An operator's float tensors are parameters, each result is multiplied by a parameter of its size, and the loss is the
sum of all. So the gradients of one step are all results and all gradients of the operator, element by element. They
must be those of the plain module in float64, or an error must say why there are none: never other numbers, never an
exception without a code, never QN209. Inputs and the gradients that arrive lie in memory in several ways; one layout
splits the batch and the parameters.

As a program it prints what became of each entry, and counts: ``python -m tests.test_opinfo PART PARTS SAMPLES``.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintnet

from .opinfo_samples import NoSample, Sample, database, gap, samples

PARTS = 24
SAMPLES = 2  # of each entry
LAYOUTS: Mapping[str, Mapping[str, int]] = {"dp1": {"dp": 1}, "dp2 x tp2": {"dp": 2, "tp": 2}}
SPLIT_FORMS = ("contiguous", "batch")  # on a layout of several ranks; one rank has the others
EVERYWHERE = ("QN1", "QN202")  # capture, or no rule: refused whatever the form and the layout
ROWS = 4


@dataclass(frozen=True)
class Form:
    """How a tensor lies in memory. ``store`` makes what a parameter keeps of it, and ``view`` the tensor again;
    ``meet``: the product of a result and what :func:`numbers` gives for it, whose gradient lies in memory that way."""

    fits: Callable[[Tensor], bool]
    store: Callable[[Tensor], Tensor]
    view: Callable[[Tensor, torch.Size], Tensor]
    transposed: Callable[[Tensor], Tensor]


def _backwards(x: Tensor) -> Tensor:
    return x.permute(list(reversed(range(x.dim()))))


def _channels_last(x: Tensor) -> Tensor:
    return x.permute(0, *range(2, x.dim()), 1)


def _channels_second(x: Tensor, _size: torch.Size) -> Tensor:
    return x.permute(0, x.dim() - 1, *range(1, x.dim() - 1))


FORMS: Mapping[str, Form] = {
    "contiguous": Form(lambda x: True, lambda x: x, lambda x, size: x, lambda out: out),
    "transposed": Form(lambda x: x.dim() > 1, _backwards, lambda x, size: _backwards(x), _backwards),
    "expanded": Form(lambda x: x.dim() > 0, lambda x: x[:1], lambda x, size: x.expand(size), lambda out: out.sum()),
    "sliced": Form(
        lambda x: x.dim() > 0,
        lambda x: torch.stack([x, x + 1], -1),
        lambda x, size: x[..., 0],
        lambda out: torch.stack([out, torch.ones_like(out)], -1),
    ),
    "channels_last": Form(
        lambda x: x.dim() in (4, 5),
        _channels_last,
        _channels_second,
        lambda out: _channels_last(out) if out.dim() > 2 else out,
    ),
    # The first input depends on the batch.
    "batch": Form(lambda x: x.dim() > 0 and len(x) == ROWS, lambda x: x, lambda x, size: x, lambda out: out),
}


@dataclass(frozen=True)
class Term:
    sample: Sample
    form: str

    @property
    def name(self) -> str:
        return f"{self.sample.number}_{self.form}"


def terms_of(sample: Sample) -> list[Term]:
    """In all forms that the function itself takes."""
    fit = [Term(sample, name) for name, form in FORMS.items() if form.fits(sample.floats[0])]
    return [term for term in fit if _runs(term)]


def _runs(term: Term) -> bool:
    try:
        Sum([term])(_rows()).backward()
    except Exception:
        return False
    return True


def _rows() -> Tensor:
    return torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Sum(nn.Module):
    """The sum of ``terms``: of all results, each times a parameter."""

    def __init__(self, terms: Sequence[Term]) -> None:
        super().__init__()
        self.terms, self.linear = tuple(terms), nn.Linear(2, 2).double()
        for term in terms:
            form = FORMS[term.form]
            for i, x in enumerate(term.sample.floats):
                stored = form.store(x) if form.fits(x) else x
                value = nn.Parameter(stored.clone(memory_format=torch.contiguous_format), i in term.sample.trained)
                self.register_parameter(f"{term.name}_in{i}", value)
            for i, out in enumerate(self._results(term, _rows())):
                self.register_parameter(f"{term.name}_out{i}", nn.Parameter(_numbers(out)))

    def forward(self, rows: Tensor) -> Tensor:
        loss = self.linear(rows).square().mean()
        for term in self.terms:
            for i, out in enumerate(self._results(term, rows)):
                loss = loss + (out * self.get_parameter(f"{term.name}_out{i}")).sum()
        return loss

    def _results(self, term: Term, rows: Tensor) -> list[Tensor]:
        form, given, zero = FORMS[term.form], [], rows.sum().mul(0.0)
        for i, x in enumerate(term.sample.floats):
            stored = self.get_parameter(f"{term.name}_in{i}") + zero  # a value, and split as the parameter is
            given.append(form.view(stored, x.shape) if form.fits(x) else stored)
        if term.form == "batch":
            given[0] = given[0] + rows[:, 0].mul(0.0).reshape(ROWS, *[1] * (given[0].dim() - 1))
        return [form.transposed(out) for out in term.sample(given)]

    def split(self) -> dict[str, dict[str, str]]:
        """Plan: over tp every input is split along a dim that two ranks can share, after two others share it."""
        found = {}
        for name, value in self.named_parameters():
            fits = [dim for dim, size in enumerate(value.shape) if size and size % 4 == 0]
            if "_in" in name and fits:
                found[name] = {"tp": f"S({fits[-1]})"}
        return found


def _numbers(like: Tensor) -> Tensor:
    count = torch.arange(like.numel(), dtype=torch.float64)
    return count.remainder(7).div(4).add(0.5).reshape(like.shape)


@dataclass(frozen=True)
class Found:
    """``kind``: equal, an error's code, ``different``, ``raw``, or ``nothing`` (to compare)."""

    kind: str
    text: str = ""

    @property
    def wrong(self) -> bool:
        return self.kind in ("different", "raw", "QN209", "QN111")


def compare(terms: Sequence[Term], layout: str) -> Found:
    torch.manual_seed(0)
    rows = _rows()
    model = Sum(terms)
    expected = model(rows)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    mesh = quintnet.Mesh(**LAYOUTS[layout])
    plan = {"parameters": model.split()} if mesh["tp"] > 1 else None
    try:
        program = quintnet.compile(model, mesh, (rows,), plan=plan, check="off", check_finite=False)
        loss = program.step((rows,))
    except quintnet.QuintNetError as error:
        return Found(error.code, str(error)[:600])
    except Exception as error:
        return Found("raw", f"{type(error).__name__}: {str(error)[:300]}")
    mine = {name: p.grad for name, p in program.named_parameters()}
    for name, want in gradients.items():
        text = gap(mine[name], want)
        if text:
            return Found("different", f"{name}: {text}")
    text = gap(loss, expected.detach())
    return Found("different", f"loss: {text}") if text else Found("equal")


def judge(op: Any, count: int) -> Iterator[tuple[str, Found]]:
    """What became of each sample on each layout. What is equal is so in one program: all samples, all forms; else each
    sample is a program, and where it is equal or wrong, each other form."""
    given = samples(op, count)
    if isinstance(given, NoSample):
        yield "", Found("nothing", given.reason)
        return
    terms = {sample.number: terms_of(sample) for sample in given}
    for layout, mesh in LAYOUTS.items():
        split = len(mesh) > 1
        here = {n: [t for t in some if (t.form in SPLIT_FORMS) is split] or some[:1] for n, some in terms.items()}
        whole = compare([term for some in here.values() for term in some], layout)
        for number, some in here.items():
            alone = whole if whole.kind == "equal" else compare(some[:1], layout)
            yield f"{number} {some[0].form} {layout}", alone
            if alone.kind.startswith(EVERYWHERE):
                del terms[number]
            elif whole.kind != "equal" and (alone.kind == "equal" or alone.wrong):
                yield from ((f"{number} {term.form} {layout}", compare([term], layout)) for term in some[1:])
        if not terms:
            return


def entry(found: Sequence[Found]) -> str:
    """One word for an entry."""
    kinds = {one.kind for one in found}
    if any(one.wrong for one in found):
        return "wrong"
    if kinds == {"nothing"}:
        return f"nothing to compare: {found[0].text}"
    if "equal" in kinds:
        return "equal" if len(kinds) == 1 else f"some samples equal, some {'/'.join(sorted(kinds - {'equal'}))}"
    return f"refused: {'/'.join(sorted(kinds))}"


def sweep(part: int, parts: int, count: int = SAMPLES) -> Iterator[tuple[str, list[tuple[str, Found]]]]:
    """Every ``parts``-th entry."""
    for op in database()[part::parts]:
        yield op.formatted_name, list(judge(op, count))
        gc.collect()


@pytest.mark.filterwarnings("ignore")
def test_some_entries_are_equal() -> None:
    """A gradient that nothing reads (a norm of order 0), complex numbers of half precision, rows that are -inf, and a
    view of what lies in memory in another order."""
    names = {"nn_functional_normalize", "chalf", "torch_ops_aten__safe_softmax_default", "view_copy"}
    chosen = [op for op in database() if op.formatted_name in names]
    found = {op.formatted_name: entry([one for _, one in judge(op, 2)]) for op in chosen}
    untraced = {"view_copy": "refused: QN101"} if torch.__version__ < (2, 12) else {}  # by torch.export, on such views
    assert found == dict.fromkeys(names, "equal") | untraced


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_entry_is_equal_or_refused(part: int) -> None:
    found = [(f"{name} {which}", one) for name, some in sweep(part, PARTS) for which, one in some]
    assert any(one.kind == "equal" for _, one in found)
    assert not [f"{name}: {one.kind} {one.text}" for name, one in found if one.wrong]


def _main(part: int, parts: int, count: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for name, found in sweep(part, parts, count):
        word = entry([one for _, one in found])
        counts[word] += 1
        print(name, "|", word, flush=True)
        texts = {" ".join(one.text.split("\n")[1:3]) + one.text * one.wrong: (which, one.kind) for which, one in found}
        for text, (which, kind) in texts.items():
            if kind not in ("equal", "nothing"):
                print("   ", which, kind, " ".join(text.split()), flush=True)
    print(f"{sum(counts.values())} entries")
    for word, n in counts.most_common():
        print(f"{n:5} {word}")


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:4]))
