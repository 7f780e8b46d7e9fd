"""capture, part by part: graphs of small modules, modes, repetition, blocks that are traced once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting

import quintnet
from quintnet_compiler.capture.block_reuse import blocks_once
from quintnet_compiler.capture.canonical import module_of
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.capture.derivatives.autograd_functions import needs_gradient
from quintnet_compiler.capture.derivatives.inner_gradients import InnerGradients
from quintnet_compiler.capture.derivatives.module_hooks import ModuleHooks
from quintnet_compiler.capture.derivatives.tensor_hooks import place_hooks
from quintnet_compiler.capture.derivatives.user_derivatives import DerivativeFinder
from quintnet_compiler.capture.matmul_dtypes import check_dtypes
from quintnet_compiler.capture.modes import evaluating, modes_of_a_trace, refuse_modes, uncompiled
from quintnet_compiler.capture.places import LEAF, WHERE
from quintnet_compiler.capture.sparse_gradients import check_dense
from quintnet_compiler.capture.step_module import StepModule, loss_of
from quintnet_compiler.capture.traced_as import TRACED_AS, combinations, corrcoef, cov, instance_norm
from quintnet_compiler.capture.versions import MAX_PROGRAMS, CapturedVersions, Version
from quintnet_compiler.capture.watched_trace import WatchedTrace
from quintnet_compiler.compat.torch_settings import QUESTIONS, questions_answered
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.features.text_generation.capture_call import Shape, cache_shapes, capture_call
from quintnet_compiler.ir.batch_form import BatchForm, FlatBatch
from quintnet_compiler.ir.program import Captured
from quintnet_compiler.ir.repeated_blocks import longest_repetition


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().max()
        return self.second(F.relu(self.first(x))) + self.offset * scale


BATCH = (torch.ones(3, 4), torch.zeros(3, 4))


def _captured(model: nn.Module) -> Captured:
    return capture(model, BATCH, F.mse_loss)


def _targets(captured: Captured) -> list[str]:
    return [str(node.target) for node in captured.graph.nodes if node.op == "call_function"]


def test_a_captured_graph_has_leaves_ties_and_places() -> None:
    captured = _captured(Two())
    leaves = {n.meta[LEAF].name: n.meta[LEAF].kind for n in captured.graph.nodes if n.op == "placeholder"}
    assert leaves["first.weight"] == "parameter" and leaves["offset"] == "buffer" and leaves["[0]"] == "input"
    assert "second.weight" not in leaves and captured.aliases == {"second.weight": "first.weight"}
    linears = [node for node in captured.graph.nodes if "linear" in str(node.target)]
    assert [module_of(node) for node in linears] == ["first", "second"]
    assert "self.second(F.relu(self.first(x)))" in linears[1].meta[WHERE].source


def test_regions_without_gradients_are_inlined_behind_detach() -> None:
    targets = _targets(_captured(Two()))
    assert not any("set_grad" in target for target in targets) and "aten.detach.default" in targets


def test_products_of_two_dtypes_are_refused_with_the_line() -> None:
    captured = _captured(Two())
    check_dtypes(captured.graph)
    weight = next(n for n in captured.graph.nodes if n.op == "placeholder" and n.meta[LEAF].name == "first.weight")
    weight.meta["val"] = weight.meta["val"].to(torch.bfloat16)
    with pytest.raises(CompileError, match=r"is given torch\.float32 and torch\.bfloat16") as told:
        check_dtypes(captured.graph)
    assert told.value.where is not None and "self.first(x)" in told.value.where.source


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).square().mean()


def test_a_sparse_gradient_is_refused_with_the_line() -> None:
    check_dense(_captured(Two()).graph)
    with pytest.raises(CompileError, match=r"QN105[\s\S]*embedding\.default with sparse=True") as told:
        capture(Table(), (torch.arange(4),))
    assert told.value.where is not None and told.value.where.module == "table"


def test_definitions_that_a_trace_can_follow_are_torchs() -> None:
    dice = torch.Generator().manual_seed(0)
    x, weights = torch.randn(3, 6, generator=dice), torch.rand(6, generator=dice)
    counts = torch.tensor([1, 2, 0, 3, 1, 1])
    for options in ({}, {"correction": 0}, {"fweights": counts}, {"fweights": counts, "aweights": weights}):
        for given in (x, x[0], torch.complex(x, x.flip(1))):
            torch.testing.assert_close(TRACED_AS[torch.cov](given, **options), torch.cov(given, **options))
    with warnings.catch_warnings(action="ignore"):  # of too few observations
        few, expected = cov(x[:, :2], correction=3), torch.cov(x[:, :2], correction=3)
    torch.testing.assert_close(few, expected, equal_nan=True)
    for given in (x, x[0], torch.complex(x, x.flip(1))):
        torch.testing.assert_close(corrcoef(given), torch.corrcoef(given))
    for length, again in ((1, False), (2, True), (3, False), (7, False)):
        assert torch.equal(combinations(x[0], length, again), torch.combinations(x[0], length, again))


def test_instance_norm_averages_its_statistics_over_rows() -> None:
    """Those of 16 bits are at least as near to float64 as torch's own."""
    x = torch.randn(3, 4, 2, 5, generator=torch.Generator().manual_seed(0))
    mine, theirs, exact, narrow, rounded = ((torch.zeros(4), torch.ones(4)) for _ in range(5))
    for _ in range(2):
        torch.testing.assert_close(instance_norm(x, *mine, momentum=0.3), F.instance_norm(x, *theirs, momentum=0.3))
        instance_norm(x.bfloat16(), *narrow, momentum=0.3)
        F.instance_norm(x.bfloat16(), *rounded, momentum=0.3)
        F.instance_norm(x.bfloat16().float(), *exact, momentum=0.3)
    torch.testing.assert_close(mine, theirs)
    for a, b, c in zip(narrow, rounded, exact, strict=True):
        assert (a - c).abs().max() <= (b - c).abs().max()
    kept = (x, *mine, None, None, False)
    torch.testing.assert_close(instance_norm(*kept), F.instance_norm(*kept))


