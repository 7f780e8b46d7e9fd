"""ops.rules.trial: rules found by splitting inputs are those of the table, and are proven as the table's are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import quintnet
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.ops.rules.trial.find_rule import _takes_terms_of, find_rule
from quintnet_compiler.ops.rules.trial.split_factor import SplitFactor, can_split_both, factor_of
from quintnet_compiler.ops.rules.trial.trial_call import TrialCall, nearly_equal

from ..one_operator import Sample, call, check
from ..operator_samples import f

aten = torch.ops.aten
DICE = torch.Generator().manual_seed(0)


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, generator=DICE)


INDICES = torch.tensor([[3, 0, 5, 1], [2, 2, 4, 0], [1, 5, 3, 3]])
TEXTS: dict[Any, tuple[list[tuple[Any, ...]], str]] = {
    aten.mm.default: (
        [(tensor(4, 6), tensor(6, 8)), (tensor(6, 8), tensor(8, 4))],
        '"a b, b c -> a c", linear=[[0], [1]]',
    ),
    aten.addmm.default: (
        [(tensor(8), tensor(4, 6), tensor(6, 8)), (tensor(4), tensor(6, 8), tensor(8, 4))],
        '"a, b c, c a -> b a", additive=[0]',
    ),
    aten.native_layer_norm.default: (
        [(tensor(4, 5, 6), [6], tensor(6), tensor(6), 1e-5)],
        '"a b t0d2, t1d0, t2d0 -> a b t3d2, a b t4d2, a b t5d2", whole="t0d2 t1d0 t2d0 t3d2 t4d2 t5d2"',
    ),
    aten.embedding.default: (
        [(tensor(6, 8), INDICES), (tensor(7, 5), INDICES)],
        '"t0d0 a, b c -> b c a", whole="t0d0", linear=[[0]]',
    ),
    aten.sum.default: ([(tensor(4, 6),)], '"a b -> ", linear=[[0]]'),
    aten.cat.default: (
        [([tensor(4, 6), tensor(4, 5)], 1)],
        '"a t0d1, a t1d1 -> a t2d1", whole="t0d1 t1d1 t2d1", linear=[[0, 1]]',
    ),
}


@pytest.mark.parametrize("operator", TEXTS, ids=str)
def test_what_is_found_is_the_rule(operator: Any) -> None:
    samples, text = TEXTS[operator]
    assert str(find_rule(operator, *samples)) == (f'quintnet.rule("{str(operator).replace(".", "::", 1)}", {text})')


PROVEN = [
    call(aten.mm.default, f(4, 6), f(6, 8)),
    call(aten.linear.default, f(4, 8), f(12, 8), f(12)),
    call(aten.baddbmm.default, f(2, 4, 6), f(2, 4, 8), f(2, 8, 6)),
    call(aten._softmax.default, f(4, 6), 1, False),
    call(aten.conv2d.default, f(4, 6, 3, 3), f(8, 6, 2, 2), f(8)),
    call(aten.scaled_dot_product_attention.default, f(2, 4, 6, 8), f(2, 4, 10, 8), f(2, 4, 10, 12)),
]


def _arguments(sample: Sample) -> tuple[Any, ...]:
    generator = Generator().manual_seed(1)
    tensors = [source.draw(generator, source.shape) for source in sample.inputs]
    return sample.call(tensors, lambda target, *args, **kwargs: (*args, kwargs) if kwargs else args)


@pytest.mark.sample(3)
@pytest.mark.parametrize("sample", PROVEN, ids=str)
def test_what_is_found_is_proven_by_brute_force(sample: Sample) -> None:
    """Forward and backward on ranks, as rules of the table are (test_sharding_rules.py)."""
    new_rule = quintnet.find_rule(sample.target, _arguments(sample))
    strategies = check(sample, {**RULES, sample.target: new_rule}, (2,))
    assert any(name.startswith("split") for name in strategies)


@torch.library.custom_op("quintnet_find::scan", mutates_args=())
def scan(x: Tensor, start: Tensor) -> Tensor:
    """Sums along the second dim, from ``start``: rows can be split, in any order; the sum cannot."""
    return x.cumsum(1) + start[:, None]


@torch.library.custom_op("quintnet_find::windows", mutates_args=())
def windows(x: Tensor) -> Tensor:
    """Sums of pairs of neighbours, which only even ranges of rows have whole: cut behind the first row they differ."""
    return x.view(-1, 2, x.shape[1]).sum(1).repeat_interleave(2, 0)


@torch.library.custom_op("quintnet_find::into", mutates_args={"y"})
def into(x: Tensor, y: Tensor) -> None:
    y.copy_(x)


def test_a_users_operator_by_every_name_with_keywords() -> None:
    sample = (tensor(4, 6), {"start": tensor(4)})
    for name in (scan, "quintnet_find::scan", torch.ops.quintnet_find.scan):
        new_rule = quintnet.find_rule(name, sample)
        assert (new_rule.text, new_rule.options["whole"]) == ("a t0d1, a -> a t2d1", "t0d1 t2d1")


def test_a_dim_that_only_some_cuts_split_is_whole() -> None:
    assert quintnet.find_rule(windows, (tensor(8, 6),)).text == "t0d0 a -> t1d0 a"


def test_the_printed_rule_can_be_written_down() -> None:
    new_rule = quintnet.find_rule(scan, (tensor(4, 6), tensor(4)))
    written = eval(str(new_rule), {"quintnet": quintnet})
    assert (written.target, str(written)) == (new_rule.target, str(new_rule))


def test_an_operator_that_writes_is_tried_as_its_functional_form() -> None:
    rule_of_into = quintnet.find_rule(into, (tensor(4), tensor(4)), (tensor(6), tensor(6)))
    assert str(rule_of_into) == 'quintnet.rule("quintnet_find::into.default", "a, a -> a", linear=[[0], [0, 1]])'


def test_what_cannot_be_tried_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a sample"):
        quintnet.find_rule("aten::mm.default")
    with pytest.raises(ValueError, match="writes to its arguments"):
        quintnet.find_rule("aten::add_.Tensor", (tensor(4), tensor(4)))
    with pytest.raises(ValueError, match="returns other numbers when it is called again"):
        quintnet.find_rule(aten.dropout.default, (tensor(4, 6), 0.5, True))
    with pytest.raises(ValueError, match="the same number of tensors"):
        quintnet.find_rule(aten.relu.default, (tensor(4, 6),), (tensor(4),))
    with pytest.raises(ValueError, match="is no operator"):
        quintnet.find_rule(len, (tensor(4),))
    with pytest.raises(ValueError, match="unlike dims have unlike sizes"):
        quintnet.find_rule(aten.cat.default, ([tensor(4, 4)] * 9,))


def test_calls_are_compared_as_their_dtype_allows() -> None:
    assert (
        TrialCall.from_arguments(aten.relu.default, (tensor(4),)).in_float64().output_tensors()[0].dtype
        is torch.float64
    )
    assert nearly_equal(torch.tensor([1.0, float("nan")]), torch.tensor([1.0 + 1e-6, float("nan")]))
    assert not nearly_equal(torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64) + 1e-6)
    assert not nearly_equal(torch.tensor([1]), torch.tensor([2]))


def test_factors_of_a_product_with_an_addend() -> None:
    sample = TrialCall.from_arguments(aten.addmm.default, (tensor(8), tensor(4, 6), tensor(6, 8))).in_float64()
    rows, depth = factor_of([sample], (None, 0, None)), factor_of([sample], (None, 1, 0))
    assert rows == SplitFactor((None, 0, None), (0,))
    assert depth == SplitFactor((None, 1, 0), (None,), additive=frozenset([0]))
    assert depth.is_sum
    assert can_split_both([sample], rows, depth)
    assert factor_of([sample], (None, 1, None)) is None


@torch.library.custom_op("quintnet_find::product_and_relu", mutates_args=())
def product_and_relu(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """A product, to which something is added that is no sum of what becomes of terms of ``bias``."""
    return x @ y + bias.relu()


def test_an_input_of_which_only_shares_add_up_is_not_additive() -> None:
    """Ranks may have terms of any sign."""
    new_rule = find_rule(product_and_relu, (tensor(4, 6), tensor(6, 8), tensor(8)))
    assert (new_rule.text, list(new_rule.options["additive"])) == ("a t0d1, t1d0 b, b -> a b", [])


def test_samples_that_are_all_ones_show_nothing_false() -> None:
    assert find_rule(aten._softmax.default, (torch.ones(4, 6), 1, False)).text == "a t0d1 -> a t1d1"
    assert [*find_rule(aten.tanh.default, (torch.ones(4, 6),)).options["linear"]] == []


def test_a_sample_whose_result_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="returns NaN for a sample"):
        find_rule(aten.log.default, (-torch.ones(4, 6),))


def test_sums_take_terms_of_the_same_inputs() -> None:
    terms = SplitFactor((0, None, None), (None,), additive=frozenset([2]))
    assert _takes_terms_of(terms, {2})
    assert not _takes_terms_of(SplitFactor((1, None, None), (None,)), {2})
    assert _takes_terms_of(SplitFactor((1, None, None), (1,)), {2})
