"""Parts of how values that forward changes in place keep their gradients, and parameters become results."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quintnet_compiler.capture.capture import capture
from quintnet_compiler.capture.changes.assigned_data import place_data, put_data
from quintnet_compiler.capture.changes.autocast import inline_where_off, regions
from quintnet_compiler.capture.changes.changed_values import Tensors, keep_gradients
from quintnet_compiler.capture.changes.memory import itself, same_memory, written_arguments
from quintnet_compiler.capture.changes.no_grad import WITHOUT_GRADIENTS, without_switches
from quintnet_compiler.capture.changes.saved_tensors import unchanged_since_saved
from quintnet_compiler.capture.changes.stored_results import store
from quintnet_compiler.capture.places import LEAF, WHERE
from quintnet_compiler.compat.torch_export import switches_by
from quintnet_compiler.core.annotations import Leaf
from quintnet_compiler.core.errors import CompileError, Where
from quintnet_compiler.ops.derivatives.user_derivatives import after_gradients, declare_gradient, with_tangent

aten = torch.ops.aten


class _Net(nn.Module):
    def __init__(self, body: Callable[[nn.Parameter, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.ones(4)), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.weight, x)


def _views(weight: nn.Parameter, x: Tensor) -> Tensor:
    weight.detach()[1:].mul_(2)
    return (x * weight).sum() + weight[0]


def test_what_is_read_after_a_change_has_the_gradient_of_the_parameter() -> None:
    exported = torch.export.export(_Net(_views), (torch.randn(2, 4),), strict=False)
    keep_gradients(exported)
    nodes = list(exported.graph.nodes)
    weight = nodes[0]
    (change,) = [node for node in nodes if list(written_arguments(node))]
    assert change.target is aten.mul_.Tensor and same_memory(change) is change.args[0]
    (start,) = [node for node in nodes if node.target is after_gradients and node.args == (weight, [])]
    (says,) = [node for node in nodes if node.target is declare_gradient]
    assert says.args[0] is start
    (now,) = [node for node in nodes if node.target is after_gradients and node is not start]
    readers = {node.target for node in now.users}
    assert {aten.mul.Tensor, aten.select.int} == readers, "both the product and the view read the new value"
    (new,) = [node for node in nodes if node.target is with_tangent]
    assert new.args[0].target is aten.detach.default and new.args[0].args[0] is weight


def test_a_graph_that_changes_no_parameter_stays_as_it_is() -> None:
    exported = torch.export.export(_Net(lambda weight, x: (x * weight).sum()), (torch.randn(2, 4),), strict=False)
    before = str(exported.graph)
    keep_gradients(exported)
    assert str(exported.graph) == before


def _graph(forward: Callable[..., Any], *given: Tensor) -> fx.Graph:
    """What a trace makes of ``forward``, with operators in place; for each input, a placeholder."""

    class Module(nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return forward(*given)

    with switches_by(without_switches, lambda ours, theirs: ours):
        graph: fx.Graph = torch.export.export(Module(), given, strict=False).graph
    for place, node in enumerate(graph.find_nodes(op="placeholder")):
        node.name = f"input_{place}"
    return graph


def _named(graph: fx.Graph, *names: str) -> list[fx.Node]:
    found = {node.name: node for node in graph.nodes}
    return [found[name] for name in names]


def test_memory_of_views_copies_and_operators_in_place() -> None:
    def forward(x: Tensor) -> Tensor:
        a, b = (x * 2).split(2)
        return a.add_(1) + b.t().reshape(-1)[0] + torch.mul(a, 2, out=b)

    graph = _graph(forward, torch.randn(4, 2))
    product, add_, copied, out = _named(graph, "mul", "add_", "reshape", "mul_1")
    assert itself(add_).target is operator.getitem and same_memory(itself(add_)) is product
    assert same_memory(copied) is None, "that of a transposed matrix makes a copy"
    assert list(written_arguments(out)) == [out.kwargs["out"]] and same_memory(out) is out.kwargs["out"]


def test_what_is_computed_without_gradients_is_read_behind_detach() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
            x.add_(y)
        return x + y

    graph = _graph(forward, torch.randn(4))
    x, product, change, result = _named(graph, "input_0", "mul", "add_", "add")
    assert WITHOUT_GRADIENTS in product.meta and WITHOUT_GRADIENTS in change.meta
    assert result.args[0] is x, "what is changed there stays what it is"
    for reader, place in ((change, 1), (result, 1)):
        behind: Any = reader.args[place]
        assert behind.target is aten.detach.default and behind.args[0] is product


def test_tensors_of_one_memory() -> None:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        h = x * 2
        d = h.detach()
        d[0].add_(y)  # has a gradient: that of d, and not of h
        return h.sum() + d.sum()

    graph = _graph(forward, torch.randn(2, 4), torch.randn(4))
    x, y, h, d, change = _named(graph, "input_0", "input_1", "mul", "detach", "add_")
    tensors = Tensors(graph, {x, y})
    assert tensors.memory[d] is h and tensors.tensor[d] is d and tensors.of_memory[h] == [h, d]
    (write,) = tensors.writes[change].values()
    assert write.grown == {h} and write.tensor is d and tensors.unseen == {h}
    assert not Tensors(graph, set()).unseen, "without gradients there is nothing to lose"


def test_regions_that_switch_autocast_off_are_parts_of_the_graph() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = x @ x
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return y @ x

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return forward(x)

    gm: Any = torch.export.export(Module(), (torch.randn(2, 2),), strict=False).graph_module
    assert [on for _, on, _, _ in regions(gm)] == [False, True]
    inline_where_off(gm)
    assert [on for _, on, _, _ in regions(gm)] == [True]
    assert len(gm.graph.find_nodes(op="call_function", target=aten.matmul.default)) == 1


def test_an_assignment_of_data_is_a_copy() -> None:
    def forward(weight: nn.Parameter, x: Tensor) -> Tensor:
        weight.data = weight.data * 2
        return (x * weight).sum()

    captured = capture(_Net(forward), (torch.randn(2, 4),))
    assert captured.changed == ("weight",)
    assert not put_data(torch.zeros(2), torch.zeros(3)), "another shape"


def test_a_view_of_what_was_there_before_is_refused() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    view = graph.call_function(aten.view.default, (x, [4]))
    own = graph.call_function(aten.detach.default, (x,))
    value = graph.call_function(aten.mul.Tensor, (y, 2))
    graph.call_function(torch.ops.quintnet.put_data.default, (own, value))
    memory = torch.zeros(4)
    for node in (x, view, own):
        node.meta["val"] = memory.view(4)
    for node in (y, value):
        node.meta["val"] = torch.zeros(4)
    graph.output(graph.call_function(aten.add.Tensor, (view, 1)))
    with pytest.raises(CompileError, match=r"QN110[\s\S]*another tensor has the same memory"):
        place_data(graph)


@pytest.mark.parametrize("order", ["before", "after"])
def test_what_autograd_has_saved_must_not_change(order: str) -> None:
    net, x = _Net(lambda weight, x: (x * weight).sum()), torch.randn(2, 4, requires_grad=True)
    check = unchanged_since_saved([("part", net)])
    loss = net(x) if order == "after" else None
    with torch.no_grad():
        net.weight.clamp_(0, 0.5)
    if loss is None:
        check(net(x))
        return
    with pytest.raises(CompileError, match=r"part.weight after mul has saved"):
        check(loss)


def test_what_is_made_of_parameters_alone_is_computed_where_it_is_read() -> None:
    graph = fx.Graph()

    def leaf(kind: Any, name: str) -> fx.Node:
        node = graph.placeholder(name)
        node.meta = {"val": torch.zeros(4), LEAF: Leaf(kind, name, trainable=kind == "parameter"), WHERE: Where()}
        return node

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta = {"val": torch.zeros(4), WHERE: Where()}
        return node

    w, x = leaf("parameter", "w"), leaf("input", "x")
    short, rows = call(aten.clamp.default, w, -1, 1), call(aten.relu.default, x)
    product = call(aten.mul.Tensor, rows, short)
    graph.output((product, short))
    store(graph, [w])
    graph.lint()
    order = list(graph.nodes)
    assert order.index(short) == order.index(rows) + 1, "behind what the batch alone is read for"
    first, new = graph.output_node().args[0]  # type: ignore[misc]
    assert first is product and new.target is after_gradients and new.args[0].target is aten.detach.default  # type: ignore[union-attr]
