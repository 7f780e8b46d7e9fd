"""The parts of gradients inside forward, one by one."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, fx, nn

from quintnet_compiler.capture.capture import capture
from quintnet_compiler.capture.derivatives.inner_gradients import place_starts
from quintnet_compiler.capture.derivatives.transforms import by_transform
from quintnet_compiler.compat.torch import is_recording
from quintnet_compiler.compat.torch_func import is_transformed, only_function_modes
from quintnet_compiler.equivalence.made_leaves import MadeLeaves
from quintnet_compiler.ops.derivatives.inner_gradients import gradient, start
from quintnet_compiler.ops.rules.backward_operators import BACKWARD_RULES
from quintnet_compiler.passes.frontend.derivative_rewrites import DERIVATIVE_REWRITES
from quintnet_compiler.passes.frontend.inner_gradients import without_starts
from quintnet_compiler.passes.frontend.normalize import Normalize

aten = torch.ops.aten


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x * self.weight).tanh().sum(), x, create_graph=True)[0].sum()


def test_a_gradient_is_one_node_of_the_trace_and_operators_of_a_backward_later() -> None:
    captured = capture(Slope(), (torch.zeros(8, 4),))
    (node,) = [n for n in captured.graph.nodes if n.target is gradient]
    assert [x.target for x in node.args[1]] == [start] and node.args[3] is True
    targets = [n.target for n in Normalize(8, torch.device("cpu"))(captured).graph.nodes]
    assert aten.tanh_backward.default in targets and not {start, gradient} & set(targets)


def test_what_follows_a_start_reads_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    before = graph.call_function(aten.sin.default, (x,))
    began = graph.call_function(start, (x, 0))
    after = graph.call_function(aten.cos.default, (x,))
    graph.output((before, graph.call_function(gradient, ([after], [began], [], False))))
    place_starts(graph)
    assert before.args == (x,) and after.args == (began,)
    without_starts(graph)
    assert after.args == (x,)


def test_an_input_without_a_start_gets_one_in_front_of_all_that_reads_it() -> None:
    graph = fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    after = graph.call_function(aten.mul.Tensor, (x, other))
    node = graph.call_function(gradient, ([after], [x], [], False))
    graph.output((node,))
    place_starts(graph)
    assert after.args[0].target is start and node.args[1] == [after.args[0]]  # type: ignore[union-attr]
    graph.lint()


def test_leaves_that_a_function_makes() -> None:
    outside = torch.ones(2, requires_grad=True)
    known = torch.ones(2, requires_grad=True)
    leaves = MadeLeaves([known])
    with leaves:
        made = torch.ones(2).detach().requires_grad_()
        outside.requires_grad_()
    assert made in leaves and known in leaves and outside not in leaves
    del made
    gc.collect()
    assert outside not in leaves


def test_outside_of_traces_and_transforms() -> None:
    assert not is_recording() and not by_transform(None)
    assert not is_transformed(torch.ones(2))
    assert torch.vmap(lambda x: x * int(is_transformed(x)))(torch.ones(2)).sum() == 2


def test_modes_are_left_out_and_come_back() -> None:
    leaves = MadeLeaves([])
    with leaves:
        with only_function_modes(lambda mode: False):
            x = torch.ones(2).detach()
        assert x not in leaves
        assert x.detach() is not None


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_a_convolution_are_operators_with_rules(transposed: bool) -> None:
    assert aten.convolution_backward.default in DERIVATIVE_REWRITES
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    net = kind(2, 4, 3, stride=2, padding=1, groups=2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            tensors = [x, *self.net.parameters()]
            return sum(g.square().sum() for g in torch.autograd.grad(self.net(x).square().sum(), tensors))  # type: ignore[return-value]

    graph = Normalize(2, torch.device("cpu"))(capture(Net(), (torch.zeros(2, 2, 8, 8),))).graph
    assert aten.convolution_backward.default not in [n.target for n in graph.nodes]


def test_rules_of_backward_operators_are_linear_in_the_gradient() -> None:
    assert {one.target for one in BACKWARD_RULES} >= {aten.tanh_backward.default, aten.gelu_backward.default}
