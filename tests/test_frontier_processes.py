"""Every case of what lies between a module and its program, on five layouts, in one process and on gloo processes: it
trains as the plain module does, or is refused for the right reason."""

from __future__ import annotations

import functools
import gc
import math
from collections import Counter
from collections.abc import Callable, Mapping

import pytest
import torch

from .frontier import LAYOUTS, TWO_RANKS, Case, Verdict, compare, on_processes, otherwise
from .frontier_cases import cases

PARTS = 8  # slow tests of a layout, about equally long
# these on one layout each; all cases on all layouts are slow
SAMPLE = ("GroupNorm, channels_last", "own derivative, 3", "hook, 6", "dropout, 3", "in place, 3", "state, 0", "thawed",
          "programs: the module's optimizer", "gradients: clipped", "changes: values loaded")  # fmt: skip


def _half() -> Mapping[str, Case]:
    return {name: case for name, case in cases().items() if name in SAMPLE[::2]}


def _other_half() -> Mapping[str, Case]:
    return {name: case for name, case in cases().items() if name in SAMPLE[1::2]}


def _part(part: int) -> Mapping[str, Case]:
    return dict(list(cases().items())[part::PARTS])


def _judge(found: Mapping[str, Mapping[str, Verdict]], *, processes: bool) -> None:
    """Asserts what the cases say; prints how many were equal or refused."""
    known = cases()
    lines = [
        f"{name} on {line}"
        for name, places in found.items()
        for where, verdict in places.items()
        if (line := otherwise(known[name], where, verdict, processes=processes))
    ]
    print(dict(Counter(f"{one.kind} {one.code}".strip() for places in found.values() for one in places.values())))
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("sample", [_half, pytest.param(_other_half, marks=pytest.mark.slow)])
def test_a_sample_on_two_processes(sample: Callable[[], Mapping[str, Case]]) -> None:
    names = list(TWO_RANKS)
    where = {case: names[i % 3] for i, case in enumerate(sample())}
    found = on_processes(sample, meshes=TWO_RANKS, where=where, timeout=280)
    assert found.keys() == set(where) and all(found.values())
    _judge(found, processes=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_in_one_process(layout: str, part: int) -> None:
    torch.set_num_threads(1)
    found = {}
    for name, case in _part(part).items():
        found[name] = {layout: compare(case, LAYOUTS[layout])}
        gc.collect()
    _judge(found, processes=False)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_on_processes(layout: str, part: int) -> None:
    size = math.prod(LAYOUTS[layout].values())
    meshes = {layout: LAYOUTS[layout]}
    found = on_processes(functools.partial(_part, part), meshes=meshes, timeout=400 * size)
    _judge(found, processes=True)
