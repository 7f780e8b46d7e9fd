"""Which cases of a long sweep ``make test`` runs."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

from ..samples import is_in_part, spread

AXES = [("dp=1", "dp=2", "dp=4"), ("zero=0", "zero=3"), ("recompute", "no recompute")]
ALL = list(product(*AXES))


def test_every_value_is_met_first() -> None:
    met = {value for place in spread(ALL, 3) for value in ALL[place]}
    assert met == {value for values in AXES for value in values}


def test_then_every_pair_is_met_with_few_cases() -> None:
    met = {pair for place in spread(ALL, 7) for pair in combinations(ALL[place], 2)}
    assert met == {pair for case in ALL for pair in combinations(case, 2)}


def test_a_value_that_one_case_has_is_met_wherever_it_stands() -> None:
    cases = [("a", "x"), ("a", "y"), ("a", "x"), ("b", "y")]
    assert spread(cases, 2) == [0, 3]


@pytest.mark.parametrize("count", [0, 1, 5, len(ALL), len(ALL) + 1])
def test_as_many_as_wanted_each_once(count: int) -> None:
    chosen = spread(ALL, count)
    assert len(chosen) == len(set(chosen)) == min(count, len(ALL))


def test_cases_of_one_parameter_are_the_first() -> None:
    assert spread([("a",), ("b",), ("c",)], 2) == [0, 1]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_each_file_is_in_one_part_of_about_equal_size(count: int) -> None:
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    parts = [[name for name in names if is_in_part(name, f"{i + 1}/{count}")] for i in range(count)]
    assert sorted(names) == sorted(name for part in parts for name in part)
    assert max(map(len, parts)) < 1.3 * len(names) / count
