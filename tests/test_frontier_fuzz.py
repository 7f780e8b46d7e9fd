"""Random modules at the border between module and program train as the plain module does, or are refused."""

from __future__ import annotations

import gc
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

import quintnet

from .frontier import Verdict, compare, joined
from .frontier_programs import generate, judged, wrong

FAST = [range(3)]
SLOW = [range(3, 30), *(range(first, first + 30) for first in range(1000, 1330, 30))]
ON_PROCESSES = [seed for seed in range(2000, 2100) if math.prod(generate(seed).axes.values()) == 2][:30]


def _judge(seeds: range) -> Counter[str]:
    torch.set_num_threads(1)
    found, failures = Counter[str](), []
    for seed in seeds:
        made, verdict = judged(seed)
        found[f"{verdict.kind} {verdict.code}".strip()] += 1
        if wrong(verdict):
            failures.append(f"{made}\n  {verdict}")
        gc.collect()
    assert not failures, "\n".join([*failures, str(found)])
    return found


@pytest.mark.parametrize("seeds", FAST, ids=str)
def test_a_sample_is_equal_or_refused(seeds: range) -> None:
    assert _judge(seeds)["equal"] >= len(seeds) // 3


@pytest.mark.slow
@pytest.mark.parametrize("seeds", SLOW, ids=str)
def test_many_are_equal_or_refused(seeds: range) -> None:
    found = _judge(seeds)
    print(dict(found))
    assert found["equal"] >= len(seeds) // 3


def _here(seeds: list[int]) -> list[Verdict]:
    torch.set_num_threads(1)
    found = []
    for seed in seeds:
        made = generate(seed)
        found.append(replace(compare(made.case, made.axes), error=None))
        gc.collect()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(ON_PROCESSES), 10))
def test_processes_are_equal_or_refused(first: int) -> None:
    seeds = ON_PROCESSES[first : first + 10]
    ranks = quintnet.launch(_here, 2, (seeds,), timeout=500, collective_timeout=60)
    verdicts = [joined(list(both)) for both in zip(*ranks, strict=True)]
    failures = [f"{generate(seed)}\n  {one}" for seed, one in zip(seeds, verdicts, strict=True) if wrong(one)]
    assert not failures, "\n".join(failures)
    assert sum(one.kind == "equal" for one in verdicts) >= 3
