"""The pass that copies parameters in, and its check: harmful copies are refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from quintnet import Mesh
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.core.annotations import facts
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.driver.compiler import Runner, compile_program
from quintnet_compiler.driver.pipeline import Request
from quintnet_compiler.features.offload.checks.parameters import check_offload_parameters
from quintnet_compiler.features.offload.parameters import OffloadParameters
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ir.program import DifferentiatedProgram
from quintnet_compiler.ops.copies import copy_in
from quintnet_compiler.ops.rules.table import RULES

from ..models import CASES, build
from ..test_offload import copied

PARAMETERS = ("parameters",)


def _programs() -> tuple[DifferentiatedProgram, DifferentiatedProgram]:
    """Before and behind the pass."""
    case, runner = CASES["gpt"], Runner(keep=True)
    plan = Plan(microbatches=2, zero=3, offload=PARAMETERS, overlap=False)
    captured = capture(build("gpt"), case.batch(8), case.loss_fn)
    compile_program(captured, Request(Mesh(dp=2, pp=2), plan, 8, torch.device("cpu"), RULES), runner)
    names = [name for name, _ in runner.programs]
    index = names.index(OffloadParameters.__name__)
    return runner.programs[index - 1][1], runner.programs[index][1]


HARMS = ("another parameter", "read on the host", "from the forward", "another stage", "at the start", "for nobody")


def _mutant(after: DifferentiatedProgram, name: str, harm: str) -> DifferentiatedProgram | None:
    """The program with one copy harmed; None where it cannot be."""
    program, nodes = copied(after)
    copy = nodes[name]
    copies = [n for n in program.graph.nodes if n.target is copy_in]
    phase, source = facts(copy).phase, copy.all_input_nodes[0]
    if harm == "another parameter":
        other = next(n for n in copies if n.all_input_nodes[0] is not source)
        copy.args = (other.all_input_nodes[0], *copy.args[1:])
    elif harm == "read on the host":
        next(iter(copy.users)).replace_input_with(copy, source)
    elif harm == "from the forward":
        early = [n for n in copies if n.all_input_nodes[0] is source and facts(n).phase == "forward"]
        if phase == "forward" or not early:
            return None
        copy.replace_all_uses_with(early[0])
        program.graph.erase_node(copy)
        stage = {n: s for n, s in program.stage.items() if n is not copy}
        program = replace(program, stage=stage)
    elif harm == "another stage":
        program = replace(program, stage={**program.stage, copy: 1 - program.stage[copy]})
    elif harm == "at the start":
        program = replace(program, once=program.once | {copy})
    else:
        with program.graph.inserting_after(copy):
            idle = program.graph.node_copy(copy)
        program = replace(program, stage={**program.stage, idle: program.stage[copy]})
    return program


def test_harmful_copies_are_refused() -> None:
    before, after = _programs()
    check_offload_parameters(before, after)
    check_offload_parameters(before, copied(after)[0])
    names = [node.name for node in after.graph.nodes if node.target is copy_in]
    seen = Counter[str]()
    for harm in HARMS:
        for name in names[:: max(1, len(names) // 8)]:
            program = _mutant(after, name, harm)
            if program is not None:
                seen[harm] += 1
                with pytest.raises(CompileError, match="parameters on the host"):
                    check_offload_parameters(before, program)
                    raise AssertionError(f"nobody sees: {harm}, {name}")
    assert all(seen[harm] >= 3 for harm in HARMS), seen
