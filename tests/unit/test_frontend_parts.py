"""passes.frontend: how operators are spelled, on numbers: the rewritten graph computes what torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from quintnet_compiler.compat.torch import draws_random_numbers
from quintnet_compiler.core.annotations import shape
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.precision import Precision
from quintnet_compiler.core.sharding import I, P, R, S
from quintnet_compiler.ir.builder import GraphBuilder, aten
from quintnet_compiler.ir.program import Axis, Strategy
from quintnet_compiler.ops.attention.operator import attention
from quintnet_compiler.ops.collectives import all_reduce
from quintnet_compiler.ops.experts.expert_linear import expert_linear
from quintnet_compiler.ops.rank_local import dropout
from quintnet_compiler.passes.frontend.attention_rewrites import masked_attention, scaled_dot_product
from quintnet_compiler.passes.frontend.bag_rewrites import embedding_bag
from quintnet_compiler.passes.frontend.convolution_rewrites import convolution
from quintnet_compiler.passes.frontend.decompose import decompose, has_parts
from quintnet_compiler.passes.frontend.loss_rewrites import cross_entropy, distance, divergence, many_labels, mean, nll
from quintnet_compiler.passes.frontend.narrow_leaves import narrow_leaves
from quintnet_compiler.passes.frontend.random_rewrites import random_calls
from quintnet_compiler.passes.frontend.rewrites import REWRITES
from quintnet_compiler.passes.frontend.stride_rewrites import as_strided, as_strided_scatter
from quintnet_compiler.passes.lowering.lower_attention import LowerAttention
from quintnet_compiler.strategies.emit_conversion import cast, emit_conversion, loss_seed

from .graphs import builder, leaf, program

Rewrite = Callable[[GraphBuilder, fx.Node, list[Any], dict[str, Any]], fx.Node]


def _numbers(rewrite: Rewrite, target: Any, *given: Any, **options: Any) -> tuple[Tensor, list[str]]:
    """What a rewritten call computes of ``given`` tensors, and the operators that it is made of."""
    to = builder()
    nodes = [
        leaf(to, "input", f"x{i}", *x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x for i, x in enumerate(given)
    ]
    old = fx.Graph().call_function(target, ())
    with to.mode:
        fakes = [to.mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given]
        old.meta["val"] = target(*fakes, **options)
    made = rewrite(to, old, nodes, options)
    to.graph.output(made)
    tensors = [x for x in given if isinstance(x, Tensor)]
    found = fx.GraphModule({}, to.graph)(*tensors)
    return found, [str(n.target).removesuffix(".default") for n in to.graph.nodes if n.op == "call_function"]


def test_a_mean_is_a_sum_and_a_division_by_the_global_count() -> None:
    x = torch.randn(2, 6)
    found, made = _numbers(mean, aten.mean.default, x)
    assert torch.allclose(found, x.mean()) and made == ["aten.sum", "aten.div.Scalar"]
    found, _ = _numbers(mean, aten.mean.dim, x, [-1], True)
    assert torch.allclose(found, x.mean(-1, True))
    half = torch.full((4096,), 17.0, dtype=torch.float16)  # whose sum float16 cannot hold
    assert _numbers(mean, aten.mean.default, half)[0].item() == 17


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses_are_what_torch_says(reduction: int) -> None:
    name = ("none", "mean", "sum")[reduction]
    logits, labels = torch.randn(4, 5, 3), torch.tensor([[0, 1, -100], [4, 2, 3], [-100, 1, 1], [0, 0, 0]])
    plain = (None, reduction, -100, 0.0)
    found, made = _numbers(cross_entropy, aten.cross_entropy_loss.default, logits, labels, *plain)
    assert torch.allclose(found, F.cross_entropy(logits, labels, reduction=name)) and "quintnet.row_nll" in made
    found, _ = _numbers(cross_entropy, aten.cross_entropy_loss.default, logits, labels, None, reduction, -100, 0.1)
    assert torch.allclose(found, F.cross_entropy(logits, labels, reduction=name, label_smoothing=0.1))
    logp = torch.log_softmax(logits, 1)
    found, _ = _numbers(nll, aten.nll_loss_nd.default, logp, labels, None, reduction, -100)
    assert torch.allclose(found, F.nll_loss(logp, labels, reduction=name))
    found, _ = _numbers(distance, aten.l1_loss.default, logits, logp, reduction)
    assert torch.allclose(found, F.l1_loss(logits, logp, reduction=name))
    found, _ = _numbers(divergence, aten.kl_div.default, logp, logits.abs(), reduction)
    assert torch.allclose(found, aten.kl_div.default(logp, logits.abs(), reduction), atol=1e-6)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_a_loss_of_many_labels_is_that_of_its_rows(reduction: int) -> None:
    scores, labels = torch.randn(4, 5), torch.tensor([[0, 2, -1, 0, 0], [4, -1, 0, 0, 0], [1, 2, 3, -1, 0], [-1] * 5])
    to = builder()
    x, y = leaf(to, "input", "x", 4, 5), leaf(to, "input", "y", 4, 5, dtype=torch.int64)
    old = fx.Graph().call_function(aten.multilabel_margin_loss_forward.default, ())
    with to.mode:
        old.meta["val"] = aten.multilabel_margin_loss_forward.default(torch.empty(4, 5), labels, reduction)
    to.output(tuple(many_labels(to, old, [x, y, reduction], {})))
    found, labelled = fx.GraphModule({}, to.graph)(scores, labels)
    expected, known = aten.multilabel_margin_loss_forward.default(scores, labels, reduction)
    assert torch.allclose(found, expected) and torch.equal(labelled, known)


@pytest.mark.parametrize(
    ("dims", "size", "stride", "start", "operators"),
    [
        ((4, 6), (4, 3, 2), (6, 2, 1), 0, ["index.Tensor"]),  # windows of each row
        ((4, 6), (4, 2), (6, 3), 1, ["index.Tensor"]),
        ((4, 6), (3, 2), (1, 7), 2, ["reshape", "index.Tensor"]),  # across rows
        ((4, 6), (4, 6), (6, 1), None, []),
        ((4, 6), (2, 2), (0, 0), 5, ["reshape", "index.Tensor"]),
    ],
    ids=str,
)
def test_strides_are_a_lookup(
    dims: tuple[int, ...], size: tuple[int, ...], stride: tuple[int, ...], start: int | None, operators: list[str]
) -> None:
    """Outer dims that stay as they are remain dims; torch's own operator says what is expected."""
    x = torch.randn(dims, dtype=torch.float64)
    to = builder()
    source = leaf(to, "input", "x", *dims, dtype=torch.float64)
    source.meta["val"] = x
    old = fx.Graph().call_function(aten.as_strided.default, (source,))
    found = as_strided(to, old, [source, list(size), list(stride), start], {})
    to.output((found,))
    made = [str(n.target) for n in to.graph.nodes if n.op == "call_function" and n.all_input_nodes[:1] == [source]]
    assert torch.equal(fx.GraphModule({}, to.graph)(x)[0], x.as_strided(size, stride, start))
    assert made == [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in operators[:1]]


