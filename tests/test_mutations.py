"""Wrong programs are noticed: at least 99 of 100 before they run, and the others by ``verify``. None is silent."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from quintnet_compiler.capture.capture import capture
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.driver.compiler import Runner, compile_program
from quintnet_compiler.driver.pipeline import Request
from quintnet_compiler.equivalence.verify import VerifySubject, verify_program
from quintnet_compiler.ir.distributed_program import DistributedProgram
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ir.program import Captured, DifferentiatedProgram
from quintnet_compiler.ops.rules.table import RULES

from .models import CASES, build, reference, worst_error
from .mutations import Change, as_mutant, check, copied, joint, ranks, typed, unchecked
from .random_plans import gradients

torch.set_num_threads(1)
CPU = torch.device("cpu")
RUNS = {"runs of another plan", "assign runs by other work", "send runs the other way"}


@dataclass(frozen=True)
class Victim:
    """A compiled program to be mutated."""

    name: str
    mesh: Mesh
    plan: Plan
    model: torch.nn.Module
    captured: Captured
    source: DifferentiatedProgram  # before collectives of one block become one
    program: DistributedProgram

    @staticmethod
    def of(name: str, mesh: Mesh, microbatches: int, **decisions: Any) -> Victim:
        model, case = build(name), CASES[name]
        captured = capture(model, case.batch(8), case.loss_fn)
        # what is started and waited for has mutations of its own, in test_overlap
        plan = Plan(microbatches=microbatches, overlap=False, **decisions)
        runner = Runner(keep=True)
        program = compile_program(captured, Request(mesh, plan, 8, CPU, RULES), runner).program
        steps = [found for step, found in runner.programs if step in ("Differentiate", "Recompute")]
        return Victim(name, mesh, plan, model, captured, steps[-1], program)

    def changes(self, dice: random.Random) -> list[Change]:
        for same in (self.source.local, copied(self.source)[0], as_mutant(self.program)):
            check(same, self.mesh, self.plan)
        return [*typed(self.source.local, dice), *joint(self.source, dice), *ranks(self.program, dice)]

    def fate(self, change: Change) -> str:
        """ "before running", "by running", "by verify", "equivalent", or "silent"."""
        try:
            check(change.program, self.mesh, self.plan)
            return self._run(change)
        except CompileError:
            return "before running"
        except Exception:  # a check fell over it
            return "before running (crash)"

    def _run(self, change: Change) -> str:
        program = unchecked(change.program, self.mesh, self.plan)
        case, tensors = CASES[self.name], dict(self.captured.tensors)
        try:
            subject = VerifySubject(self.model, case.loss_fn, program, "not asked for", tensors, 0, CPU)
            if not verify_program(subject, case.batch(8), 1).ok:
                return "by verify"
        except Exception:
            return "by running"
        batch = tuple(x.flip(0) for x in case.batch(8))
        loss, found = gradients(program, self.mesh, tensors, batch)
        expected_loss, expected = reference(self.model, batch, case.loss_fn)
        same = abs(float(loss - expected_loss)) < 1e-9 and worst_error(found, expected)[0] < 1e-9
        return "equivalent" if same else "silent"


def _report(victims: list[Victim], count: int | None) -> tuple[Counter[str], list[str]]:
    fates: Counter[str] = Counter()
    late: list[str] = []
    for number, victim in enumerate(victims):
        dice = random.Random(number)
        found = victim.changes(dice)
        for change in found if count is None else dice.sample(found, min(count, len(found))):
            fate = victim.fate(change)
            fates[fate] += 1
            if not fate.startswith("before running"):
                late.append(f"{fate}: {change.kind}: {change.what} ({victim.name} on {victim.mesh})")
    return fates, late


def _judge(victims: list[Victim], count: int | None, least: int) -> None:
    fates, late = _report(victims, count)
    print(dict(fates), *late, sep="\n")
    harmful = fates.total() - fates["equivalent"]
    assert harmful >= least
    assert not fates["silent"], late
    early = fates["before running"]
    assert early >= 0.99 * harmful, (fates, late)


@pytest.mark.slow
def test_attention_in_tiles_that_is_told_something_else_is_noticed() -> None:
    victim = Victim.of("gpt", Mesh(dp=2, cp=2), 1, attention_tile_bytes=64)
    kinds = ("swap keys", "change a scale", "see ", "attend from")
    found = [change for change in victim.changes(random.Random(0)) if change.kind.startswith(kinds)]
    assert len(found) >= 30
    assert all(victim.fate(change) == "before running" for change in found)


@pytest.mark.slow
def test_a_ring_whose_runs_go_elsewhere_is_noticed() -> None:
    victim = Victim.of("gpt", Mesh(dp=2, cp=2), 1, context="ring")
    found = [change for change in victim.changes(random.Random(0)) if change.kind in RUNS]
    assert {change.kind for change in found} == RUNS and len(found) >= 30
    fates = Counter(victim.fate(change) for change in found)
    assert fates.keys() <= {"before running", "equivalent"}, fates


def test_a_sample_of_mutations_is_noticed() -> None:
    _judge([Victim.of("gpt", Mesh(pp=2, dp=2, tp=2), 2)], 60, 50)


@pytest.mark.slow
def test_mutations_are_noticed() -> None:
    victims = [
        Victim.of("gpt", Mesh(pp=2, dp=2, tp=2), 2),
        Victim.of("vit", Mesh(pp=3, tp=2), 4, recompute="full"),
        Victim.of("mlp", Mesh(dp=2, tp=2), 1),
        Victim.of("cnn", Mesh(pp=4, dp=2), 4),
        Victim.of("mixture", Mesh(dp=2, ep=2), 2),
        Victim.of("gpt", Mesh(dp=2, cp=2), 1, context="ring"),
        Victim.of("gpt", Mesh(dp=2, cp=2), 1, attention_tile_bytes=64),
        Victim.of("gpt", Mesh(pp=2, tp=2), 2, schedule="zb-v", virtual_stages=2),
        Victim.of("mlp", Mesh(dp=2, tp=2), 2, zero=1),
        Victim.of("mlp", Mesh(dp=2, pp=2), 2, zero=3),
    ]
    _judge(victims, None, 200)
