"""Proof by brute force that the sharding rules are right: every operator, every strategy, forward and backward.

For each rule there are calls of its operator (operator_samples.py). Each runs under every strategy that the rule
allows, with every cut inside every factor; the ranks' parts must make up the unsplit operator's outputs and autograd's
gradients in float64 (one_operator.py). Rules with a seeded mistake must be rejected by the same check.
"""
# ruff: noqa: E501  one line per entry

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.ir.builder import aten
from quintnet_compiler.ops.derivatives.user_derivatives import after_gradients, declare_gradient, with_tangent
from quintnet_compiler.ops.rank_local import dropout, noise
from quintnet_compiler.ops.rules import contractions as contraction_rules
from quintnet_compiler.ops.rules import lookups as lookup_rules
from quintnet_compiler.ops.rules import views as view_rules
from quintnet_compiler.ops.rules.node_factors import along, leading, rows
from quintnet_compiler.ops.rules.notation import Factors, Rule, rule
from quintnet_compiler.ops.rules.reductions import reduction
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.runtime.execute.comm import Comm

from .all_samples import SAMPLES
from .one_operator import Sample, Wrong, call, check
from .operator_samples import ELEMENTWISE, bools, const_pos, f, ints

torch.set_num_threads(1)
TARGETS = sorted(SAMPLES, key=str)


def test_every_rule_has_samples_and_every_sample_a_rule() -> None:
    # dropout and noise have tests of their own (test_dropout.py, test_random_functions.py), and so have derivatives
    # that users write (test_frontier_functions.py)
    assert {*SAMPLES, dropout, noise, with_tangent, declare_gradient, after_gradients} == set(RULES)


@pytest.mark.sample(60)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_strategy_on_one_axis(target: Any) -> None:
    """Axes of 2 ranks, and of 3 (elementwise operators share one rule: for them 3 is left to the sweep)."""
    for sample in SAMPLES[target]:
        check(sample, RULES, (2,))
        if target not in ELEMENTWISE:
            check(sample, RULES, (3,))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_strategy_on_more_ranks_and_axes(target: Any) -> None:
    """Axes of 4 and 6, two nested axes of 2, an axis of 3 in one of 2 and the reverse, and without gradients."""
    for sample in SAMPLES[target]:
        for ranks in ((3,), (4,), (6,), (2, 2), (2, 3), (3, 2)):
            check(sample, RULES, ranks)
        for ranks in ((2,), (3,), (2, 2)):
            check(sample, RULES, ranks, training=False)


_SDPA = aten.scaled_dot_product_attention.default
NESTED = [
    call(aten.mm.default, f(4, 8), f(8, 4)),
    call(aten.linear.default, f(4, 8), f(12, 8), f(12)),
    call(aten.reshape.default, f(4, 12), [2, 2, 3, 4]),
    call(aten.reshape.default, f(2, 4, 6), [8, 6]),
    call(aten.split_with_sizes.default, f(2, 24), [8, 8, 8], 1),
    call(aten.embedding.default, f(8, 4), ints(8, 4), 3),
    call(_SDPA, f(4, 4, 4, 2), f(4, 4, 2, 2), f(4, 4, 2, 4)),
    call(_SDPA, f(2, 8, 4, 2), f(2, 2, 4, 2), f(2, 2, 4, 2), None, 0.0, True, enable_gqa=True),
    call(aten.conv2d.default, f(4, 4, 2, 2), f(8, 4, 1, 1), f(8)),
    call(aten.sum.dim_IntList, f(8, 4), [0]),
    call(aten.expand.default, f(4, 1, 4), [4, 4, 4]),
    # each axis leaves padding
    call(aten.linear.default, f(5, 3), f(7, 3), f(7)),
    call(aten.reshape.default, f(5, 2, 3), [10, 3]),
    call(aten.mul.Tensor, f(5, 3), f(3)),
    call(aten.sum.dim_IntList, f(7, 3), [0]),
]


