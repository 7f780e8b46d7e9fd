"""Checks share no code with the passes that they check: a fault that is everywhere is noticed all the same."""

from __future__ import annotations

import ast
import itertools
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.checks import tables as check_tables
from quintnet_compiler.checks.notation import check_notation
from quintnet_compiler.core.annotations import shape
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.core.precision import narrows
from quintnet_compiler.core.sharding import I, P, R, S, gradient
from quintnet_compiler.driver.compiler import Runner, compile_program
from quintnet_compiler.driver.pipeline import Request
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ops.collectives import lower_conversion
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.autodiff import vector_jacobian
from quintnet_compiler.passes.codegen.python_ops import SPELLING

from .helper_faults import FAULTS, OF_RULES, Fault, injected
from .models import CASES, build, reference, worst_error
from .one_operator import Wrong, call, check, operator_program
from .one_operator import reference as reference_of
from .operator_samples import f
from .random_plans import gradients

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
aten = torch.ops.aten
# They make no difference to any of the victims: what they would change is not in these.
HARMLESS = {
    "emit_conversion_backward: the value's types instead of the gradient's",
    "parameter_conversions: no conversion is a parameter's",
    "leaf_strategies: parts are lost",
    "refine: nothing is gone",
    "hops: in the other order",
    "during_step: slices are read as they are stored",
    "batch_dependent: nothing is",
    "conversion_path: inner slices stay where they are",
    "fit: what is whole may be split",
}
SAMPLE = {
    "emit_conversion_backward: forgets to add up the ranks' terms",
    "gradient: a partial value's is partial",
    "strategies: what lacks the factor is invariant",
    "_linear: half the bias' gradient",
    "_inline: twice the gradient of norms",
    "SPELLING: add is sub",
    "slice_of_rank: another rank's slice",
}
# What passes and checks could both import from the core, and would then both believe.
DECIDES = {
    "lower_conversion", "gradient", "forward_type", "conversion_path", "local_shape", "shard_shape", "narrows",
}  # fmt: skip


@dataclass(frozen=True)
class Victim:
    model: str
    mesh: tuple[tuple[str, int], ...]
    decisions: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.model} on {dict(self.mesh)} {dict(self.decisions) or ''}"


def _victim(model: str, mesh: dict[str, int], **decisions: Any) -> Victim:
    return Victim(model, tuple(mesh.items()), tuple(decisions.items()))


SMALL = (_victim("mlp", {"dp": 2, "tp": 2}),)
VICTIMS = (
    _victim("mlp", {"tp": 2}),
    _victim("mlp", {"dp": 2}, microbatches=2),
    _victim("mlp", {"pp": 2, "tp": 2}, microbatches=2, sequence_parallel=False),
    _victim("mlp", {"dp": 2, "tp": 2}, zero=3),
    _victim("mlp", {"dp": 2}, zero=1),
    _victim("gpt", {"dp": 2, "tp": 2}),
    _victim("gpt", {"cp": 2}, context="ulysses"),
    _victim("gpt", {"cp": 2}, context="ring"),
    _victim("mixture", {"dp": 2, "ep": 2}),
)


@cache
def _captured(model: str) -> Any:
    case = CASES[model]
    return capture(build(model), case.batch(8), case.loss_fn)


def _fate(victim: Victim, fault: Fault) -> str:
    """ "refused" before anything runs (or "crash" there), "equal", or "silent"."""
    captured, mesh = _captured(victim.model), Mesh(**dict(victim.mesh))
    case, plan = CASES[victim.model], Plan(**dict(victim.decisions))
    with injected(fault):
        try:
            program = compile_program(captured, Request(mesh, plan, 8, CPU, RULES), Runner()).program
        except CompileError:
            return "refused"
        except Exception:
            return "crash"
        try:
            loss, found = gradients(program, mesh, dict(captured.tensors), case.batch(8))
        except Exception as error:
            return f"running: {error}"
    expected_loss, expected = reference(build(victim.model), case.batch(8), case.loss_fn)
    same = abs(float(loss - expected_loss)) < 1e-9 and worst_error(found, expected)[0] < 1e-9
    return "equal" if same else "silent"


def _judge(victims: tuple[Victim, ...], faults: list[Fault]) -> int:
    """How many are noticed somewhere. Where one is not, it must make no difference."""
    noticed, late = set[str](), []
    for fault in faults:
        for victim in victims:
            fate = _fate(victim, fault)
            print(f"{fault} ({victim}): {fate}", flush=True)
            if fate in ("refused", "crash"):
                noticed.add(str(fault))
            elif fate != "equal":
                late.append(f"{fault} ({victim}): {fate}")
    assert not late
    return len(noticed)


def test_faults_of_shared_helpers_are_noticed() -> None:
    """One of each: a transpose, a table, a strategy, a template, a function of torch, a slice."""
    faults = [fault for fault in FAULTS if str(fault) in SAMPLE]
    assert _judge(SMALL, faults) == len(SAMPLE)


def test_padding_where_sizes_divide_is_noticed() -> None:
    fault = next(fault for fault in FAULTS if str(fault) == "local_shape: axes divide nothing")
    assert _fate(_victim("gpt", {"cp": 2}, context="ring"), fault) == "refused"


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_all_faults_of_shared_helpers_are_noticed(fault: Fault) -> None:
    assert _judge((*SMALL, *VICTIMS), [fault]) == (str(fault) not in HARMLESS)