def test_what_strides_say_is_written() -> None:
    x, part = torch.randn(4, 6), torch.randn(4, 2)
    to = builder()
    source, written = leaf(to, "input", "x", 4, 6), leaf(to, "input", "part", 4, 2)
    source.meta["val"] = x
    old = fx.Graph().call_function(aten.as_strided_scatter.default, (source,))
    to.output((as_strided_scatter(to, old, [source, written, [4, 2], [6, 3], 1], {}),))
    assert torch.equal(fx.GraphModule({}, to.graph)(x, part)[0], torch.as_strided_scatter(x, part, (4, 2), (6, 3), 1))


@pytest.mark.parametrize(
    ("x", "size", "stride", "message"),
    [
        (torch.randn(4, 6).t(), [2], [1], "that is not contiguous"),
        (torch.randn(4, 6), [5], [6], "elements 0 to 24"),
    ],
)
def test_strides_of_unknown_memory_are_refused(x: Tensor, size: list[int], stride: list[int], message: str) -> None:
    to = builder()
    source = leaf(to, "input", "x", *x.shape)
    source.meta["val"] = x
    old = fx.Graph().call_function(aten.as_strided.default, (source,))
    with pytest.raises(CompileError, match=message) as caught:
        as_strided(to, old, [source, size, stride], {})
    assert caught.value.code == "QN105"


def test_what_autograd_and_a_write_in_place_differentiate_otherwise_is_refused() -> None:
    to = builder()
    source, written = leaf(to, "parameter", "x", 4, 6), leaf(to, "input", "part", 4, 2)
    source.meta["val"] = torch.randn(4, 6)
    old = fx.Graph().call_function(aten.as_strided_scatter.default, (source,))
    with pytest.raises(CompileError, match="QN105"):
        as_strided_scatter(to, old, [source, written, [4, 2], [6, 3], 1], {})


EACH = "quintnet.grouped_convolution"