@pytest.mark.parametrize("sample", NESTED, ids=str)
def test_every_pair_of_strategies_on_two_axes(sample: Sample) -> None:
    """The second axis splits what the first one left: nested slices, terms of slices, slices of terms."""
    check(sample, RULES, (2, 2))


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (NESTED[1], {"split o 1", "split i 1", "split b0 1"}),  # column, row, data (or sequence) parallel
        (NESTED[5], {"split v 1", "split e 1", "split b0 1"}),
        (NESTED[6], {"split b0 1", "split g 1", "split s 1", "split e 1"}),
        (NESTED[4], {"split piece 1", "split piece 2", "split d0 1", "linear (0,)"}),
        (NESTED[9], {"split d0 1", "split d1 1", "linear (0,)"}),
    ],
    ids=["linear", "embedding", "attention", "split", "sum"],
)
def test_rules_offer_what_parallelism_is_made_of(sample: Sample, expected: set[str]) -> None:
    """The proof is not empty: the strategies that everything else relies on are among those checked."""
    assert expected <= set(check(sample, RULES, (2,)))


# -- seeded mistakes


@dataclass(frozen=True)
class Mistake:
    """A wrong rule, and a call for which it gives wrong numbers (or, with ``error``, cannot be lowered)."""

    name: str
    sample: Sample
    rule: Rule
    error: type[Exception] = Wrong


def _mistake(
    name: str,
    sample: Sample,
    wrong: str | Callable[[fx.Node], Factors],
    error: type[Exception] = Wrong,
    **options: Any,
) -> Mistake:
    made = rule(sample.target, wrong, **options) if isinstance(wrong, str) else Rule(sample.target, wrong)
    return Mistake(name, sample, made, error)


def _without(spec: Callable[[fx.Node], Factors], **changes: Any) -> Callable[[fx.Node], Factors]:
    return lambda node: replace(spec(node), **changes)


def _swapped(spec: Callable[[fx.Node], Factors], position: int) -> Callable[[fx.Node], Factors]:
    """The factors inside every dim of an input in reverse order."""

    def factors(node: fx.Node) -> Factors:
        found = spec(node)
        inputs = list(found.inputs)
        inputs[position] = tuple(dim[::-1] for dim in inputs[position])
        return replace(found, inputs=tuple(inputs))

    return factors


