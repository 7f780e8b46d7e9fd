"""What lies between a module and its program, on two gloo processes: equal to the plain module, or refused as it is in
one process."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from . import frontier_programs as made
from .frontier import TWO_RANKS, Case, Verdict, on_processes


class _Loaded(random.Random):
    """Dice that show what is wanted."""

    def __init__(self, way: int) -> None:
        super().__init__(0)
        self.way = way

    def randrange(self, *limits: Any) -> int:
        return self.way

    def random(self) -> float:
        return 0.0

    def choice(self, options: Any) -> Any:
        return options[0]


def _batch(step: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step)
    return torch.randn(8, made.LENGTH, 6, generator=dice), torch.randint(made.CLASSES, (8,), generator=dice)


def _one(kind: type[made.Piece], way: int = 0, **more: Any) -> Case:
    def build() -> made.Mixed:
        return made.Mixed([kind(_Loaded(way)), made.Plain(_Loaded(0))], False, "logits", False, False)

    return Case(build, _batch, F.cross_entropy, made.Mixed.before, **more)  # type: ignore[arg-type]


def _with(loss: Callable[[made.Extra], Callable[..., Tensor]]) -> Case:
    def build() -> Any:
        extra = made.Extra()
        return made.Mixed([made.Plain(_Loaded(0))], False, "logits", False, False), loss(extra), {"extra": extra}

    return Case(build, _batch)


def _cases() -> dict[str, tuple[Case, str]]:
    """Each with the code of the error that refuses it; "" where it is followed."""
    found = {f"norm, {way}": (_one(made.Normed, way), "") for way in range(5)}
    found |= {f"own derivative, {way}": (_one(made.Own, way), "") for way in range(5)}
    found |= {f"hook, {way}": (_one(made.Hooked, way), "QN105" if way in (3, 6, 7) else "") for way in range(8)}
    found |= {f"dropout, {way}": (_one(made.Dropped, way), "") for way in range(5)}
    found |= {f"in place, {way}": (_one(made.InPlace, way), "") for way in range(6)}
    found |= {f"state, {way}": (_one(made.Stateful, way), "QN110") for way in range(6)}
    found |= {f"Python, {way}": (_one(made.Pythonic, way), "QN110" if 2 <= way <= 5 else "") for way in range(7)}
    found["checkpointed derivative"] = _one(made.OwnCheckpointed, 2), ""
    found["checkpoint, reentrant"] = _one(made.Checkpointed), ""
    found["teacher"] = _one(made.Teacher), ""
    found["frozen statistics"] = _one(made.EvalNormed), ""
    found["thawed"] = _one(made.Thawed), ""
    found["evaluates"] = _one(made.Dropped, 4, evaluates=True), ""
    found["two programs"] = _one(made.Tied, others=(made.second_loss,)), ""
    found["loss with weights, partial"] = _with(lambda extra: functools.partial(made.of, extra)), ""
    found["loss with weights, bound"] = _with(lambda extra: extra.bound), ""
    found["loss with weights, closure"] = _with(lambda extra: lambda out, y: extra(2 * out, y)), ""
    return found


# these on one layout each; all cases on all layouts are slow
SAMPLE = ("norm, 0", "norm, 3", "own derivative, 1", "own derivative, 3", "hook, 0", "dropout, 2", "dropout, 3",
          "in place, 3", "state, 0", "Python, 0", "Python, 6", "teacher", "thawed", "two programs",
          "loss with weights, partial")  # fmt: skip


def _all() -> Mapping[str, Case]:
    return {name: case for name, (case, _) in _cases().items()}


def _sample() -> Mapping[str, Case]:
    return {name: case for name, case in _all().items() if name in SAMPLE}


def _wrong(found: Mapping[str, Mapping[str, Verdict]]) -> list[str]:
    expected = {name: code for name, (_, code) in _cases().items()}
    return [
        f"{name} on {where}: expected {expected[name] or 'equal'}, found {verdict}"
        for name, places in found.items()
        for where, verdict in places.items()
        if (verdict.kind, verdict.code) != (("refused", expected[name]) if expected[name] else ("equal", ""))
    ]


def test_a_sample_on_two_processes() -> None:
    assert set(SAMPLE) <= _cases().keys()
    names = list(TWO_RANKS)
    where = {case: names[i % 3] for i, case in enumerate(SAMPLE)}
    found = on_processes(_sample, meshes=TWO_RANKS, where=where, timeout=280)
    assert found.keys() == set(SAMPLE) and all(found.values())
    wrong = _wrong(found)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("layout", TWO_RANKS)
def test_all_on_two_processes(layout: str) -> None:
    found = on_processes(_all, meshes={layout: TWO_RANKS[layout]}, timeout=900)
    wrong = _wrong(found)
    assert not wrong, "\n".join(wrong)
