"""cost_models.operators, ops.catalog and capture.matmul_dtypes: what single operators are, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from quintnet_compiler.capture.matmul_dtypes import needs_one_dtype
from quintnet_compiler.core.annotations import Facts, annotate, is_float, is_getitem, shape
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.cost_models.kernels import Kernel
from quintnet_compiler.cost_models.operators import SIZES, guessed, kernel_of, traffic
from quintnet_compiler.ops.catalog import OPERATORS, spec_of
from quintnet_compiler.ops.filters_of_rows import grouped_convolution, grouped_convolution_weight
from quintnet_compiler.ops.rules.notation import rule
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.ops.rules.work import work_of

from ..all_samples import SAMPLES
from ..one_operator import Sample, lowered, operator_program, reference, sharded

aten = torch.ops.aten
# torch differentiates these once
NO_SECOND_DERIVATIVE = [
    aten.silu_backward.default, aten.mish_backward.default, aten.hardsigmoid_backward.default,
    aten.logit_backward.default,
]  # fmt: skip
PRODUCTS = [s for samples in SAMPLES.values() for s in samples if work_of(s.target) == "matmul"]


def _drawn(sample: Sample) -> list[Tensor]:
    dice = Generator().manual_seed(0)
    return [one.draw(dice, one.shape) for one in sample.inputs]


def _made(sample: Sample, given: list[Tensor]) -> Any:
    return sample.call(given, lambda target, *args, **kwargs: target(*args, **kwargs))


def _kernel(sample: Sample) -> Kernel:
    graph, given = fx.Graph(), _drawn(sample)
    leaves = [annotate(graph.placeholder("x"), Facts(x)) for x in given]
    made = _made(sample, given)
    node: fx.Node = sample.call(leaves, lambda target, *args, **kwargs: graph.call_function(target, args, kwargs))
    return kernel_of(annotate(node, Facts(made if isinstance(made, Tensor) else tuple(made))))


@pytest.mark.parametrize("target", sorted(SAMPLES, key=str), ids=str)
def test_every_operator_with_a_rule_has_a_price(target: Any) -> None:
    for sample in SAMPLES[target]:
        kernel = _kernel(sample)
        assert kernel.bytes > 0 or kernel.kind == "view"
        assert (kernel.flops > 0) == (kernel.kind in ("matmul", "attention"))


def _differentiated(sample: Sample) -> fx.Graph:
    one = operator_program(sample, reference(sample, Generator().manual_seed(0)))
    return lowered(sharded(one, (), ()), RULES).graph


def _unpriced(samples: Iterable[Sample]) -> dict[str, str]:
    """Operators of differentiated graphs without a price, and the sample that has them."""
    missing = {}
    for sample in samples:
        for node in _differentiated(sample).nodes:
            if node.op != "call_function" or is_getitem(node):
                continue
            try:
                kernel = kernel_of(node)
                assert kernel.bytes > 0 or kernel.kind == "view" or not traffic(node)
            except CompileError:
                missing[str(node.target)] = str(sample)
    return missing


def _with_derivative(sample: Sample) -> bool:
    return sample.target not in NO_SECOND_DERIVATIVE


@pytest.mark.slow
def test_all_that_autograd_makes_of_an_operator_with_a_rule_has_a_price() -> None:
    assert not _unpriced(filter(_with_derivative, (samples[0] for samples in SAMPLES.values())))


@pytest.mark.slow
def test_all_that_autograd_makes_of_other_calls_has_a_price() -> None:
    assert not _unpriced(filter(_with_derivative, (one for samples in SAMPLES.values() for one in samples[1:])))


def _only(sample: Sample, target: Any) -> list[fx.Node]:
    return [node for node in _differentiated(sample).nodes if node.target == target]


def test_a_price_that_is_a_bound_is_marked() -> None:
    """Of derivatives that nobody described, and of linear algebra, whose arithmetic is that of a product."""
    image = SAMPLES[aten.upsample_bilinear2d.vec][0]
    (node,) = _only(image, aten.upsample_bilinear2d_backward.default)
    assert guessed(node) and kernel_of(node).kind == "memory" and kernel_of(node).bytes == traffic(node)
    (inverse,) = _only(SAMPLES[aten.linalg_inv_ex.default][0], aten.linalg_inv_ex.default)
    size = shape(inverse.args[0])  # type: ignore[arg-type]
    assert guessed(inverse) and kernel_of(inverse).flops == 2 * math.prod(size) * size[-1]
    (linear,) = _only(SAMPLES[aten.linear.default][0], aten.linear.default)
    assert not guessed(linear)


def test_derivatives_that_are_products() -> None:
    """aten.cdist of [2, 4, 6] and [2, 6, 6]; aten.bilinear of 4 rows, with a weight of [4, 6, 2]."""
    halves = _only(SAMPLES[aten.cdist.default][0], aten._cdist_backward.default)  # one for each of the two inputs
    assert [kernel_of(node).flops for node in halves] == [2 * 2 * 4 * 6 * 6] * 2
    products = _only(SAMPLES[aten.bilinear.default][0], aten._trilinear.default)  # one forward, three backward
    assert [kernel_of(node).flops for node in products] == [2 * 4 * 4 * 6 * 2] * 4


@pytest.mark.parametrize("sample", PRODUCTS, ids=str)
def test_sizes_of_products_are_those_that_torch_counts(sample: Sample) -> None:
    """torch.utils.flop_counter knows some; of the others, a product of all that is named, by hand."""
    by_hand = {
        aten._cdist_forward.default: 2 * 2 * 4 * 6 * 6, aten.cdist.default: 2 * 2 * 4 * 6 * 6,
        aten._cdist_backward.default: 2 * 2 * 4 * 6 * 6,
        aten.addbmm.default: 2 * 4 * 4 * 12 * 6, aten.addmv.default: 2 * 4 * 12, aten.mv.default: 2 * 4 * 12,
        aten.dot.default: 2 * 12, aten.bilinear.default: 2 * 4 * 4 * 6 * 2,
    }  # fmt: skip
    with FlopCounterMode(display=False) as counter:
        _made(sample, _drawn(sample))
    counted = counter.get_total_flops() or by_hand.get(sample.target)
    if sample.target == aten.matmul.default and not counted:  # with a vector
        counted = {(12,): 24, (6,): 96}[sample.inputs[1].shape]
    if spec_of(sample.target).by_expert:
        rows, (_, *weight) = sample.inputs[0].shape[0], sample.inputs[2].shape
        counted = 2 * rows * weight[0] * weight[1]
    if sample.target in (grouped_convolution, grouped_convolution_weight):
        x, weight = _drawn(sample)[-2:]
        options = sample.args[len(sample.inputs) :]
        with FlopCounterMode(display=False) as counter:
            aten.convolution(x.flatten(1, 2), weight.flatten(0, 1), None, *options, x.shape[1])
        counted = counter.get_total_flops()
    if spec_of(sample.target).operand_dtype:
        a, b = (given.shape for given in sample.inputs[:2])
        counted = 2 * math.prod(a) * b[0 if sample.args[4] == "mk,nk->mn" else -1]
    assert _kernel(sample).flops == (counted or 0)


def test_what_an_operator_is_priced_as_stands_in_one_place() -> None:
    ruled = {str(target).split(".")[1] for target in RULES}
    assert not [name for name, facts in OPERATORS.items() if facts.work is not None and name in ruled]
    assert all(one.work is not None for one in RULES.values())
    assert all(work_of(target) == "matmul" for target in SIZES)


def test_the_work_of_a_rule_follows_from_its_notation() -> None:
    assert rule("mm", "m k, k n -> m n", linear=[[0], [1]]).work == "matmul"
    assert rule("linear", "... i, o i, o -> ... o", additive=[2]).work == "matmul"
    assert rule("outer", "m, n -> m n", linear=[[0], [1]]).work == "memory"
    assert rule("sum", "m n -> m", linear=[[0]]).work == "memory"
    assert rule("a loss of two tensors", "n, n -> ").work == "memory"
    # what happens to a dim that must be whole may be anything, as the inverse of a matrix
    assert rule("inverse", "... m n -> ... m n", whole="m n").work is None
    assert rule("softmax", "... n -> ... n", whole="n", work="memory").work == "memory"


def test_what_nobody_described_has_no_price() -> None:
    for target in (aten._histogramdd_bin_edges.default, aten.linear.out):
        graph = fx.Graph()
        x, y = (annotate(graph.placeholder(name), Facts(torch.ones(2, 2))) for name in "xy")
        node = annotate(graph.call_function(target, (x, y)), Facts(torch.ones(2, 2)))
        with pytest.raises(CompileError, match="QN210"):
            kernel_of(node)


@pytest.mark.parametrize("sample", [s for s in PRODUCTS if needs_one_dtype(s.target)], ids=str)
def test_torch_refuses_products_of_two_dtypes(sample: Sample) -> None:
    if sample.target == aten.addmv.default and torch.__version__ < (2, 12):
        pytest.skip("torch 2.11 converts the vector that addmv adds; QuintNet refuses two dtypes all the same")
    given = _drawn(sample)
    first = 0 if len(given) == 2 else next(i for i, x in enumerate(given) if is_float(x))
    given[first] = given[first].to(torch.float32)
    with pytest.raises(RuntimeError):
        _made(sample, given)


def _traffic_of(target: Any, args: tuple[Any, ...], made: Any) -> float:
    graph = fx.Graph()
    nodes = [annotate(graph.placeholder("x"), Facts(x)) if isinstance(x, Tensor) else x for x in args]
    return traffic(annotate(graph.call_function(target, tuple(nodes)), Facts(made)))


def test_what_an_operator_does_not_read_costs_nothing() -> None:
    """A lookup reads the rows that it returns, a loss of labels their entries, and what has a shape's size nothing."""
    table, ids, rows = torch.empty(1000, 8), torch.zeros(4, dtype=torch.long), torch.empty(4, 8)
    assert _traffic_of(aten.embedding.default, (table, ids), rows) == 2 * 4 * 8 * 4 + 4 * 8
    assert _traffic_of(aten.zeros_like.default, (table,), table) == 1000 * 8 * 4
    logs, one = torch.empty(4, 1000), torch.empty(())
    loss = (aten.nll_loss_forward.default, (logs, ids, None, 1, -100), (one, one))
    assert _traffic_of(*loss) == 2 * (4 + 4) + 4 * 8
    back = (aten.nll_loss_backward.default, (one, logs, ids, None, 1, -100, one), logs)
    assert _traffic_of(*back) == 4 * 1000 * 4 + 4 * 8 + 2 * 4


def test_gradients_of_a_norms_weights_are_a_second_pass() -> None:
    x, weight = torch.empty(16, 64), torch.empty(64)
    args = (x, x, [64], torch.empty(16, 1), torch.empty(16, 1), weight, weight, [True, True, True])
    graph = fx.Graph()
    nodes = [annotate(graph.placeholder("x"), Facts(a)) if isinstance(a, Tensor) else a for a in args]
    node = graph.call_function(aten.native_layer_norm_backward.default, tuple(nodes))
    kernel = kernel_of(annotate(node, Facts((x, weight, weight))))
    assert kernel.launches == 2
    assert kernel.bytes == 4 * (5 * 16 * 64 + 2 * 16 + 4 * 64)
