"""What waits in host memory: the same bits as without, on any layout, and as many bytes of the device as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import quintnet
from quintnet import Mesh
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.compat.torch import pytree
from quintnet_compiler.core.annotations import facts, num_bytes, values
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.driver.compiler import Runner, compile_program
from quintnet_compiler.driver.pipeline import Request
from quintnet_compiler.features.offload.checks.activations import check_offload
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ir.program import DifferentiatedProgram
from quintnet_compiler.ops.collectives import wait
from quintnet_compiler.ops.copies import COPIES, WAYS, copy_in, copy_out, read_in
from quintnet_compiler.ops.rules.table import RULES

from .models import CASES, build

pytestmark = pytest.mark.usefixtures("shared_captures")
torch.set_num_threads(1)
Options = dict[str, Any]


def stepped(name: str, axes: dict[str, int], options: Options, batch: Any = None) -> tuple[Any, dict[str, Tensor]]:
    """A program, and what a step of it gives."""
    case = CASES[name]
    batch = case.batch(8) if batch is None else batch
    dtype = torch.float32 if "precision" in options else torch.float64
    batch = pytree.tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)
    program = quintnet.compile(build(name, dtype), Mesh(**axes), batch, loss_fn=case.loss_fn, **options)
    loss = program.step(batch)
    found = {n: p.grad.full_tensor() for n, p in program.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
    return program, {"loss": loss, **found}


def copies(program: quintnet.CompiledProgram) -> int:
    """How many values leave the device for each microbatch."""
    stages = program._primary().program.stages
    return sum(stage.forward.code.count("copy_out(") for stage in stages)


LAYOUTS: list[tuple[str, dict[str, int], Options]] = [
    ("gpt", {"dp": 2, "tp": 2}, {"zero": 3, "microbatches": 2}),
    ("gpt", {"pp": 2, "tp": 2}, {"microbatches": 4, "recompute": "selective"}),
    ("gpt", {"cp": 2}, {"context": "ring"}),
    ("gpt", {"pp": 2}, {"microbatches": 4, "schedule": "zb-h1", "loss_chunks": 3}),
    ("cnn", {"pp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 3}),
    ("mixture", {"ep": 2}, {"microbatches": 2}),
    ("vit", {"dp": 2}, {"overlap": False, "zero": 2}),
    ("encoder", {"dp": 2}, {"precision": "bf16", "recompute": "full"}),
    ("gpt", {"tp": 2}, {"async_tp": True}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "axes", "options"), LAYOUTS, ids=str)
def test_the_bits_are_those_without(name: str, axes: dict[str, int], options: Options) -> None:
    _, expected = stepped(name, axes, options)
    program, found = stepped(name, axes, {**options, "offload": ("activations",)})
    assert copies(program)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], x) for key, x in expected.items())


def test_less_is_kept() -> None:
    """Of a pipeline, in its first stage, the values of several microbatches."""
    options, batch = {"microbatches": 8}, CASES["mlp"].batch(128)
    plain, _ = stepped("mlp", {"pp": 2}, options, batch)
    program, _ = stepped("mlp", {"pp": 2}, {**options, "offload": ("activations",)}, batch)
    before, after = plain.simulate(), program.simulate()
    assert after.rows[0].peak_held < 0.3 * before.rows[0].peak_held
    assert after.rows[0].host_bytes > 0.5 * before.rows[0].peak_held
    assert before.rows[0].host_bytes == 0
    assert "memory of the host" in str(after)
    assert {WAYS["copy_out"], WAYS["copy_in"]} <= set(after.exposed) | {
        event.axis for row in after.rows for event in row.events
    }


def test_a_value_that_is_read_again_at_once_stays() -> None:
    """The last stage's backward begins with what its forward ends with; in a stage before, others come between."""
    batch = CASES["mlp"].batch(64)
    program, _ = stepped("mlp", {"pp": 2}, {"microbatches": 4, "offload": ("activations",)}, batch)
    first, last = program._primary().program.stages
    assert "copy_out(" in first.forward.code
    assert last.forward.code.count("copy_out(") < len(last.saved)


def test_a_plan_has_it() -> None:
    plan = Plan(offload=("activations",))
    assert Plan.from_json(plan.to_json()) == plan and plan.decisions == {"offload": ["activations"]}
    with pytest.raises(CompileError) as error:
        quintnet.compile(build("mlp"), Mesh(dp=1), offload=("gradients",))  # type: ignore[arg-type]
    assert error.value.code == "QN207" and "'activations'" in str(error.value)


# -- the check after the pass