def test_modes_are_put_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False]


def test_autocast_is_refused_around_programs_and_off_inside() -> None:
    refuse_modes(torch.device("cpu"))
    with torch.autocast("cpu"):
        with pytest.raises(CompileError, match=r"torch\.autocast is on"):
            refuse_modes(torch.device("cpu"))
        with modes_of_a_trace():
            refuse_modes(torch.device("cpu"))


ASKED: dict[str, Callable[[], bool]] = {
    "is_exporting": lambda: torch.compiler.is_exporting(),
    "is_compiling": lambda: torch.compiler.is_compiling(),
    "imported is_exporting": is_exporting,
    "imported is_compiling": is_compiling,
    "of _dynamo": lambda: torch._dynamo.is_compiling(),
}


class Asking(nn.Module):
    """Computes otherwise while it is traced, as models of transformers do for what export cannot do."""

    def __init__(self, asks: Callable[[], bool]) -> None:
        super().__init__()
        self.layer, self.asks = nn.Linear(4, 4), asks

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.tan() if self.asks() else x.sin())


@pytest.mark.parametrize("asks", ASKED.values(), ids=ASKED)
def test_a_model_that_asks_whether_it_is_traced_is_told_no(asks: Callable[[], bool]) -> None:
    targets = _targets(_captured(Asking(asks)))
    assert "aten.sin.default" in targets and "aten.tan.default" not in targets


def test_torch_itself_is_told_that_it_exports() -> None:
    def told(file: str) -> bool:
        found: bool = eval(compile("torch.compiler.is_exporting()", file, "eval"), {"torch": torch})
        return found

    with mock.patch.object(torch.compiler, "_is_exporting_flag", True):
        with uncompiled(("/torch/",)):
            assert told("/torch/nn/functional.py") and not told("/home/model.py")
            with questions_answered(lambda truth: not truth, lambda ours, theirs: ours):
                assert told("/home/model.py") and {"is_compiling", "is_exporting"} == QUESTIONS
        assert told("/home/model.py")


def test_repetitions() -> None:
    assert longest_repetition("abcabcabcabcabd", 0) == (3, 4)
    assert longest_repetition("xaaaaaa", 1) == (1, 6) and longest_repetition("xaaaaaa", 0) == (1, 1)
    assert longest_repetition("aaa", 0) == (1, 1)  # three are kept: nothing is saved


class Switch:
    def __init__(self) -> None:
        self.on = True

    def hold(self) -> bool:
        return self.on

    def broken(self) -> list[str]:
        return [] if self.on else ["scale is 2 and was 1"]


def test_the_version_of_the_module_as_it_is_now() -> None:
    kept, switches, batch = CapturedVersions(), [Switch() for _ in range(2)], (torch.zeros(4, 3),)
    flat = FlatBatch.flatten(batch)
    assert kept.look("train", flat, 4) is None and kept.changes_since_capture("train") == ""
    assert kept.first_capture("train") is None

    def add(guards: Any, form: BatchForm) -> Version:
        return kept.add("train", Captured(None, {}, {}, form, None, True, guards=guards))  # type: ignore[arg-type]

    form = BatchForm.of_batch(batch, 4)
    first, second = add(switches[0], form), add(switches[1], form)
    assert kept.look("train", flat, 4) == (second, {"rows": 4}) and kept.look("evaluate", flat, 4) is None
    switches[1].on = False
    assert kept.look("train", flat, 4) == (first, {"rows": 4}) and kept.changes_since_capture("train") == ""
    assert kept.look("train", FlatBatch.flatten((torch.zeros(4, 5),)), 4) is None
    other = kept.alike("train", FlatBatch.flatten((torch.zeros(2, 5),)))
    assert other is not None and other[0] is first
    assert other[1].varying_sizes(FlatBatch.flatten((torch.zeros(8, 9),))) == {"rows": 8, "length0": 9}
    switches[0].on = False
    assert kept.look("train", flat, 4) is None and kept.changes_since_capture("train") == "scale is 2 and was 1"
    assert kept.alike("train", FlatBatch.flatten((torch.zeros(2, 5),))) is None


