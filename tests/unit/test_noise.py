"""Layout-invariant random numbers: any part draws what the whole draws, and what is drawn looks random.

The statistics are deterministic: fixed keys, and a test fails if its p-value is below 1e-4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from scipy import stats
from torch import Tensor

from quintnet_compiler.core.rng import Key, keep_mask, normal, uniform

torch.set_num_threads(1)
KEY = Key(seed=1234, step=7, op=3)
SMALLEST = 1e-4
PROBABILITIES = (0.1, 0.5, 0.9)

Draw = Callable[[list[Tensor], tuple[int, ...]], Tensor]
DRAWS: dict[str, Draw] = {
    "mask": lambda positions, sizes: keep_mask(positions, sizes, 0.3, KEY),
    "uniform": lambda positions, sizes: uniform(positions, sizes, KEY, torch.float32),
    "uniform64": lambda positions, sizes: uniform(positions, sizes, KEY, torch.float64),
    "normal": lambda positions, sizes: normal(positions, sizes, KEY, torch.float32),
    "normal64": lambda positions, sizes: normal(positions, sizes, KEY, torch.float64),
}


def _all(*sizes: int) -> list[Tensor]:
    return [torch.arange(size) for size in sizes]


def _mask(rows: int, columns: int, p: float, key: Key = KEY) -> Tensor:
    return keep_mask(_all(rows, columns), (rows, columns), p, key)


def _standardized(mask: Tensor, p: float) -> Tensor:
    """Mean 0 and variance 1 per element, if the mask keeps with probability 1 - p."""
    return (mask.double() - (1 - p)) / math.sqrt(p * (1 - p))


def _looks_normal(sums: Tensor, count: float) -> None:
    """``sums`` of ``count`` standardized elements each: their squares add up to a chi-square variable."""
    squares = sums.double().square().sum().item() / count
    p_value = 2 * min(stats.chi2.cdf(squares, sums.numel()), stats.chi2.sf(squares, sums.numel()))
    assert p_value > SMALLEST


def _independent(a: Tensor, b: Tensor, p: float) -> None:
    """The four outcomes of a pair of elements are as frequent as those of two independent ones."""
    observed = torch.bincount((2 * a + b.to(torch.int64)).flatten(), minlength=4)
    expected = [p * p, p * (1 - p), (1 - p) * p, (1 - p) * (1 - p)]
    assert stats.chisquare(observed.numpy(), [a.numel() * share for share in expected]).pvalue > SMALLEST


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("sizes", [(), (1,), (37,), (16, 1), (12, 33), (5, 6, 7), (2, 3, 4, 35)])
def test_a_part_draws_what_the_whole_draws(sizes: tuple[int, ...], draw: Draw) -> None:
    whole = draw(_all(*sizes), sizes)
    assert whole.shape == sizes
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        positions = [  # any number of positions in any order, repetitions included
            torch.randint(size, (int(torch.randint(1, size + 1, (), generator=generator)),), generator=generator)
            for size in sizes
        ]
        part = draw(positions, sizes)
        assert part.shape == tuple(map(len, positions))
        assert torch.equal(part, whole[torch.meshgrid(*positions, indexing="ij")] if sizes else whole)


def test_a_part_can_be_empty() -> None:
    assert keep_mask([torch.arange(0), torch.arange(5)], (4, 5), 0.5, KEY).shape == (0, 5)


def test_rows_are_counted_over_all_leading_dims() -> None:
    assert torch.equal(keep_mask(_all(3, 4, 5, 6), (3, 4, 5, 6), 0.5, KEY).view(60, 6), _mask(60, 6, 0.5))


def test_more_elements_than_32_bits_can_count() -> None:
    blocks, block = torch.tensor([0, 2**18, 2**19 - 1, 2**20 - 1]), torch.tensor([0, 1, 2**13 - 1])
    columns = torch.arange(2**40 - 256, 2**40)
    rows = (blocks[:, None] * 2**13 + block).flatten()
    mask = keep_mask([blocks, block, columns], (2**20, 2**13, 2**40), 0.5, KEY)
    assert torch.equal(mask.view(12, 256), keep_mask([rows, columns], (2**33, 2**40), 0.5, KEY))
    # Rows and columns at all powers of two, among them 2**31 and 2**32, are different and look independent.
    far = torch.cat([torch.zeros(1, dtype=torch.int64), 2 ** torch.arange(62)])
    for mask in (
        keep_mask([far, torch.arange(256)], (2**62, 256), 0.5, KEY),
        keep_mask([torch.arange(256), far], (256, 2**62), 0.5, KEY).T,
    ):
        assert mask.unique(dim=0).shape == mask.shape
        _looks_normal(_standardized(mask, 0.5).sum(1), 256)


def test_certain_outcomes() -> None:
    assert _mask(500, 500, 0.0).all()
    assert not _mask(500, 500, 1.0).any()


def test_a_mask_with_a_higher_probability_drops_more() -> None:
    assert not (_mask(200, 200, 0.5) & ~_mask(200, 200, 0.25)).any()


def test_the_numbers_never_change() -> None:
    """A run that is resumed with a later version, or on another device, draws the same."""
    mask = _mask(4, 16, 0.5).to(torch.int64)
    assert [f"{row:04x}" for row in (mask << torch.arange(16)).sum(1).tolist()] == ["72dc", "f196", "4667", "7f2e"]
    numbers = uniform(_all(2, 2), (2, 2), KEY, torch.float64)
    assert (numbers * 2**53).flatten().tolist() == [
        0x0F928E4A459049,
        0x108515AA073246,
        0x11A878891321C8,
        0x13FC5BD25216E6,
    ]


@pytest.mark.parametrize("p", PROBABILITIES)
def test_elements_of_a_mask_are_independent(p: float) -> None:
    for seed in range(4):
        mask = _mask(512, 768, p, Key(seed, 0, 0))
        assert stats.binomtest(int(mask.sum()), mask.numel(), 1 - p).pvalue > SMALLEST
        for dim in (0, 1):
            _looks_normal(_standardized(mask, p).sum(dim), mask.shape[dim])
        for distance in (1, 2, 64):  # disjoint pairs of neighbours, and of elements further apart
            for dim in (0, 1):
                pairs = mask.unfold(dim, 2 * distance, 2 * distance)
                _independent(pairs[..., :distance], pairs[..., distance:], p)


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("field", ["seed", "step", "op"])
def test_masks_of_neighbouring_keys_are_independent(field: str, p: float) -> None:
    masks = [_mask(64, 256, p, replace(KEY, **{field: number})) for number in range(40)]
    for a, b in zip(masks[::2], masks[1::2], strict=True):
        _independent(a, b, p)
    # Over all these keys, how often an element is kept, and how many are kept, spreads as at random.
    z = _standardized(torch.stack(masks), p)
    _looks_normal(z.sum(0), len(masks))
    _looks_normal(z.sum((1, 2)), 64 * 256)


def test_keys_are_not_interchangeable() -> None:
    numbers = [(0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 2), (1, 1, 0), (2**64 - 1, 0, 0), (0, 2**63, 0), (0, 0, 0)]
    masks = torch.stack([_mask(64, 64, 0.5, Key(*number)) for number in numbers])
    for i in range(len(numbers)):
        for j in range(i):
            _independent(masks[i], masks[j], 0.5)


def test_rows_are_not_columns() -> None:
    mask = _mask(512, 512, 0.5)
    above = torch.ones_like(mask).triu(1)
    _independent(mask[above], mask.T[above], 0.5)


@pytest.mark.parametrize("p", PROBABILITIES)
def test_corners_of_rectangles_are_independent(p: float) -> None:
    """Where the combination of row and column is too simple, such as r + c, a corner follows from the others."""
    for seed in range(4):
        z = _standardized(_mask(768, 512, p, Key(seed, 1, 2)), p)
        top, bottom = torch.randperm(768, generator=torch.Generator().manual_seed(seed)).chunk(2)
        left, right = torch.randperm(512, generator=torch.Generator().manual_seed(seed)).chunk(2)
        corners = z[top][:, left] * z[top][:, right] * z[bottom][:, left] * z[bottom][:, right]
        _looks_normal(corners.sum(), corners.numel())
        # All rectangles at once: their products add up to the fourth powers of the singular values. None stands out.
        largest = torch.linalg.matrix_norm(z, ord=2).item() / (math.sqrt(768) + math.sqrt(512))
        assert 0.95 < largest < 1.05


@pytest.mark.parametrize("together", [2, 3, 4, 5])
def test_rows_are_independent_several_at_a_time(together: int) -> None:
    signs = 2.0 * _mask(1024, 1024, 0.5) - 1  # at p = 1/2 a product of independent signs is a sign
    for matrix in (signs, signs.T):
        groups = torch.stack([matrix.roll(shift, 0) for shift in range(together)]).prod(0)
        _looks_normal(groups.sum(1), 1024)


def test_every_bit_of_the_threshold_counts() -> None:
    """The numbers behind the mask are uniform beyond what one threshold shows."""
    edges = [k / 64 for k in range(65)]
    kept = [int(_mask(256, 1024, p).sum()) for p in edges]
    observed = [more - less for more, less in pairwise(kept)]
    assert stats.chisquare(observed).pvalue > SMALLEST


def test_no_row_is_repeated() -> None:
    mask = _mask(2**16, 64, 0.5)  # 2**31 pairs of rows: random ones would repeat in one case of 2**33
    assert len(mask.unique(dim=0)) == len(mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_numbers_are_uniform(dtype: torch.dtype) -> None:
    numbers = uniform(_all(300, 700), (300, 700), KEY, dtype)
    assert numbers.dtype == dtype
    assert numbers.min() >= 0 and numbers.max() < 1
    digits = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}[dtype]
    integers = numbers.double() * 2**digits
    assert torch.equal(integers, integers.round())
    middles = (integers.flatten() + 0.5) / 2**digits
    if digits >= 24:
        assert stats.kstest(middles.numpy(), "uniform").pvalue > SMALLEST
    for bit in range(digits):  # every digit is a fair coin
        ones = int(((integers.to(torch.int64) >> bit) & 1).sum())
        assert stats.binomtest(ones, numbers.numel(), 0.5).pvalue > SMALLEST
    assert stats.pearsonr(middles[:-1].numpy(), middles[1:].numpy()).pvalue > SMALLEST


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_numbers_are_normal(dtype: torch.dtype) -> None:
    numbers = normal(_all(300, 700), (300, 700), KEY, dtype)
    assert numbers.dtype == dtype
    z = numbers.double().flatten()
    assert stats.kstest(z.numpy(), "norm").pvalue > SMALLEST
    for power, mean in enumerate([0, 1, 0, 3, 0, 15], start=1):
        moments = z**power
        assert abs(moments.mean().item() - mean) < 4 * moments.std().item() / math.sqrt(len(z))
    _looks_normal(numbers.sum(0), 300)
    _looks_normal(numbers.sum(1), 700)
