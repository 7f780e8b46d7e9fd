"""Parts of how buffers that forward changes become results of a program, and are written back."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintnet_compiler.capture.changes.mutations import changed_state
from quintnet_compiler.capture.places import where_of
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.equivalence.module_training import ModuleTraining, own_errors
from quintnet_compiler.passes.frontend.norm_rewrites import emit_batch_norm
from quintnet_compiler.runtime.state.changed_state import split_results, written_state

from . import graphs

CPU = torch.device("cpu")


class _Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.count += 1
        self.mean.lerp_(h.detach().mean(0), 0.1)
        return h.square().mean()


def _exported(model: nn.Module) -> torch.export.ExportedProgram:
    return torch.export.export(model, (torch.randn(2, 4),), strict=False).run_decompositions({})


def test_what_changes_is_an_output_of_the_graph() -> None:
    exported = _exported(_Averages())
    found = changed_state(exported, (torch.randn(2, 4),), frozenset())
    assert found.keys() == {"count", "mean"}
    outputs = exported.graph.output_node().args[0]
    assert "lerp" in str(outputs[found["mean"]].target) and "add" in str(outputs[found["count"]].target)
    with pytest.raises(CompileError, match=r"QN110[\s\S]*buffer"):
        changed_state(exported, (torch.randn(2, 4),), None)


def test_the_place_of_a_node_is_the_users_innermost_line() -> None:
    places = [where_of(node) for node in _exported(_Averages()).graph.nodes if node.op == "call_function"]
    assert "linear" in {place.module for place in places}
    assert {place.source.split(": ")[-1] for place in places if place.module == "linear"} == {"h = self.linear(x)"}
    assert "self.count += 1" in {place.source.split(": ")[-1] for place in places}
    assert where_of(SimpleNamespace(meta={})).source == ""  # type: ignore[arg-type]


def test_batch_norm_is_sums_over_rows() -> None:
    to = graphs.builder()
    x = graphs.leaf(to, "input", "x", 4, 3, 2)
    weight, bias, mean, variance = (graphs.leaf(to, "parameter", name, 3) for name in ("w", "b", "m", "v"))
    source = torch.fx.Graph().call_function(torch.ops.aten._native_batch_norm_legit_functional.default)
    made = emit_batch_norm(to, source, [x, weight, bias, mean, variance, True, 0.1, 1e-5], {})
    to.output((made[0], *made[3:]))
    values = torch.randn(4, 3, 2), torch.randn(3), torch.randn(3), torch.zeros(3), torch.ones(3)
    found = torch.fx.Interpreter(torch.fx.GraphModule({}, to.graph)).run(*values)
    running = values[3].clone(), values[4].clone()
    expected = F.batch_norm(values[0], *running, *values[1:3], training=True, momentum=0.1, eps=1e-5)
    for ours, theirs in zip(found, (expected, *running), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert not any("batch_norm" in str(node.target) for node in to.graph.nodes)
    one = graphs.leaf(to, "input", "one", 1, 3)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        emit_batch_norm(to, source, [one, weight, bias, mean, variance, True, 0.1, 1e-5], {})


def _program(changed: dict[str, Any], assigned: frozenset[str] = frozenset()) -> Any:
    return SimpleNamespace(captured=SimpleNamespace(changed=changed, assigned=assigned))


def test_results_end_with_new_values() -> None:
    loss, count = torch.tensor(1.0), torch.tensor(2)
    results = SimpleNamespace(path="output 0"), SimpleNamespace(path="count")
    program: Any = SimpleNamespace(last=range(1, 2), results=results, end=None)
    assert split_results(program, [loss, count], {}) == ([loss], {"count": count})


def test_the_end_of_a_step_makes_new_values_of_the_last_results() -> None:
    module = SimpleNamespace(forward=lambda args: (args[1] + torch.sign(args[2]),))
    end = SimpleNamespace(module=module, static=("bias",), dynamic=("end of step 0",), outputs=("bias",))
    results = tuple(SimpleNamespace(path=path) for path in ("output 0", "count", "end of step 0"))
    program: Any = SimpleNamespace(last=range(1, 3), results=results, end=end)
    loss, count, gap = torch.tensor(1.0), torch.tensor(2), torch.tensor([-3.0, 0.0])
    own, new = split_results(program, [loss, count, gap], {"bias": torch.ones(2), "other": loss})
    assert own == [loss] and new.keys() == {"count", "bias"} and new["bias"].tolist() == [0, 1]


def test_values_are_written_in_place_or_put_in_place() -> None:
    there = {"a": torch.zeros(2), "b": torch.ones(2)}
    now = written_state(
        _program({"a": 1, "b": 2}, frozenset({"b"})), {"a": torch.full((2,), 5.0), "b": torch.zeros(2)}, there
    )
    assert now["a"] is there["a"] and there["a"].tolist() == [5, 5]
    assert now["b"] is not there["b"] and there["b"].tolist() == [1, 1] and now["b"].tolist() == [0, 0]


def test_buffers_may_change_places() -> None:
    """The new value of one is the memory of the other."""
    there = {"a": torch.zeros(2), "b": torch.ones(2)}
    written_state(_program({"a": 1, "b": 2}), {"a": there["b"], "b": there["a"]}, there)
    assert there["a"].tolist() == [1, 1] and there["b"].tolist() == [0, 0]


def test_a_module_is_trained_in_its_own_dtypes_or_in_float64() -> None:
    model, batch = _Averages(), (torch.randn(2, 4),)
    exact = ModuleTraining(model, None, CPU, exact=True)
    step = exact.step([(batch, contextlib.nullcontext)])
    assert step.loss.dtype is torch.float64 and step.buffers["count"].item() == 1
    assert step.gradients.keys() == step.parameters.keys() == {"linear.weight", "linear.bias"}
    assert model.count.item() == 0 and model.linear.weight.grad is None, "a copy is trained"


def test_what_rounding_does_to_a_module() -> None:
    """A bias in front of a BatchNorm has no gradient but rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    batch = torch.randn(64, 4), torch.randn(64, 1)
    found = own_errors(model, F.mse_loss, CPU, [[(batch, contextlib.nullcontext)]])
    assert found["loss", "", 0] < 1e-6
    assert found["gradient", "0.bias", 0] > 3 * found["gradient", "2.bias", 0]