def test_what_does_not_train_is_for_the_modes_of_gradients_in_which_it_was_traced() -> None:
    form, switch = BatchForm.of_batch((torch.zeros(4, 3),), 4), Switch()
    trained, evaluated = (Captured(None, {}, {}, form, None, x, guards=switch) for x in (True, False))  # type: ignore[arg-type]
    version, step = Version(evaluated), Version(trained)
    with torch.no_grad():
        assert step.is_valid and not version.is_valid
        version.replace_capture(evaluated)
        assert version.is_valid
    assert version.is_valid
    switch.on = False
    version.replace_capture(evaluated)
    switch.on = True
    with torch.no_grad():
        assert not version.is_valid


def test_the_programs_that_were_used_last_are_kept() -> None:
    kept, batch = CapturedVersions(), (torch.zeros(4, 3),)
    captured: Any = Captured(None, {}, {}, BatchForm.of_batch(batch, 4), None, True)  # type: ignore[arg-type]
    version = kept.add("train", captured)
    programs: list[Any] = [object() for _ in range(MAX_PROGRAMS + 1)]
    for rows, program in enumerate(programs[:MAX_PROGRAMS], 1):
        kept.record("train", version, {"rows": rows}, program)
    assert version.get({"rows": 1}) is programs[0] and kept.latest("train") is programs[0] and not kept.forgotten()
    kept.record("train", version, {"rows": MAX_PROGRAMS + 1}, programs[MAX_PROGRAMS])
    assert kept.forgotten() == [programs[1]] and kept.forgotten() == []
    assert version.get({"rows": 2}) is None and version.get({"rows": 1}) is programs[0]
    single = kept.add("train", captured)
    kept.record("train", single, {"rows": 9}, programs[1])
    # one that has a program for its sizes
    assert kept.look("train", FlatBatch.flatten((torch.zeros(9, 3),)), 9) == (single, {"rows": 9})
    assert kept.look("train", FlatBatch.flatten((torch.zeros(8, 3),)), 8) == (version, {"rows": 8})
    assert version.sizes(FlatBatch.flatten((torch.zeros(3, 3),)), 9) == {
        "rows": 9
    }  # the rows of one data rank of three


def test_a_step_is_the_model_and_its_loss() -> None:
    step = StepModule(nn.Identity(), F.mse_loss, "loss", None)
    assert step._step((torch.ones(2), torch.zeros(2))).item() == 1
    assert set(dict(StepModule(nn.Linear(1, 1), nn.MSELoss(), "loss", None).named_children())) == {"model", "loss_fn"}
    outputs = StepModule(nn.Identity(), F.mse_loss, "outputs", None)
    assert outputs._step((torch.ones(2),))[0].tolist() == [1, 1]
    assert loss_of({"loss": torch.tensor(2.0)}).item() == 2
    assert loss_of(torch.ones(1, 1)).shape == ()
    with pytest.raises(CompileError, match="QN103"):
        loss_of(torch.zeros(2))


def test_a_trace_sees_what_is_read_and_puts_back_what_is_changed() -> None:
    model = nn.Module()
    model.calls, model.scale = [], 2

    def forward() -> int:
        model.calls.append(1)
        return int(model.scale)

    trace = WatchedTrace({"": model}, (), ())
    with pytest.raises(CompileError, match="QN110"):
        trace.run_forward(forward, {}, refuse=True)
    assert model.calls == [] and "scale" in {read.label for read in trace.reads.found}


