"""Ranks that drift apart, and ranks that save or load something else, are told."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

EVERY, DRIFT, STEPS = 5, 7, 14
Drift = Callable[[quintnet.CompiledProgram, torch.optim.Optimizer], None]


def _net() -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 4)
    return nn.Sequential(*parts).double()


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator, dtype=torch.float64), torch.arange(8) % 4


def _program(axes: dict[str, int], **options: Any) -> quintnet.CompiledProgram:
    return quintnet.compile(_net(), quintnet.Mesh(**axes), _batch(), loss_fn=F.cross_entropy, check="off", **options)


@torch.no_grad()
def _poke(program: quintnet.CompiledProgram, optimizer: torch.optim.Optimizer) -> None:
    list(program.parameters())[1].to_local()[3] += 1e-9  # type: ignore[attr-defined]


def _rate(program: quintnet.CompiledProgram, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def _seed(program: quintnet.CompiledProgram, optimizer: torch.optim.Optimizer) -> None:
    program.set_rng_state({"seed": 5, "step": DRIFT})


def _left_out(program: quintnet.CompiledProgram, optimizer: torch.optim.Optimizer) -> None:
    program.zero_grad()  # what the optimizer would have used


def _adamw(program: quintnet.CompiledProgram) -> torch.optim.Optimizer:
    return torch.optim.AdamW(program.parameters(), lr=1e-2)


def _whole(program: quintnet.CompiledProgram) -> torch.optim.Optimizer:
    """Each parameter's state is on one rank; most ranks have none."""
    return program.optimizer(lambda p: torch.optim.Adafactor(p, lr=1e-2), list(program.parameters())[:1])


def _groups(program: quintnet.CompiledProgram) -> torch.optim.Optimizer:
    """As many as this rank has parameters, with other rates."""
    return torch.optim.SGD([{"params": [p], "lr": 0.01 * len(p)} for p in program.parameters()], lr=0.1, momentum=0.9)


Make = Callable[[quintnet.CompiledProgram], torch.optim.Optimizer]


