"""Batches of other lengths, flags and structures: programs that are made when they are first needed."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.capture import versions
from quintnet_compiler.driver import any_length, variants
from quintnet_compiler.driver.compiler import follow_program

from .models import _next_token_loss, _tokens, build, worst_error

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {}),
    "tp2": ({"tp": 2}, {}),
    "cp2, ring": ({"cp": 2}, {"context": "ring"}),
    "pp2, 2 microbatches": ({"pp": 2}, {"microbatches": 2}),
    "dp2 x tp2, ZeRO 3": ({"dp": 2, "tp": 2}, {"zero": 3}),
    "pp2 x cp2, interleaved": ({"pp": 2, "cp": 2}, {"microbatches": 2, "schedule": "interleaved", "virtual_stages": 2}),
}


def _padded(rows: int, length: int) -> dict[str, Tensor]:
    ids, labels = _tokens(rows, length, 32)
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def _loss(model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor] | None) -> Tensor:
    if isinstance(batch, dict):
        out = model(**batch)
        return out if isinstance(out, Tensor) else out.loss
    return loss_fn(model(*batch[:-1]), batch[-1]) if loss_fn else model(*batch)


def _difference(
    program: quintnet.CompiledProgram, twin: nn.Module, batches: Sequence[Any], loss_fn: Any = None
) -> float:
    """The largest difference of losses and, in the end, of parameters, from the module that trains beside it."""
    ours = torch.optim.SGD(program.parameters(), 0.05, momentum=0.9)
    theirs = torch.optim.SGD(twin.parameters(), 0.05, momentum=0.9)
    worst = 0.0
    for batch in batches:
        found, expected = program.step(batch), _loss(twin, batch, loss_fn)
        expected.backward()
        worst = max(worst, abs(float(found.detach()) - float(expected.detach())))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    now, then = dict(program.named_parameters()), dict(twin.named_parameters())
    return max(worst, worst_error({n: now[n].detach() for n in then}, {n: p.detach() for n, p in then.items()})[0])


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each capture, whether lengths vary in it."""
    made: list[bool] = []

    def counted(*args: Any, **options: Any) -> Any:
        made.append(options["form"].has_lengths)
        return capture(*args, **options)

    capture = variants.capture
    monkeypatch.setattr(variants, "capture", counted)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_length_is_that_of_the_module(layout: str, captures: list[bool]) -> None:
    axes, options = LAYOUTS[layout]
    model = build("gpt")
    twin = copy.deepcopy(model)
    program = quintnet.compile(model, Mesh(**axes), _tokens(8, 8, 32), **options)
    shapes = [(8, 8), (8, 12), (8, 6), (16, 16), (8, 12), (8, 8)]
    assert _difference(program, twin, [_tokens(*shape, 32) for shape in shapes]) < 1e-9
    assert captures == [False, True]  # one for the first length, and one for all others
    batch = _tokens(8, 10, 32)
    assert float(program.evaluate(batch)) == pytest.approx(float(twin(*batch).detach()), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2, 2 microbatches", pytest.param("dp2 x tp2, ZeRO 3", marks=pytest.mark.slow)])
def test_one_compilation_for_many_lengths(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with other numbers are those that compiling makes, and train as the module does."""
    monkeypatch.setattr(any_length, "FEW", 2)
    usual: list[int] = []
    monkeypatch.setattr(variants, "follow_program", lambda *a, **k: usual.append(1) or follow_program(*a, **k))
    axes, options = LAYOUTS[layout]
    model, beside = build("gpt"), build("gpt")
    twin = copy.deepcopy(model)
    program = quintnet.compile(model, Mesh(**axes), _tokens(8, 8, 32), **options)
    lengths = [12, 10, 14, 13, 11, 15]
    assert _difference(program, twin, [_tokens(8, length, 32) for length in lengths]) < 1e-9
    assert len(usual) == 4, "12 and 10, and as passes ask whether lengths are even, 13 and 11"
    monkeypatch.setattr(any_length, "FEW", 100)
    again = quintnet.compile(beside, Mesh(**axes), _tokens(8, 8, 32), **options)
    for length in lengths:
        for one in (program, again):
            one.prepare(_tokens(8, length, 32))
        found, wanted = (one._programs.latest("train") for one in (program, again))  # type: ignore[attr-defined]
        assert found.digest == wanted.digest and any_length._same(found, wanted), length
    assert len(usual) == 4 + len(lengths)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("hf_llama", {"dp": 2, "tp": 2}),
        ("hf_gpt2", {"pp": 2}),
        pytest.param("hf_llama", {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("hf_gpt2", {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_padded_batches_of_a_transformer(kind: str, axes: dict[str, int], captures: list[bool]) -> None:
    pytest.importorskip("transformers")
    model = build(kind)
    twin = copy.deepcopy(model)
    program = quintnet.compile(model, Mesh(**axes), _padded(8, 8))
    batches = [_padded(8, length) for length in (8, 11, 7)]
    assert _difference(program, twin, batches) < 2e-6  # losses are in float32, see CASES
    assert captures == [False, True]
    whole, filled = program.evaluate(batches[1]), program.evaluate(quintnet.pad_to_bucket(batches[1], 16))
    assert float(whole) == pytest.approx(float(filled), abs=2e-6)


class Positions(nn.Module):
    """Has so many positions; takes another way where sequences are long, and another one on request."""

    def __init__(self, most: int = 16, long: int = 10**6) -> None:
        super().__init__()
        self.places, self.linear, self.long = nn.Parameter(torch.randn(most, 8)), nn.Linear(8, 8), long

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        y = self.linear(x + self.places[: x.shape[1]])
        if x.shape[1] > self.long:
            y = torch.tanh(y)
        return (y * 2 if twice else y).square().mean()


def _positions(**options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Positions(**options).double()
    return model, copy.deepcopy(model)


def _x(length: int, rows: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, length, 8, generator=torch.Generator().manual_seed(length), dtype=torch.float64)}


def test_lengths_that_the_code_allows(captures: list[bool]) -> None:
    model, twin = _positions()
    program = quintnet.compile(model, Mesh(dp=2), _x(4))
    assert _difference(program, twin, [_x(n) for n in (4, 5, 16, 2, 1)]) < 1e-12
    assert captures == [False, True, False]  # one for 2 to 16 positions; a single one is apart
    with pytest.raises(quintnet.CompileError, match=r"QN101[\s\S]*batch\['x'\] is float64\[rows, 17, 8\], and was "):
        program.step(_x(17))
    assert _difference(program, twin, [_x(n) for n in (9, 4)]) < 1e-12  # that did no harm


def test_a_way_for_each_length(captures: list[bool]) -> None:
    model, twin = _positions(long=6)
    program = quintnet.compile(model, Mesh(tp=2), _x(4))
    assert _difference(program, twin, [_x(n) for n in (4, 8, 5, 9, 7, 8)]) < 1e-12
    assert captures == [False, True, True]


def test_flags_and_structures_are_programs_of_their_own() -> None:
    model, twin = _positions()
    program = quintnet.compile(model, Mesh(dp=2), _x(4))
    batches = [_x(4), {**_x(4), "twice": True}, {**_x(4), "twice": False}, _x(4), {"twice": True, **_x(4)}]
    assert _difference(program, twin, batches) < 1e-12


def test_numbers_that_change_are_told_once() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            return super().forward(x).mean() * scale

    model = Scaled(4, 4)
    program = quintnet.compile(model, Mesh(dp=2), (torch.ones(4, 4), 1.0))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(2, 13):
            assert float(program.step((torch.ones(4, 4), float(step)))) == pytest.approx(
                float(model(torch.ones(4, 4), float(step)).detach())
            )
    told = [str(one.message) for one in heard if one.category is quintnet.CompileWarning]
    assert len(told) == 1 and "batch[1] is 9.0, and was 1.0" in told[0] and "pass numbers that change" in told[0]


def test_gradients_of_several_lengths_are_added_up() -> None:
    model, twin = _positions()
    program = quintnet.compile(model, Mesh(dp=2, tp=2), _x(4), zero=1)
    for length in (4, 6, 4, 7):
        program.step(_x(length))
        twin(**_x(length)).backward()
    found = {n: p.grad for n, p in program.named_parameters()}
    assert worst_error(found, {n: p.grad for n, p in twin.named_parameters()})[0] < 1e-12  # type: ignore[arg-type,misc]


@pytest.mark.slow
def test_what_is_not_used_any_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "MAX_PROGRAMS", 3)
    model, twin = _positions()
    program = quintnet.compile(model, Mesh(dp=2), _x(4))
    assert _difference(program, twin, [_x(n) for n in (4, 5, 6, 7, 8, 9, 5)]) < 1e-12
    for length in (3, 5, 6, 7, 8):
        program.evaluate(_x(length))
    gc.collect()
    worlds = program._state().worlds  # type: ignore[attr-defined]
    assert len(worlds) <= 2 * 3 + 1, "training and evaluation, and the program that leads"


# -- in processes


def _in_process(axes: dict[str, int], options: dict[str, Any], lengths: Sequence[int]) -> tuple[Any, ...]:
    model = build("gpt")
    program = quintnet.compile(model, Mesh(**axes), _tokens(8, 8, 32), **options)
    optimizer = torch.optim.SGD(program.parameters(), 0.05, momentum=0.9)
    losses = []
    for index, length in enumerate(lengths):
        losses.append(float(program.step(_tokens(8, length, 32)).detach()))
        if index % 2:  # gradients of two batches of different lengths
            optimizer.step()
            optimizer.zero_grad()
    stores = [one.store for one in program._state().ready.values()]  # type: ignore[attr-defined]
    held = sum(any(bucket.held for bucket in store.buckets) for store in stores if store is not None)
    wrong = ""
    try:
        program.step(_tokens(8, 8, 32)[:1])
    except quintnet.CompileError as error:
        wrong = error.code
    whole = {name: p.full_tensor() for name, p in program.named_parameters() if not p.is_meta}  # type: ignore[attr-defined]
    programs = [one for rows in program._programs._any_length.values() for one in rows.values()]  # type: ignore[attr-defined]
    return losses, whole, held, wrong, sum(len(one.symbolic) for one in programs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 2}, {"zero": 2}),
        pytest.param({"tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, {"microbatches": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_lengths_on_processes(axes: dict[str, int], options: dict[str, Any]) -> None:
    lengths = [8, 12, 6, 8, 12, 16, 10, 14, 12]
    twin = build("gpt")
    theirs = torch.optim.SGD(twin.parameters(), 0.05, momentum=0.9)
    expected = []
    for index, length in enumerate(lengths):
        loss = twin(*_tokens(8, length, 32))
        loss.backward()
        expected.append(float(loss.detach()))
        if index % 2:
            theirs.step()
            theirs.zero_grad()
    for losses, whole, held, wrong, symbolic in quintnet.launch(_in_process, 2, (axes, options, lengths), timeout=240):
        assert losses == pytest.approx(expected, abs=1e-9)
        assert worst_error(whole, {n: p.detach() for n, p in twin.named_parameters() if n in whole})[0] < 1e-9
        assert held == 1, "only one program at a time has memory for gradients"
        assert wrong == "QN101"
        assert symbolic == 1, "14 has the program of 10 with other numbers"


def test_labels_of_another_length_than_inputs() -> None:
    """Sizes that are equal in the first batch may differ in a later one."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8).double()
    twin = copy.deepcopy(model)

    def loss_fn(y: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(y.mean(1), wanted.mean(1))

    def batch(first: int, second: int) -> tuple[Tensor, Tensor]:
        return _x(first)["x"], _x(second)["x"]

    program = quintnet.compile(model, Mesh(dp=2), batch(4, 4), loss_fn=loss_fn)
    batches = [batch(4, 4), batch(6, 6), batch(6, 5), batch(3, 9), batch(7, 7)]
    assert _difference(program, twin, batches, loss_fn) < 1e-12


@pytest.mark.slow
def test_next_token_loss_of_any_length() -> None:
    pytest.importorskip("transformers")
    model = build("hf_llama_double")
    twin = copy.deepcopy(model)
    program = quintnet.compile(model, Mesh(tp=2), _tokens(8, 8, 32), loss_fn=_next_token_loss)
    batches = [_tokens(8, length, 32) for length in (8, 9)]
    assert _difference(program, twin, batches, _next_token_loss) < 1e-9