class MarksItself(nn.Module):
    """Notes its first call, and makes a tensor a leaf, as the encoder of wav2vec 2.0 does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.called = nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        self.called = True
        seen = x * 1
        seen.requires_grad_(True)
        return self.linear(seen)  # type: ignore[no-any-return]


def test_two_traces_of_one_forward_are_the_same() -> None:
    """By which a change of plain data is known to be harmless."""
    model = MarksItself()
    _captured(model)
    assert not model.called


# -- derivatives that the user wrote


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3


class Calls(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.linear(x))


def test_a_users_backward_is_a_part_of_the_graph() -> None:
    targets = _targets(_captured(Calls(lambda x: Doubled.apply(x))))  # type: ignore[no-untyped-call]
    assert [t for t in targets if "quintnet" in t] == [
        "quintnet.with_tangent.default", "quintnet.declare_gradient.default", "quintnet.after_gradients.default",
    ]  # fmt: skip
    assert needs_gradient(nn.Parameter(torch.ones(1))) and not needs_gradient(torch.ones(1))
    assert not needs_gradient(3)


def test_an_apply_that_was_kept_is_followed_or_refused() -> None:
    """From torch 2.14 on, ``Function.apply`` is C++ that no trace is told of, once it has been looked up."""
    model = Calls(Doubled.apply)
    if hasattr(Doubled.apply, "__code__"):
        assert "quintnet.declare_gradient.default" in _targets(_captured(model))
    else:
        with pytest.raises(CompileError, match=r"(?s)QN105.*Doubled.apply, kept.*call Doubled.apply"):
            _captured(model)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float = 2.0) -> Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * (ctx.scale + 1), None


class Listed(torch.autograd.Function):
    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        one: Tensor = grads[0].pop() if isinstance(grads[0], list) else grads[0] * 5
        return one * 3


def test_a_backward_gets_its_gradients_as_this_torch_gives_them() -> None:
    """In one list where torch knows ``boxed_grads_call``, one by one where it is a name like others."""
    torch.manual_seed(0)
    model = Calls(lambda x: Listed.apply(x))  # type: ignore[no-untyped-call]
    F.mse_loss(model(BATCH[0]), BATCH[1]).backward()
    program = quintnet.compile(copy.deepcopy(model), quintnet.Mesh(dp=1), BATCH, loss_fn=F.mse_loss)
    program.step(BATCH)
    for one, other in zip(program.parameters(), model.parameters(), strict=True):
        assert other.grad is not None and one.grad is not None
        torch.testing.assert_close(one.grad, other.grad)


def test_arguments_of_a_function_may_have_names() -> None:
    def named(x: Tensor) -> Tensor:
        return Scaled.apply(x, scale=3.0)  # type: ignore[no-any-return,no-untyped-call]

    def placed(x: Tensor) -> Tensor:
        return Scaled.apply(x, 3.0)  # type: ignore[no-any-return,no-untyped-call]

    torch.manual_seed(0)
    one, other = _captured(Calls(named)), _captured(Calls(placed))
    assert str(one.graph) == str(other.graph) and "quintnet.declare_gradient.default" in _targets(one)


def test_a_hook_of_a_tensor_stands_between_it_and_its_users() -> None:
    def hooked(x: Tensor) -> Tensor:
        x.register_hook(lambda g: g * 2)
        return x.relu()

    graph = _captured(Calls(hooked)).graph
    (relu,) = (node for node in graph.nodes if "relu" in str(node.target))
    assert str(relu.args[0].target) == "quintnet.after_gradients.default"
    before = str(graph)
    place_hooks(graph, (), pytest.fail)  # there is none left to place
    assert str(graph) == before


def test_hooks_of_modules_and_finders_count_derivatives() -> None:
    finder = DerivativeFinder(StepModule(nn.Linear(2, 2), None, "loss", None), InnerGradients())
    numbers = [finder.next_number() for _ in range(2)]
    assert numbers[0] != numbers[1]
    hooks = ModuleHooks(finder, nn.Linear(2, 2), [], [])
    given = (torch.ones(1, 2),)
    assert hooks.setup_input_hook(given) == given  # nothing needs a gradient: nothing stands between


# -- blocks, and decoding


def test_a_block_like_the_one_before_it_is_not_traced() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    with blocks_once(model) as skipped:
        model(torch.ones(1, 4))
    left_out = [name for names in skipped.like.values() for name in names]
    assert left_out and all(skipped.has(f"{name}.weight") for name in left_out) and not skipped.has("0.weight")


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1)


def test_what_a_cache_has_to_keep() -> None:
    assert cache_shapes(Attends()) == (Shape(1, 4, 4, torch.float32),)
    captured = capture_call(Attends(), (Shape(1, 4, 4, torch.float32),), pools=2, page=8, tokens=1)
    kinds = [node.meta[LEAF].kind for node in captured.graph.nodes if node.op == "placeholder"]
    assert kinds.count("cache") == 2 and not captured.training


def test_values_that_are_only_checked_are_not_in_a_program() -> None:
    def forward(x: Tensor) -> Tensor:
        count = (x > 0).sum().item()
        torch._check(count <= 100)
        torch.masked_select(x, x > 0)
        return x.square().sum()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return forward(x * self.scale)

    targets = {str(node.target) for node in capture(Net(), (torch.ones(8, 4),)).graph.nodes}
    assert not [target for target in targets if "item" in target or "masked_select" in target]
