"""passes.autodiff, part by part: recording, traces of operators, their backward as nodes, strides, budgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from quintnet_compiler.core.annotations import facts, shape
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.ir.builder import GraphBuilder, aten
from quintnet_compiler.ops.collectives import combine, dispatch
from quintnet_compiler.ops.derivatives.operator_trace import trace
from quintnet_compiler.ops.derivatives.recording import record
from quintnet_compiler.ops.experts.grouped_rows import grouped_bias_grad, grouped_linear, grouped_weight_grad
from quintnet_compiler.passes.autodiff.recompute_budget import Budget, within_budget
from quintnet_compiler.passes.autodiff.row_strides import rows_are_neighbours
from quintnet_compiler.passes.autodiff.vector_jacobian import VectorJacobian
from quintnet_compiler.schedules.kinds import one_f_one_b

from ..golden.programs import golden_passes
from .graphs import builder, leaf


def _targets(graph: fx.Graph) -> list[str]:
    return [str(node.target).removeprefix("aten.") for node in graph.nodes if node.op == "call_function"]


# -- recording


def test_what_a_function_runs_is_a_graph() -> None:
    def work(takes: Any) -> list[Tensor | None]:
        x, y = takes(lambda: torch.ones(2, 3)), takes(lambda: torch.ones(3))
        first, _ = torch.ops.aten.split.Tensor(x + y, 1)
        return [first * 2, None]

    graph = record(work)
    assert [node.name for node in graph.find_nodes(op="placeholder")] == ["x0", "x1"]
    assert [t.rpartition(" ")[2] for t in _targets(graph)][:2] == ["add.Tensor", "split.Tensor"]
    product, nothing = graph.output_node().args[0]  # type: ignore[misc]
    assert nothing is None and product.meta["val"].shape == (1, 3)
    given = torch.arange(6.0).view(2, 3), torch.tensor([1.0, 2.0, 3.0])
    (made, _) = fx.GraphModule({}, graph)(*given)
    assert torch.equal(made, 2 * (given[0] + given[1])[:1])


def test_tensors_from_outside_are_no_inputs() -> None:
    outside = torch.ones(2)
    with pytest.raises(NotImplementedError, match=r"a tensor \(2,\) comes from outside"):
        record(lambda takes: [takes(lambda: torch.ones(2)) + outside])
    with pytest.raises(NotImplementedError, match="reads an element's value"):
        record(lambda takes: [takes(lambda: torch.ones(2)) * takes(lambda: torch.ones(())).item()])


# -- operators and their backward


def _with_backward(to: GraphBuilder, target: Any, *args: Any) -> tuple[fx.Node, list[fx.Node | None]]:
    """An operator of a new graph, and the gradients of its inputs for a tangent that is called t."""
    made, pullback = VectorJacobian(to, {}).apply(target, args, {}, [0])
    assert made[0] is not None
    with to.mode:
        tangent = to.placeholder("t", torch.empty(shape(made[0])))
    return made[0], pullback([tangent])


def _run(to: GraphBuilder, results: list[fx.Node | None], *given: Tensor) -> list[Tensor]:
    to.graph.output([r for r in results if r is not None])
    placeholders = to.graph.find_nodes(op="placeholder")
    assert len(placeholders) == len(given)
    return fx.Interpreter(fx.GraphModule({}, to.graph)).run(*given)  # type: ignore[no-any-return]


def test_the_backward_of_a_linear_is_two_products_and_a_sum() -> None:
    to = builder()
    x, w, b = (leaf(to, "parameter", name, *size) for name, size in [("x", (2, 3)), ("w", (4, 3)), ("b", (4,))])
    made, gradients = _with_backward(to, aten.linear.default, x, w, b)
    assert _targets(to.graph) == ["linear.default", "mm.default", "t.default", "mm.default", "sum.dim_IntList"]
    given = [torch.randn(size, dtype=torch.float64).requires_grad_() for size in [(2, 3), (4, 3), (4,)]]
    tangent = torch.randn(2, 4, dtype=torch.float64)
    out, *found = _run(to, [made, *gradients], *(x.detach() for x in given), tangent)
    expected = torch.nn.functional.linear(*given)
    assert torch.allclose(out, expected)
    for one, other in zip(found, torch.autograd.grad(expected, given, tangent), strict=True):
        assert torch.allclose(one, other)


def test_a_batch_gets_no_gradient() -> None:
    to = builder()
    x, w = leaf(to, "input", "x", 2, 3), leaf(to, "parameter", "w", 4, 3)
    _, gradients = _with_backward(to, aten.linear.default, x, w)
    assert gradients[0] is None and gradients[1] is not None and shape(gradients[1]) == (4, 3)


def test_what_is_dispatched_is_combined_on_its_way_back() -> None:
    to = builder()
    x, order = leaf(to, "parameter", "x", 4, 3), leaf(to, "input", "order", 4, dtype=torch.int64)
    counts = leaf(to, "input", "counts", 2, 2, 3, dtype=torch.int64)
    _, (gradient, *nothing) = _with_backward(to, dispatch, x, "ep", 2, order, counts)
    assert nothing == [None, None] and gradient is not None and gradient.target is combine
    assert gradient.args[3:] == (order, counts)


@pytest.mark.parametrize("transposed", [False, True])
def test_one_plan_serves_a_product_of_experts_and_its_gradients(transposed: bool) -> None:
    to = builder()
    rows, ends = leaf(to, "parameter", "rows", 6, 4), leaf(to, "input", "ends", 3, dtype=torch.int32)
    weight, bias = leaf(to, "parameter", "w", 3, 4, 4), leaf(to, "parameter", "b", 3, 4)
    _, gradients = _with_backward(to, grouped_linear, rows, ends, weight, bias, transposed)
    made = [None if g is None else g.target for g in gradients]
    assert made == [grouped_linear, None, grouped_weight_grad, grouped_bias_grad]
    assert all(ends in g.args for g in gradients if g is not None)
    assert gradients[0] is not None and gradients[0].args[4] is not transposed


def test_a_trace_is_made_once_for_equal_calls() -> None:
    to, templates = builder(), dict[Any, Any]()
    x, y = leaf(to, "parameter", "x", 2, 3), leaf(to, "parameter", "y", 2, 3)
    vjp = VectorJacobian(to, templates)
    for node in (x, y):
        vjp.apply(aten.gelu.default, [node], {}, [0])
    assert len(templates) == 1
    vjp.apply(aten.gelu.default, [leaf(to, "parameter", "z", 2, 4)], {}, [0])
    assert len(templates) == 2


def test_the_trace_of_a_square() -> None:
    to = builder()
    x = leaf(to, "parameter", "x", 2, 3)
    found = trace(aten.pow.Tensor_Scalar, [x, 2], {}, [x], [0], to.mode)
    assert len(found.inputs) == len(found.tangents) == len(found.outputs) == len(found.gradients) == 1
    assert found.outputs[0] in found.forward and found.gradients[0] not in found.forward and not found.dense
    given, tangent = torch.tensor([[3.0]]), torch.tensor([[5.0]])
    out, gradient = fx.GraphModule({}, found.graph)(given, tangent)
    assert out.item() == 9 and gradient.item() == 30


# -- strides


def test_whether_rows_lie_together() -> None:
    to = builder()
    x, w = leaf(to, "input", "x", 4, 6), leaf(to, "parameter", "w", 4, 6)
    y = to.call(aten.linear.default, x, w)
    assert rows_are_neighbours(y) and rows_are_neighbours(to.call(aten.relu.default, y))
    assert not rows_are_neighbours(to.call(aten.t.default, y))
    assert not rows_are_neighbours(x) and not rows_are_neighbours(to.call(aten.relu.default, x))  # who knows


# -- a budget of saved values


def _transformer() -> Any:
    return next(made for name, made in golden_passes("transformer") if name == "Differentiate")


@pytest.mark.slow
def test_a_budget_is_kept_with_as_little_as_possible() -> None:
    made = _transformer()
    inside = {
        n for n in made.graph.nodes
        if n in made.stage and facts(n).phase == "forward" and facts(n).where.module.startswith("blocks")
    }  # fmt: skip
    schedule = one_f_one_b(2, 2)

    def again(size: int) -> set[fx.Node]:
        return within_budget(made, inside, frozenset(), Budget(size, schedule, lambda node: 1.0))

    assert again(2**30) == set()
    sizes = [len(again(size)) for size in (2000, 1500, 1000)]
    assert sizes[0] == 0 and 0 < sizes[1] < sizes[2]
    with pytest.raises(CompileError, match=r"stage rank \d saves \d+ bytes at least, and the plan allows 1"):
        again(1)