def _programs() -> tuple[DifferentiatedProgram, DifferentiatedProgram]:
    """Before and behind the pass."""
    case, runner = CASES["gpt"], Runner(keep=True)
    plan = Plan(microbatches=4, offload=("activations",), overlap=False)
    captured = capture(build("gpt"), case.batch(8), case.loss_fn)
    compile_program(captured, Request(Mesh(pp=2), plan, 8, torch.device("cpu"), RULES), runner)
    names = [name for name, _ in runner.programs]
    index = names.index("OffloadActivations")
    return runner.programs[index - 1][1], runner.programs[index][1]


def copied(program: DifferentiatedProgram) -> tuple[DifferentiatedProgram, dict[str, fx.Node]]:
    """The same program, to be changed, and its nodes by their names."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    moved = program.moved(graph, new, {new[n]: stage for n, stage in program.stage.items()})
    return moved, {node.name: node for node in graph.nodes}


def _mutants(after: DifferentiatedProgram) -> list[tuple[str, DifferentiatedProgram]]:
    """One for each way of harming a copy, for some copies."""
    found = []
    outs = [node.name for node in after.graph.nodes if node.target is copy_out]
    for name in outs[:: max(1, len(outs) // 6)]:
        for harm in (
            "another value leaves",
            "another comes back",
            "the original is read",
            "no reader",
            "early",
            "another place",
            "stage",
        ):
            program, nodes = copied(after)
            out = nodes[name]
            (back,) = out.users
            other = next(n for n in program.graph.nodes if n.target is copy_out and n is not out)
            if harm == "another value leaves":
                out.args = other.args
            elif harm == "another comes back":
                back.args = (other, *back.args[1:])
            elif harm == "the original is read":
                reader = next(iter(back.users))
                reader.replace_input_with(back, out.all_input_nodes[0])
            elif harm == "no reader":
                back.replace_all_uses_with(out.all_input_nodes[0])
            elif harm == "another place":
                back.target = read_in
            elif harm == "early":
                back.meta = {**back.meta, "quintnet": replace(facts(back), phase="forward")}
            else:
                stage = dict(program.stage)
                stage[out] = 1 - stage[out]
                program = replace(program, stage=stage)
            found.append((f"{harm}: {name}", program))
    return found


def test_harmful_copies_are_refused() -> None:
    before, after = _programs()
    check_offload(before, after)
    check_offload(before, copied(after)[0])
    mutants = _mutants(after)
    assert len(mutants) >= 30
    for what, program in mutants:
        with pytest.raises(CompileError, match="offload check"):
            check_offload(before, program)
            raise AssertionError(f"nobody sees: {what}")


def test_each_value_leaves_and_comes_back_once() -> None:
    _, after = _programs()
    moved: Sequence[fx.Node] = [node for node in after.graph.nodes if node.target is copy_out]
    assert moved and len({(after.stage[n], n.args[0]) for n in moved}) == len(moved)
    assert [node for node in after.graph.nodes if node.target is copy_in and len(node.users) == 0] == []


# -- with a budget of saved values


def _on_device(program: quintnet.CompiledProgram) -> list[int]:
    """Bytes that a forward of each stage saves on the device."""
    compiled = program._primary().program
    graph = compiled.source.graph
    outside = {node.name for node in graph.nodes if node.target is copy_out}
    outside |= {n.name for n in graph.nodes if n.target is wait and n.all_input_nodes[0].target is COPIES[copy_out]}
    sizes = {node.name: sum(map(num_bytes, values(node))) for node in graph.nodes if node.op == "call_function"}
    return [sum(sizes.get(name, 0) for name in set(stage.saved) - outside) for stage in compiled.stages]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "live"), [({"pp": 2}, [2, 1]), ({"dp": 1}, [1])], ids=str)
def test_a_budget_counts_nothing_that_is_on_the_host(axes: dict[str, int], live: list[int]) -> None:
    """A budget that all of the values would break is kept by a program that computes nothing again for it."""
    batch, options = CASES["gpt"].batch(32), {"microbatches": 4 if "pp" in axes else 1}
    plain, _ = stepped("gpt", axes, {**options, "recompute": "full"}, batch)
    least = max(count * size for count, size in zip(live, _on_device(plain), strict=True))
    options |= {"recompute": "auto", "activation_memory_budget": least / 2 / 2**30}
    with pytest.raises(CompileError, match="QN213"):
        stepped("gpt", axes, options, batch)
    program, found = stepped("gpt", axes, {**options, "offload": ("activations",)}, batch)
    for count, size in zip(live, _on_device(program), strict=True):
        assert count * size <= least / 2
    _, expected = stepped("gpt", axes, {"microbatches": options["microbatches"]}, batch)
    assert all(torch.equal(found[key], x) for key, x in expected.items())