_GROUPED = call(_SDPA, f(2, 8, 4, 2), f(2, 2, 4, 2), f(2, 2, 4, 2), enable_gqa=True)
MISTAKES = [
    _mistake("softmax split along its dim", call(aten.softmax.int, f(4, 6), 1), "... -> ..."),
    _mistake("rows that are said to be independent", call(aten.softmax.int, f(4, 6), 0), rows("... n -> ... k")),
    _mistake("layer_norm split along the normalized dim",
             call(aten.layer_norm.default, f(4, 6), [6], f(6), f(6)), "... n, n, n -> ... n", RuntimeError),
    _mistake("addmm's bias added by every rank", call(aten.addmm.default, f(4), f(4, 6), f(6, 4)), "n, m k, k n -> m n"),
    _mistake("linear's bias added by every rank",
             call(aten.linear.default, f(4, 6), f(4, 6), f(4)), "... i, o i, o -> ... o"),
    _mistake("variance as a sum", call(aten.var.correction, f(4, 6), [1]), reduction(sums=True)),
    _mistake("max as a sum", call(aten.amax.default, f(4, 6), [1]), reduction(sums=True)),
    _mistake("cumsum split along its dim", call(aten.cumsum.default, f(4, 6), 1), "... -> ..."),
    _mistake("sort split along its dim", call(aten.sort.default, f(4, 6)), "... -> ..., ..."),
    _mistake("gather split along its dim", call(aten.gather.default, f(4, 6), 1, ints(3, 4, 6)), "m n, m n -> m n"),
    _mistake("matmul that keeps k", call(aten.mm.default, f(4, 6), f(6, 6)), "m k, k n -> m k", CompileError),
    _mistake("attention split over keys", _GROUPED, _without(contraction_rules.attention, whole=frozenset("d"))),
    _mistake("grouped heads in the wrong order", _GROUPED, _swapped(contraction_rules.attention, 0)),
    _mistake("relu of a partial sum", call(aten.relu.default, f(4, 6)), "... -> ...", linear=[[0]]),
    _mistake("a whole added to every term", call(aten.add.Tensor, f(4, 6), f(6)), "..., ... -> ...", linear=[[0]]),
    _mistake("a product of two partial sums", call(aten.mul.Tensor, f(4, 6), f(6)), "..., ... -> ...", linear=[[0, 1]]),
    _mistake("one branch of where is partial",
             call(aten.where.self, bools(4, 6), f(4, 6), f(6)), "..., ..., ... -> ...", linear=[[1]]),
    _mistake("rounding of a partial sum", call(aten._to_copy.default, f(4, 6), dtype=torch.int64),
             "... -> ...", linear=[[0]]),
    _mistake("group_norm split over channels", call(aten.group_norm.default, f(4, 8, 2), 2), leading(2)),
    _mistake("batch statistics split over the batch",
             call(aten._native_batch_norm_legit.no_stats, f(4, 6, 4), f(6), f(6), True, 0.1, 1e-5),
             "n c s, c, c -> n c s, c, c", whole="s"),
    _mistake("a loss split over classes",
             call(aten._log_softmax.default, f(4, 6), 1, False), along("half_to_float")),
    _mistake("convolution split over space",
             call(aten.conv2d.default, f(2, 2, 4, 4), f(2, 2, 3, 3), None, [1, 1], [1, 1]),
             "n i h w, o i x y -> n o h w", whole="x y"),
    _mistake("a reshape as a transposition", call(aten.reshape.default, f(4, 6), [6, 4]), "m n -> n m"),
    _mistake("a fused weight without its parts",
             call(aten.split_with_sizes.default, f(2, 8), [4, 4], 1), _swapped(view_rules.split, 0)),
    _mistake("a transposition that keeps its dims", call(aten.t.default, f(6, 6)), "m n -> m n", CompileError),
    _mistake("embedding with rows out of order",
             call(aten.embedding.default, f(8, 4), ints(8, 4, 6)), _without(lookup_rules.embedding, contiguous=frozenset())),
    _mistake("gradients scaled by frequency",
             call(aten.embedding.default, f(4, 2), ints(4, 4), -1, True), "v e, ... -> ... e"),
    _mistake("index split along the indexed dim",
             call(aten.index.Tensor, f(4, 6), [None, ints(3, 6)]), "m n, n -> m n"),
    _mistake("a mean loss as a sum", call(aten.nll_loss_forward.default, f(4, 6), ints(6, 4), const_pos(6), 1, -100),
             "n v, n, v -> , ", whole="v"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name)
def test_wrong_rules_are_rejected(mistake: Mistake) -> None:
    """The rule in the table passes on the same call, so that it is the mistake which is found."""
    for ranks in ((2,), (3,)):
        check(mistake.sample, RULES, ranks)
    with pytest.raises(mistake.error):
        for ranks in ((2,), (3,)):
            check(mistake.sample, {**RULES, mistake.sample.target: mistake.rule}, ranks)


def test_embedding_rows_without_a_mask_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank looks up every id in its own rows."""

    def unmasked(self: Comm, ids: Tensor, rows: int, axes: Any, sizes: Any) -> tuple[Tensor, Tensor]:
        return ids % rows, torch.zeros_like(ids, dtype=torch.bool)

    monkeypatch.setattr(Comm, "_rows", unmasked)
    with pytest.raises(Wrong, match="split v"):
        check(call(aten.embedding.default, f(8, 4), ints(8, 4)), RULES, (2,))


def test_a_trained_padding_row_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The padding row gets no gradient, on whichever rank it lies."""
    right = Comm.embedding_rows_backward

    def forgetful(self: Comm, grad: Tensor, ids: Tensor, rows: int, padding_idx: int, *rest: Any) -> Tensor:
        return right(self, grad, ids, rows, -1, *rest)

    monkeypatch.setattr(Comm, "embedding_rows_backward", forgetful)
    with pytest.raises(Wrong, match="gradient 0"):
        check(call(aten.embedding.default, f(8, 4), ints(8, 4, 6), 3), RULES, (2,))