BY_RULES = (
    call(aten.linear.default, f(4, 6), f(4, 6), f(4)),
    call(aten.cdist.default, f(4, 6), f(4, 6)),
    call(aten.mul.Tensor, f(2, 4, 6), f(4, 6)),
)


@pytest.mark.parametrize("fault", OF_RULES, ids=str)
def test_faults_of_notation_are_noticed(fault: Fault) -> None:
    dice = torch.Generator().manual_seed(0)
    graphs = [operator_program(sample, reference_of(sample, dice)).program.graph for sample in BY_RULES]
    for graph in graphs:
        check_notation(graph, RULES)
    with injected(fault), pytest.raises(CompileError, match=r"QN209 .*\n.*notation check: the rule"):
        for graph in graphs:
            check_notation(graph, RULES)


@pytest.mark.parametrize("fault", OF_RULES[:2], ids=str)
def test_faults_of_notation_are_found_by_the_proof_of_rules(fault: Fault) -> None:
    """As a rule that is written wrongly would be."""
    for sample in BY_RULES:
        check(sample, RULES, (2,))
    with injected(fault), pytest.raises((Wrong, RuntimeError)):
        for sample in BY_RULES:
            check(sample, RULES, (2,))


def test_the_second_tables_are_those_of_the_passes() -> None:
    """Each side is proven on its own: conversions by tests/test_conversions.py."""
    kinds = (I, R, P, S(0), S(1, 3))
    for a, b in itertools.product(kinds, kinds):
        for stored in (False, True):
            there = check_tables.forward_call(a, b, stored=stored) or (None, ())
            assert there == lower_conversion(a, b, stored=stored)
        back = check_tables.backward_call(a, b) or (None, ())
        assert back == lower_conversion(gradient(b), gradient(a))
    for op, function in SPELLING.items():
        assert function in check_tables.spellings(op)
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)
    for before, after in itertools.product(dtypes, dtypes):
        assert check_tables.rounds(before, after) == narrows(before, after)


def test_every_folder_of_passes_is_independent() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    contract = next(c for c in contracts if c["name"] == "folders of passes are independent")
    folders = {path.parent.name for path in (ROOT / "passes").glob("*/__init__.py")}
    assert set(contract["modules"]) == {f"quintnet_compiler.passes.{name}" for name in folders}


def test_checks_import_nothing_that_decides() -> None:
    """import-linter keeps checks from the passes that it knows; this also from new ones, and from names of the core."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    contract = next(c for c in contracts if c["name"] == "checks share no code with passes")
    assert contract["source_modules"] == ["quintnet_compiler.checks"]
    folders = {path.parent.name for path in (ROOT / "passes").glob("*/__init__.py")}
    # targets: names of operators, which the notation reads
    rules = {path.stem for path in (ROOT / "quintnet_compiler/ops/rules").glob("*.py")} - {
        "__init__",
        "notation",
        "targets",
    }
    shared = {"strategies", "ops.derivatives.operator_trace"}  # by passes alone
    forbidden = {f"passes.{name}" for name in folders} | {f"ops.rules.{name}" for name in rules} | shared
    assert {name.removeprefix("quintnet_compiler.") for name in contract["forbidden_modules"]} == forbidden
    defined = {
        node.name
        for folder in ("core", "ops")
        for path in (ROOT / "quintnet_compiler" / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert defined >= DECIDES, f"no function is called {DECIDES - defined}"
    for path in sorted((ROOT / "quintnet_compiler/checks").rglob("*.py")):
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {a.name for node in imports for a in node.names}
        assert not names & DECIDES, f"{path.name} imports {names & DECIDES}"
        passes = {str(node.module) for node in imports if str(node.module).startswith("passes.")}
        rules = {str(node.module) for node in imports if str(node.module).startswith("ops.rules")}
        assert rules <= {"ops.rules.notation"}, f"{path.name} imports {rules}"
        if path.name == "proven.py":  # holds the templates that it proves, and asks nothing else of passes
            passes -= {"passes.autodiff.vector_jacobian"}
        assert not passes, f"{path.name} imports {passes}"


class Turned(nn.Module):
    """The gradient that comes back to tanh is a transposition of what lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).t() * 1.0).square().mean()


def test_a_backward_that_reads_memory_in_another_order_is_refused() -> None:
    """Shapes and strides of all that is checked on shapes are right; numbers are not."""

    def careless(right: Any) -> Any:
        def inline(self: Any, template: Any, tensors: Any) -> Any:
            made, pullback = right(self, template, tensors)
            tanh = any(node.target is aten.tanh.default for node in template.graph.nodes)

            def back(tangents: Any) -> Any:
                size = list(shape(tangents[0]))
                read = [size, [size[1], 1]] if tanh else []
                return pullback([self.builder.call(aten.as_strided.default, tangents[0], *read)] if tanh else tangents)

            return made, back

        return inline

    fault = Fault(vector_jacobian.VectorJacobian, "_inline", "reads rows", careless)
    batch = (torch.randn(8, 4),)
    quintnet.compile(Turned(), Mesh(dp=1), batch)
    with injected(fault), pytest.raises(CompileError, match=r"the derivative of aten\.tanh\.default is wrong"):
        quintnet.compile(Turned(), Mesh(dp=1), batch)