@pytest.mark.parametrize(
    ("target", "shapes", "options", "operators"),
    [
        (aten.conv1d.default, [(1, 8, 6), (4, 4, 3), (4,)], ([2], [1], [1], 2), [EACH, "aten.add"]),
        (aten.conv2d.default, [(1, 8, 6, 5), (12, 2, 3, 3)], (None, [1], [0], [2], 4), [EACH]),
        (aten.conv_transpose2d.input, [(1, 8, 3, 4), (8, 2, 3, 2)], (None, [2], [1], [1], 4), [EACH]),
        # channels of several images, and one group of one image
        (aten.conv2d.default, [(2, 8, 6, 5), (12, 2, 3, 3)], (None, [1], [0], [2], 4), ["aten.conv2d"]),
        (aten.conv1d.default, [(1, 8, 6), (4, 8, 3), (4,)], ([2], [1]), ["aten.conv1d"]),
    ],
    ids=str,
)
def test_one_image_in_many_groups_is_a_convolution_of_each(
    target: Any, shapes: list[tuple[int, ...]], options: tuple[Any, ...], operators: list[str]
) -> None:
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    def rewrite(to: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        node.args = tuple(args)
        return convolution(to, node, args, kwargs)

    result, names = _numbers(rewrite, target, *tensors, *options)
    assert torch.allclose(result, target(*tensors, *options), atol=1e-12)
    assert [name.removesuffix(".Tensor") for name in names if "reshape" not in name] == operators


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("padding", [-1, 1])
def test_bags_of_equal_length_are_rows(mode: int, padding: int) -> None:
    table, ids = torch.randn(5, 3), torch.tensor([0, 1, 4, 4, 1, 1])
    to = builder()
    weight, flat = leaf(to, "parameter", "weight", 5, 3), leaf(to, "input", "ids", 6, dtype=torch.int64)
    offsets = to.call(aten.arange.start_step, 0, 6, 2, device=torch.device("cpu"))
    old = fx.Graph().call_function(aten.embedding_bag.padding_idx, ())
    made = embedding_bag(to, old, [weight, flat, offsets, False, mode, False, None, False, padding], {})
    made = to.getitem(made, 0) if isinstance(made, fx.Node) else made[0]
    to.output((made,))
    name, skipped = ("sum", "mean", "max")[mode], padding if padding >= 0 else None
    expected = F.embedding_bag(ids, table, torch.arange(0, 6, 2), mode=name, padding_idx=skipped)
    assert torch.allclose(fx.GraphModule({}, to.graph)(table, ids)[0], expected)
    assert not any(n.target is aten.embedding_bag.padding_idx for n in to.graph.nodes)


def test_attention_without_a_mask_is_one_operator() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    target = aten.scaled_dot_product_attention.default
    found, made = _numbers(scaled_dot_product, target, q, k, v, None, 0.0, True)
    assert made == ["quintnet.attention"] and torch.allclose(
        found, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-5
    )
    found, made = _numbers(scaled_dot_product, target, q[:, 0], k[:, 0], v[:, 0])
    assert made == ["aten.reshape"] * 3 + ["quintnet.attention", "aten.reshape"]
    mask = torch.randn(5, 5)
    assert _numbers(scaled_dot_product, target, q, k, v, mask)[1] == ["aten.scaled_dot_product_attention"]


def test_attention_with_dropout_is_written_out() -> None:
    to = builder()
    q, k, v = (leaf(to, "input", name, 2, 4, 5, 8) for name in "qkv")
    node = fx.Graph().call_function(aten.scaled_dot_product_attention.default, ())
    made = scaled_dot_product(to, node, [q, k, v, None, 0.5, True], {})
    assert shape(made) == (2, 4, 5, 8) and random_calls(to) == 1
    (mask,) = (n for n in to.graph.nodes if n.target is dropout)
    assert mask.kwargs["op"] == 0 and mask.args[1] == 0.5


def test_a_window_as_long_as_the_text_is_none() -> None:
    to = builder()
    q, k, v = (leaf(to, "input", name, 2, 4, 5, 8) for name in "qkv")
    node = fx.Graph().call_function(attention, ())
    for mask in ("causal_window_4", "causal_chunk_4"):
        assert masked_attention(to, node, [q, k, v], {"scale": 1.0, "mask": mask}).kwargs["mask"] == mask
        longer = mask.replace("4", "5")
        assert masked_attention(to, node, [q, k, v], {"scale": 1.0, "mask": longer}).kwargs["mask"] == "causal"


def test_queries_that_a_rank_has_see_what_they_did() -> None:
    to = builder()
    q, k, v = leaf(to, "input", "q", 2, 4, 3, 8), leaf(to, "input", "k", 2, 4, 6, 8), leaf(to, "input", "v", 2, 4, 6, 8)
    whole = builder()
    node = whole.call(attention, *(leaf(whole, "input", name, 2, 4, 6, 8) for name in "qkv"), scale=1.0, mask="causal")
    cp = Axis("cp", 2, "context")
    rows = Strategy((S(2), I, I), (S(2),), "split s 1")
    LowerAttention(to, [cp], [rows])(node, [q, k, v])
    assert "quintnet.rows_of" in {str(n.target).removesuffix(".default") for n in to.graph.nodes}
    plain = builder()
    given = [leaf(plain, "input", name, 2, 4, 6, 8) for name in "qkv"]
    made = LowerAttention(plain, [cp], [Strategy((I, I, I), (I,))])(node, given)
    assert made.target is aten.scaled_dot_product_attention.default and made.args[5] is True


def test_operators_as_those_that_they_are_made_of() -> None:
    assert has_parts(aten.mse_loss.default) and not has_parts(aten.mm.default)
    to = builder()
    x, y = leaf(to, "input", "x", 2, 3), leaf(to, "input", "y", 2, 3)
    graph, nodes = decompose(to.mode, aten.mse_loss.default, (x, y), {})
    assert nodes == [x, y]
    a, b = torch.randn(2, 2, 3).unbind(0)
    assert torch.allclose(fx.GraphModule({}, graph)(a, b), F.mse_loss(a, b))


@pytest.mark.parametrize("train", [True, False])
def test_the_backward_of_a_batch_norm_has_torchs_derivative(train: bool) -> None:
    """In training, that goes through the statistics of the batch, too."""
    dice = torch.Generator().manual_seed(0)
    sizes = (3, 4, 2), (3, 4, 2), (4,), (4,), (4,)
    grad, x, weight, mean, variance = (torch.rand(size, generator=dice, dtype=torch.float64) for size in sizes)
    saved = torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[1:]
    given, last = [grad, x, weight, mean, variance, *saved], (train, 1e-5, [True] * 3)
    to, target = builder(), aten.native_batch_norm_backward.default
    nodes = [leaf(to, "input", f"x{i}", *one.shape, dtype=one.dtype) for i, one in enumerate(given)]
    graph, _ = decompose(to.mode, target, (*nodes, *last), {})
    found = []
    for call in (fx.GraphModule({}, graph), lambda *tensors: target(*tensors, *last)):
        asked = [one.clone().requires_grad_() for one in given[:3]]
        made = call(*asked, *given[3:])
        found.append([*made, *torch.autograd.grad([one.square().sum() for one in made], asked)])
    torch.testing.assert_close(*found)


def test_adding_a_number_is_another_operator_than_adding_a_tensor() -> None:
    x = torch.randn(3)
    found, made = _numbers(REWRITES[aten.add.Tensor], aten.add.Tensor, x, 2)
    assert torch.equal(found, x + 2) and made == ["aten.add.Scalar"]
    assert draws_random_numbers(aten.rand.default) and not draws_random_numbers(aten.add.Tensor)


def test_conversions_as_communication_in_the_dtype_that_is_asked_for() -> None:
    to = builder()
    x = leaf(to, "input", "x", 4, 6, dtype=torch.bfloat16)
    made = emit_conversion(to, x, "tp", 2, P, I, Precision(sums=torch.float32))
    (sums,) = (n for n in to.graph.nodes if n.target is all_reduce)
    assert sums.meta["val"].dtype is torch.float32 and made.meta["val"].dtype is torch.bfloat16
    assert emit_conversion(to, x, "tp", 2, R, I, Precision()) is x
    assert cast(to, x, torch.bfloat16) is x and cast(to, x, torch.float32).meta["val"].dtype is torch.float32
    one = loss_seed(to, torch.tensor(1.0), Precision())
    assert one.target is aten.ones.default and shape(one) == ()


def test_a_leaf_has_the_bits_of_its_only_cast() -> None:
    to = builder()
    w, v = leaf(to, "parameter", "w", 4), leaf(to, "parameter", "v", 4)
    narrow, *both = (to.call(aten._to_copy.default, x, dtype=torch.bfloat16) for x in (w, v, v))
    exact = to.call(aten.mul.Tensor, v, v)
    made = narrow_leaves(program(to, to.call(aten.relu.default, narrow), *both, exact))
    first, second = made.leaves
    assert first.meta["val"].dtype is torch.bfloat16 and made.leaves[first].held is torch.float32
    assert second.meta["val"].dtype is torch.float32 and made.leaves[second].held is None  # read in both
    assert sum(node.target is aten._to_copy.default for node in made.graph.nodes) == 2
    assert narrow_leaves(made) is made


def test_each_row_meets_its_expert() -> None:
    rows, ids = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0])
    weight = torch.tensor([[[1.0, 0.0]], [[0.0, 10.0]]])
    assert expert_linear(rows, ids, weight, None, False).tolist() == [[20.0], [3.0]]
