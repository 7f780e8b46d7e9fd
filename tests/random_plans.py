"""Random valid programs: any legal strategy at every operator, any legal type for every leaf, any pipeline cut, any
ZeRO stage.

Nothing here knows which layouts are sensible; whatever the types allow must give the unsplit model's gradients.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from quintnet_compiler.checks.backward import check_backward
from quintnet_compiler.checks.code import check_code
from quintnet_compiler.checks.padding import check_padding
from quintnet_compiler.checks.types import check_types
from quintnet_compiler.core.annotations import (
    is_float,
    is_getitem,
    leaf,
    needs_grad,
    operators_of_parameters,
    origin,
    shape,
    tensor_inputs,
    values,
)
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.core.sharding import I, P, R, Shard, forward_type
from quintnet_compiler.driver.compiler import Runner
from quintnet_compiler.equivalence.dry_run import check_ranks
from quintnet_compiler.features.chunked_losses.checks.chunk_losses import check_chunked
from quintnet_compiler.features.chunked_losses.chunk_losses import ChunkLosses
from quintnet_compiler.features.offload.activations import OffloadActivations
from quintnet_compiler.features.offload.checks.activations import check_offload
from quintnet_compiler.features.offload.checks.parameters import check_offload_parameters
from quintnet_compiler.features.offload.parameters import OffloadParameters
from quintnet_compiler.ir.distributed_program import DistributedProgram
from quintnet_compiler.ir.plans.host_state import HostState
from quintnet_compiler.ir.program import Axis, Program, ShardedProgram, StagedProgram, Strategy, outputs
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.autodiff.differentiate import Differentiate
from quintnet_compiler.passes.autodiff.recompute import Recompute
from quintnet_compiler.passes.codegen.generate_ranks import GenerateRanks
from quintnet_compiler.passes.lowering.insert_communication import InsertCommunication
from quintnet_compiler.passes.sharding.shard_parameters import ShardParameters
from quintnet_compiler.runtime.backends.local import LocalBackend
from quintnet_compiler.runtime.execute.executor import Run
from quintnet_compiler.schedules.kinds import SCHEDULES
from quintnet_compiler.schedules.schedule import Schedule, ScheduleError
from quintnet_compiler.strategies.cuts import find_cuts
from quintnet_compiler.strategies.rule_book import RuleBook, leaf_strategies, refine, strategies


@dataclass(frozen=True)
class RandomSharding:
    """As ChooseSharding, but by dice."""

    axes: tuple[Axis, ...]
    dice: random.Random

    def __call__(self, program: Program, /) -> ShardedProgram:
        factors = RuleBook(RULES).factors(program.graph)
        chosen: dict[fx.Node, tuple[Strategy, ...]] = dict.fromkeys(factors, ())
        for position, axis in enumerate(self.axes):
            cuts = find_cuts(program.graph, factors)
            for node in factors:
                make = leaf_strategies if leaf(node) is not None else strategies
                options = make(node, factors[node], cuts[node], axis.size)
                fitting = [s for s in options if self._reachable(node, s, chosen, position, factors[node].additive)]
                picked = self._pick(fitting)
                chosen[node] += (picked,)
                factors[node] = refine(factors[node], picked, axis.size)
        out = program.graph.output_node()
        results = outputs(program.graph)
        chosen[out] = tuple(
            Strategy(tuple(self._leaving(chosen, result, i) for result in results), (), "leave")
            for i in range(len(self.axes))
        )
        return ShardedProgram(program, self.axes, chosen)

    def _pick(self, options: Sequence[Strategy]) -> Strategy:
        split = [s for s in options if not s.label.startswith("replicated")]
        return self.dice.choice(split) if split and self.dice.random() < 0.75 else self.dice.choice(list(options))

    def _reachable(
        self,
        node: fx.Node,
        strategy: Strategy,
        chosen: dict[fx.Node, tuple[Strategy, ...]],
        position: int,
        additive: frozenset[int],
    ) -> bool:
        """Whether every input can be converted to what the strategy wants. Nothing turns a slice into a term."""
        for index, (given, want) in enumerate(zip(tensor_inputs(node), strategy.inputs, strict=True)):
            source, output = origin(given)
            have = chosen[source][position].outputs[output]
            if want is P and have is not P:
                whole = not isinstance(have, Shard) and is_float(values(given)[0])
                if not whole or (index not in additive and self.dice.random() < 0.8):
                    return False
        return True

    def _leaving(self, chosen: dict[fx.Node, tuple[Strategy, ...]], result: fx.Node, position: int):  # type: ignore[no-untyped-def]
        source, index = origin(result)
        kind = chosen[source][position].outputs[index]
        if forward_type(kind) is I:
            return P if kind is R and needs_grad(result) else I
        return P if kind is P and shape(result) == () else I


@dataclass(frozen=True)
class RandomCut:
    """Stages that begin at random places."""

    num_stages: int
    dice: random.Random

    def __call__(self, program: ShardedProgram, /) -> StagedProgram:
        depends: set[fx.Node] = set()
        for node in program.program.graph.nodes:
            found = leaf(node) if node.op == "placeholder" else None
            if (found and found.kind == "parameter") or (
                node.op == "call_function" and any(n in depends for n in node.all_input_nodes)
            ):
                depends.add(node)
        order = [
            n for n in program.program.graph.nodes if n in depends and n.op == "call_function" and not is_getitem(n)
        ]
        starts = sorted(self.dice.sample(range(1, len(order)), self.num_stages - 1))
        stage = {node: sum(i >= start for start in starts) for i, node in enumerate(order)}
        for node in program.program.graph.nodes:
            if node in depends and is_getitem(node):
                stage[node] = stage[origin(node)[0]]
        return StagedProgram(program, self.num_stages, stage)


def random_schedule(dice: random.Random, ranks: int, microbatches: int, most: int) -> Schedule:
    """Any schedule, with as many stages per rank as it has, of ``most`` stages."""
    makes = [(make, count) for make in SCHEDULES.values() for count in (1, 2, 3) if count * ranks <= most]
    dice.shuffle(makes)
    for make, count in makes:
        with contextlib.suppress(ScheduleError):
            return make(ranks, microbatches, count)
    raise AssertionError("1f1b has one stage per rank")


def random_program(
    program: Program, mesh: Mesh, axes: tuple[Axis, ...], microbatches: int, seed: int
) -> DistributedProgram:
    """A random distributed program for ``mesh``; ``axes`` are its axes but pp (and the microbatch axis)."""
    run, dice = Runner(), random.Random(seed)
    sharded = run(RandomSharding(axes, dice), program)
    if zero := random.Random(f"zero {seed}").randrange(4):
        sharded = run(ShardParameters(zero, tuple(axis.name for axis in axes if axis.role == "data")), sharded)
    schedule = random_schedule(dice, mesh["pp"], microbatches, len(operators_of_parameters(program.graph)))
    staged = run(RandomCut(schedule.num_stages, dice), sharded)
    local = run(InsertCommunication(dict(RULES)), staged)
    check_types(local, RuleBook(RULES))
    check_padding(local, RuleBook(RULES))
    chunked = run(ChunkLosses(random.Random(f"chunks {seed}").randint(1, 3)), local)
    if chunked is not local:
        check_chunked(local, chunked)
    differentiated = run(Differentiate(), chunked)
    if dice.random() < 0.5:
        differentiated = run(Recompute(dice.choice(["selective", "full", "fused"])), differentiated)
    elif differentiated.again:
        differentiated = run(Recompute("none", reshard_after_forward=False), differentiated)
    check_backward(differentiated)
    if random.Random(f"offload {seed}").random() < 0.5:
        outside = run(OffloadActivations(lambda node: 1e-6), differentiated)
        check_offload(differentiated, outside)
        differentiated = outside
    on_host = False
    if zero not in (1, 2) and random.Random(f"parameters {seed}").random() < 0.5:
        on_host, outside = True, run(OffloadParameters(), differentiated)
        check_offload_parameters(differentiated, outside)
        differentiated = outside
    program = run(GenerateRanks(mesh, schedule, host=HostState(parameters=on_host)), differentiated)
    check_code(program)
    check_ranks(program)
    return program


def gradients(
    program: DistributedProgram, mesh: Mesh, tensors: dict[str, Tensor], batch: object
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one step of all ranks in this process."""
    backend = LocalBackend(mesh, program, tensors, torch.device("cpu"))
    for parameter in backend.parameters.values():  # the module's own: a reference may have left gradients
        parameter.grad = None
    (loss,) = backend.run(program, pytree.tree_leaves(batch), Run(train=True))
    found = {n: p.grad.full_tensor() for n, p in backend.parameters.items() if p.grad is not None}  # type: ignore[attr-defined]
    return loss, found