def _run(
    axes: dict[str, int], drift: Drift | None, folder: str, options: dict[str, Any], make: Make = _adamw
) -> list[str]:
    """What the program says where rank 1 drifts."""
    program = _program(axes, compare_every=EVERY, **options)
    optimizer = make(program)
    try:
        for step in range(STEPS):
            if step in (3, 9):
                program.save(folder, step=step, optimizer=optimizer)
            program.step(_batch())
            if drift is not None and step == DRIFT and torch.distributed.get_rank() == 1:
                drift(program, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    except quintnet.RunError as error:
        return str(error).splitlines()
    return []


CASES: list[tuple[dict[str, int], Drift, str]] = [
    ({"dp": 2}, _poke, "rank 1 has other values than rank 0: parameter 0.bias"),
    ({"tp": 2}, _rate, "rank 1: AdamW, group 0: lr = 0.5; rank 0: AdamW, group 0: lr = 0.01"),
    ({"pp": 2}, _rate, "rank 1: AdamW, group 0: lr = 0.5; rank 0: AdamW, group 0: lr = 0.01"),
    ({"dp": 2}, _seed, "rank 1: random numbers: seed 5, step 8"),
    ({"dp": 2}, _left_out, "rank 1: AdamW, group 0: steps = 8.0; rank 0: AdamW, group 0: steps = 9.0"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("axes", "drift", "said"), CASES)
def test_a_rank_that_drifts_is_named_with_the_last_step_and_checkpoint_that_were_equal(
    axes: dict[str, int], drift: Drift, said: str, tmp_path: Path
) -> None:
    for lines in quintnet.launch(_run, 2, (axes, drift, str(tmp_path), {}), timeout=120):
        assert lines[0].startswith("QN404")
        assert any(line.strip().startswith(said) for line in lines), lines
        saved = f"the newest checkpoint of this run from before that is {tmp_path / 'step-00000003'}"
        assert lines[-2].strip() == f"all ranks were equal before step 4; {saved}"
    program = _program({"dp": 2})  # the fix: go on from there
    assert program.load(tmp_path, step=3).step == 3


def _two_groups(program: quintnet.CompiledProgram) -> torch.optim.Optimizer:
    decayed = [p for p in program.parameters() if p.dim() > 1]
    others = [p for p in program.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)


def _two_groups_drift(folder: str) -> list[str]:
    with warnings.catch_warnings(record=True) as texts:
        warnings.simplefilter("always")
        assert _run({"pp": 2}, _rate, folder, {}, _two_groups) == []
    return [str(text.message) for text in texts if text.category is quintnet.CheckWarning]


def test_a_stage_whose_groups_get_other_settings_is_warned_of(tmp_path: Path) -> None:
    for texts in quintnet.launch(_two_groups_drift, 2, (str(tmp_path),), timeout=120):
        assert len(texts) == 1
        assert "rank 1: AdamW, group 0: lr = 0.5; rank 0: AdamW, group 0: lr = 0.01; at the comparison" in texts[0]


def _all_alike(folder: str) -> list[list[str]]:
    cases: list[tuple[dict[str, int], dict[str, Any], Make]] = [
        ({"dp": 2, "tp": 2}, {"zero": 3}, _adamw), ({"pp": 2, "dp": 2}, {"zero": 1}, _groups),
        ({"tp": 4}, {"recompute": "full"}, _whole), ({"dp": 4}, {"zero": 2}, _adamw),
    ]  # fmt: skip
    return [_run(axes, None, f"{folder}/{i}", options, make) for i, (axes, options, make) in enumerate(cases)]


@pytest.mark.slow
def test_ranks_that_do_not_drift_are_not_told_so(tmp_path: Path) -> None:
    assert quintnet.launch(_all_alike, 4, (str(tmp_path),), timeout=240) == [[[]] * 4] * 4


def _never() -> float:
    program = _program({"dp": 2}, compare_every=0)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    for _ in range(6):
        loss = program.step(_batch())
        if torch.distributed.get_rank() == 1:
            _poke(program, optimizer)
    return float(loss)


def test_it_is_an_option() -> None:
    one, other = quintnet.launch(_never, 2, timeout=120)
    assert one == other > 0
    with pytest.raises(quintnet.CompileError, match="compare_every=-1"):
        _program({"dp": 2}, compare_every=-1)


def _other_arguments(folder: str) -> list[str]:
    """What each call says that rank 1 makes with other arguments; calls with equal ones work after it."""
    rank, texts = torch.distributed.get_rank(), []
    program = _program({"dp": 2})
    optimizer = torch.optim.AdamW(program.parameters())
    program.step(_batch())
    optimizer.step()
    mine = optimizer if rank else None
    for number in (0, 1):
        program.save(f"{folder}/run{number}", step=1, optimizer=optimizer)
        program.save(f"{folder}/run{number}", step=2, optimizer=optimizer)
        program.step(_batch())
        optimizer.step()
    os.chdir(f"{folder}/run{rank}")
    calls: list[Callable[[], object]] = [
        lambda: program.save(f"{folder}/new", step=1 + rank),
        lambda: program.save(f"{folder}/new{rank}", step=1),
        lambda: program.save(f"{folder}/new", step=1, keep=1 + rank),
        lambda: program.save(f"{folder}/new", step=1, optimizer=mine),
        lambda: program.save_async(f"{folder}/new", step=1 + rank),
        lambda: program.load(f"{folder}/run0", step=1 + rank),
        lambda: program.load(f"{folder}/run0", optimizer=mine),
        lambda: program.load(f"{folder}/run{rank}", optimizer=optimizer),
        lambda: program.load("."),
        lambda: program.reserve(f"{folder}/new{rank}"),
        lambda: program.save_pretrained(f"{folder}/weights", merged=bool(rank)),
        lambda: program.save(f"{folder}/new", step=3, extra={"name": "run", "rows": {"seen": rank}}),
        lambda: program.save_async(f"{folder}/new", step=3, extra={"rows": 1} if rank else None),
        lambda: program.save(f"{folder}/new", step=3, extra={"rows": object()}),
        lambda: program.save(f"{folder}/new", step=3, extra={"rows": 10**5000}),
    ]
    for call in calls:
        try:
            call()
        except (quintnet.RunError, quintnet.CheckpointError) as error:
            texts.append(str(error))
        else:
            texts.append("")
    program.save(f"{folder}/new", step=1, optimizer=optimizer)
    assert program.load(f"{folder}/new", optimizer=optimizer).step == 1
    same: list[dict[str, object]] = [{"a": [1, 2], "b": 0.5}, {"b": 0.5, "a": [1, 2]}]
    program.save(f"{folder}/new", step=2, extra=same[rank])
    assert program.load(f"{folder}/new").extra == same[1]
    return texts


@pytest.mark.slow
def test_ranks_that_save_or_load_something_else_are_told_at_once(tmp_path: Path) -> None:
    expected = [
        "step of save: rank 1: 2; all others: 1",
        "folder of save: rank 1:",
        "keep of save: rank 1: 2; all others: 1",
        "optimizer of save: rank 1: AdamW; all others: None",
        "step of save_async: rank 1: 2; all others: 1",
        "step of load: rank 1: 2; all others: 1",
        "optimizer of load: rank 1: AdamW; all others: None",
        "ranks would load 2 different checkpoints of step 2",
        "ranks would load 2 different checkpoints of step 2",
        "folder of reserve: rank 1:",
        "merged of save_pretrained: rank 1: True; all others: False",
        'extra of save: rank 1: "seen": 1; all others: "seen": 0',
        'extra of save_async: rank 1: {\n "rows": 1\n}; all others: {}',
        "extra: rows is a object, which a checkpoint cannot hold",
        "QN603",
    ]
    for texts in quintnet.launch(_other_arguments, 2, (str(tmp_path),), timeout=120):
        assert len(texts) == len(expected)
        for text, part in zip(texts, expected, strict=True):
            assert part in text
