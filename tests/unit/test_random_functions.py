"""equivalence.random_functions, core.rng.DISTRIBUTIONS, passes.frontend.random_rewrites: what is drawn has the
distribution that torch draws from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.equivalence.random_functions import ProgramNumbers
from quintnet_compiler.passes.frontend.random_rewrites import RANDOM_REWRITES

COUNT, RATES = 40000, torch.tensor([1.0, 2.0, 0.0, 5.0])
DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "uniform_": lambda x: x.uniform_(-2.0, 3.0),
    "normal_": lambda x: x.normal_(2.0, 0.5),
    "normal": lambda x: torch.normal(x.fill_(2.0), 0.5),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli": lambda x: torch.bernoulli(x.fill_(0.7)),
    "exponential_": lambda x: x.exponential_(3.0),
    "log_normal_": lambda x: x.log_normal_(0.1, 0.3),
    "cauchy_": lambda x: x.cauchy_(1.0, 0.5).atan(),
    "geometric_": lambda x: x.geometric_(0.3),
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "random_": lambda x: x.random_(2, 5),
    "random_ of a dtype": lambda x: x.to(torch.int8).random_().to(x.dtype),
    "multinomial": lambda x: torch.multinomial(RATES.expand(COUNT, 4), 2)[:, 0].to(x.dtype),
    "multinomial, second": lambda x: torch.multinomial(RATES.expand(COUNT, 4), 2)[:, 1].to(x.dtype),
    "multinomial, replaced": lambda x: torch.multinomial(RATES, COUNT, True).to(x.dtype),
    "randperm": lambda x: torch.randperm(COUNT)[: COUNT // 2].to(x.dtype) / COUNT,
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_function_draws_from_its_distribution(name: str) -> None:
    """The two samples' distribution functions differ by less than chance makes them in one of a million times
    (Kolmogorov and Smirnov)."""
    torch.manual_seed(0)
    with ProgramNumbers(seed=1, step=2):
        ours = DRAWN[name](torch.empty(COUNT, dtype=torch.float64))
    theirs = DRAWN[name](torch.empty(COUNT, dtype=torch.float64))
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and not torch.equal(ours, theirs)
    grid = torch.cat([ours, theirs]).unique()
    below = [torch.searchsorted(x.sort().values, grid, right=True) / len(x) for x in (ours, theirs)]
    assert float((below[0] - below[1]).abs().max()) < 2.7 * (2 / len(ours)) ** 0.5


def test_numbers_are_those_of_a_key() -> None:
    def drawn(seed: int, step: int) -> list[Tensor]:
        with ProgramNumbers(seed, step):
            return [torch.rand(4), torch.empty(4).normal_()]

    first, again, other = drawn(0, 0), drawn(0, 0), drawn(0, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_functions_that_programs_do_not_have_are_refused() -> None:
    with ProgramNumbers(0, 0), pytest.raises(CompileError, match=r"QN111.*\n.*poisson"):
        torch.poisson(torch.ones(3))
    assert not any("poisson" in str(target) for target in RANDOM_REWRITES)
