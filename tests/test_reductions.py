"""Programs that round, or add up in another dtype than their plan says, are refused before they run. Each change is
made to a correct program, at the level at which such a mistake would arise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import quintnet
from quintnet import CompileError, Mesh
from quintnet_compiler.checks.backward import check_backward
from quintnet_compiler.checks.code import check_code
from quintnet_compiler.checks.reductions import check_reductions
from quintnet_compiler.core.annotations import annotate, facts, needs_grad, value
from quintnet_compiler.core.precision import narrows
from quintnet_compiler.core.sharding import P, R
from quintnet_compiler.ir.distributed_program import DistributedProgram
from quintnet_compiler.ir.invariants import verify_invariants
from quintnet_compiler.ir.program import DifferentiatedProgram, LocalProgram, Strategy
from quintnet_compiler.ops.collectives import all_reduce, reduce_scatter
from quintnet_compiler.passes.sharding.batch_factors import batch_dependent

from .models import CASES, build
from .mutations import Change, as_mutant, copied, piece_copied, rebuilt

torch.set_num_threads(1)
aten = torch.ops.aten
SUMS = (all_reduce, reduce_scatter)


@dataclass(frozen=True)
class Victim:
    """A program to be changed."""

    name: str
    axes: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Any], ...]


VICTIMS = [
    Victim("mlp", (("dp", 2), ("tp", 2)), (("precision", "bf16"), ("microbatches", 2), ("zero", 2))),
    Victim("gpt", (("pp", 2), ("tp", 2)), (("precision", "bf16"), ("sum_dtype", "float32"), ("microbatches", 2))),
    Victim("gpt", (("dp", 2), ("cp", 2)), (("precision", "bf16"), ("zero", 3), ("reduce_dtype", "bfloat16"))),
    Victim("mlp", (("dp", 2), ("tp", 2)), (("zero", 1), ("reduce_dtype", "bfloat16"), ("sequence_parallel", False))),
]


@cache
def _programs(victim: Victim) -> tuple[LocalProgram, DifferentiatedProgram, DistributedProgram]:
    """As they were when they were checked: before collectives of one block become one."""
    batch = tuple(x.float() if x.is_floating_point() else x for x in CASES[victim.name].batch(8))
    model, loss_fn = build(victim.name, torch.float32), CASES[victim.name].loss_fn
    program = quintnet.compile(model, Mesh(**dict(victim.axes)), batch, loss_fn=loss_fn, **dict(victim.options))
    made = program._primary().program
    joint = [found for name, found in program._primary().passes() if name in ("Differentiate", "Recompute")]
    return joint[-1].local, joint[-1], made


# -- the typed program: what a wrong rule of the user's would make, which the type check then believes


def _typed(program: LocalProgram) -> Iterator[Change]:
    sharded = program.staged.sharded
    activations = batch_dependent(sharded.program.graph)
    for node, strategies in sharded.strategies.items():
        if node.target is not aten._to_copy.default:
            continue
        before, after = value(node.args[0]).dtype, value(node).dtype  # type: ignore[arg-type]
        for place, axis in enumerate(sharded.axes):
            exchanged = axis.role in ("model", "context") and node in activations and needs_grad(node)
            for kind, rounds in ((P, narrows(before, after)), (R, narrows(after, before) and exchanged)):
                if rounds:
                    other = (*strategies[:place], Strategy((kind,), (kind,)), *strategies[place + 1 :])
                    changed = replace(sharded, strategies={**sharded.strategies, node: other})
                    mutant = replace(program, staged=replace(program.staged, sharded=changed))
                    yield Change(f"a cast of terms ({kind})", f"{node.name} over {axis.name}", mutant)


# -- the differentiated graph


def _cast(program: DifferentiatedProgram, x: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    """A cast of ``x``, before or after ``like`` and as it."""
    where = program.graph.inserting_before(like) if like is not x else program.graph.inserting_after(like)
    with where, program.local.mode:
        made = program.graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
        return annotate(made, replace(facts(like), value=value(x).to(dtype)))


def _joint(program: DifferentiatedProgram) -> Iterator[Change]:
    for node in [n for n in program.graph.nodes if n.target in SUMS]:
        given, dtype = node.args[0], value(node).dtype
        for other in (torch.bfloat16, torch.float32, torch.float64):
            if other is dtype:
                continue
            mutant, new = copied(program)
            here = new[node]
            low, back = _cast(mutant, here.args[0], other, here), _cast(mutant, here, dtype, here)
            with program.local.mode:
                annotate(here, replace(facts(here), value=value(here).to(other)))
            here.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
            here.args = (low, *here.args[1:])
            yield Change("add up in another dtype", f"{node.name} in {other}", _tables(mutant, here, back, (low, back)))
        if given.target is aten._to_copy.default:
            mutant, new = copied(program)
            new[node].args = (new[given.args[0]], *new[node].args[1:])
            yield Change("add up before the cast", node.name, mutant)
    for key, node in program.gradients.items():
        mutant, new = copied(program)
        fewer = torch.bfloat16 if value(node).dtype is torch.float32 else torch.float16
        low = _cast(mutant, new[node], fewer, new[node])
        mutant = replace(mutant, gradients={**mutant.gradients, key: low}, stage={**mutant.stage, low: key[1]})
        yield Change("round a microbatch's gradient", key[0], mutant)


def _tables(program: DifferentiatedProgram, old: fx.Node, new: fx.Node, made: tuple[fx.Node, ...]) -> Any:
    """Tables that name ``old`` name ``new``; ``made`` runs in the same stage."""
    named = ("values", "cotangents", "gradients")
    moved = {name: {k: new if n is old else n for k, n in getattr(program, name).items()} for name in named}
    stage = {**program.stage, **{n: program.stage[old] for n in made if old in program.stage}}
    outputs = tuple(new if n is old else n for n in program.outputs)
    return replace(program, **moved, stage=stage, outputs=outputs)


# -- what ranks run


def _ranks(program: DistributedProgram) -> Iterator[Change]:
    for name, spec in program.state.items():
        for which in ("read", "summed", "reduced") if spec.trainable else ():
            for other in {torch.bfloat16, torch.float32, torch.float64} - {getattr(spec, which)}:
                state = {**program.state, name: replace(spec, **{which: other})}
                yield Change(f"another dtype is {which}", f"{name}: {other}", as_mutant(program, state=state))
    for stage in program.stages:
        for label, piece in stage.pieces.items():
            casts = [n for n in piece.module.graph.nodes if _is_cast(n)]
            for node in casts[:3]:
                changed, new = piece_copied(piece)
                here = new[node.name]
                here.args = tuple(map(_otherwise, here.args))
                here.kwargs = {key: _otherwise(x) for key, x in here.kwargs.items()}
                stages = tuple(replace(s, **{label: rebuilt(changed)}) if s is stage else s for s in program.stages)
                yield Change("another cast", f"{node.name} in stage {stage.index}", as_mutant(program, stages=stages))


def _is_cast(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and torch.bfloat16 in (*node.args, *node.kwargs.values())


def _otherwise(x: Any) -> Any:
    return torch.float16 if x is torch.bfloat16 else x


def _refused(change: Change) -> str:
    """The id of the error."""
    program = change.program
    try:
        if isinstance(program, LocalProgram):
            check_reductions(program)
        elif isinstance(program, DifferentiatedProgram):
            verify_invariants(program)
            check_backward(program)
        else:
            check_code(program)
    except CompileError as error:
        return error.code
    return "not at all"


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS, ids=str)
def test_changes_of_a_dtype_are_refused(victim: Victim) -> None:
    """All that can be made of one value or one call."""
    (local, joint, ranks), kinds = _programs(victim), defaultdict[str, list[Change]](list)
    for change in (*_typed(local), *_joint(joint), *_ranks(ranks)):
        kinds[change.kind].append(change)
    assert len(kinds) >= 5
    for same in (local, copied(joint)[0], as_mutant(ranks)):
        assert _refused(Change("none", "", same)) == "not at all"
    for kind, changes in kinds.items():
        for change in changes:
            code = "QN214" if isinstance(change.program, LocalProgram) else "QN209"
            assert _refused(change) == code, (kind, change.what)
    print({kind: len(changes) for kind, changes in kinds.items()})


@pytest.mark.sample(1)
@pytest.mark.parametrize(("dtype", "precision"), [("float64", "bf16"), ("bfloat16", "fp16"), ("float16", "bf16")])
def test_a_precision_that_does_not_fit_the_model_is_refused(dtype: str, precision: str) -> None:
    def compiled(precision: str) -> quintnet.CompiledProgram:
        given = getattr(torch, dtype)
        model, (x, labels) = build("mlp").to(given), CASES["mlp"].batch(8)
        return quintnet.compile(model, Mesh(tp=2), (x.to(given), labels), loss_fn=F.cross_entropy, precision=precision)

    with pytest.raises(CompileError, match=f"this model's are {dtype}") as found:
        compiled(precision)
    assert found.value.code == "QN215" and 'precision="model"' in found.value.fix
    assert compiled("model").plan.precision == "model"
