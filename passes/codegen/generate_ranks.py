"""DifferentiatedProgram -> DistributedProgram: generated functions per stage, layouts of state, a schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch
from torch import fx

from ...core.annotations import ancestors, facts, leaf, num_bytes, shape, value, values
from ...core.mesh import Mesh
from ...core.sharding import Sharding
from ...ir.distributed_program import (
    DiskSpec,
    DistributedProgram,
    Piece,
    Slice,
    StageProgram,
    StateSpec,
    Transfer,
    ValueSpec,
)
from ...ir.expectations import Expectations
from ...ir.generated import UnwrittenModule
from ...ir.plans.host_state import HostState
from ...ir.program import BUCKET_MIB, DifferentiatedProgram, Program, ShardedProgram, outputs
from ...ops.catalog import op_spec
from ...schedules.check import verify_schedule
from ...schedules.schedule import Op, Schedule, StageEdge, with_transfers
from .functions import Functions, MakeModule, written_module
from .stage_cut import StageCut, used_in


@dataclass(frozen=True)
class GenerateRanks:
    """Cut the graph into one forward and one backward function per stage, and order them by a schedule.

    Ensures: each stage has every value that it needs from itself, from ``once``, or by a transfer; the schedule with
    its transfers is verified; the generated code of all ranks of a stage is the same.

    ``schedule`` has compute actions alone. Where it splits a stage's backwards, so is the function: the first half
    computes what other stages wait for, the second the rest. ``checked``: whether to verify the schedule and write
    code; a program that is only priced needs neither. ``bucket_mib`` and ``expect``: see :class:`...ir.plan.Plan`.
    ``host``: what hosts hold.
    """

    mesh: Mesh
    schedule: Schedule
    checked: bool = True
    bucket_mib: float = BUCKET_MIB
    expect: Expectations = Expectations()
    host: HostState = HostState()

    def __call__(self, program: DifferentiatedProgram, /) -> DistributedProgram:
        stages = program.local.staged.num_stages
        sites: list[str] = []
        cuts = [StageCut(program, index, stages) for index in range(stages)]
        transfers = _transfers(program, {cut.index: cut.received for cut in cuts})
        sends: dict[int, set[str]] = defaultdict(set)
        for transfer in transfers:
            sends[transfer.source].update(transfer.forward)
            sends[transfer.target].update(transfer.backward)
        split = {action.stage for row in self.schedule.actions for action in row if action.op is Op.BACKWARD_WEIGHT}
        make_module = written_module if self.checked else UnwrittenModule
        functions = Functions(sites, make_module)
        built = tuple(_stage_program(cut, functions, sends[cut.index], split=cut.index in split) for cut in cuts)
        sites.append("the program's outputs")
        edges = [StageEdge(t.source, t.target, bool(t.backward)) for t in transfers]
        schedule = with_transfers(self.schedule, edges)
        if program.gradients and self.checked:
            verify_schedule(schedule, edges)
        crossing = {n for t in transfers for n in (*t.forward, *t.backward)}
        whole = program.local.staged.sharded.program
        return DistributedProgram(
            self.mesh,
            program.local.staged.sharded.axes,
            built,
            _state(program, host=self.host.parameters),
            _inputs(program),
            _results(program),
            transfers,
            {
                n.name: (tuple(values(n)[0].shape), values(n)[0].dtype)
                for n in program.graph.nodes
                if n.name in crossing
            },
            schedule,
            tuple(sites),
            whole.captured,
            whole.precision,
            whole.batches,
            lambda: program,
            self.bucket_mib,
            end=_end(whole, make_module),
            expect=self.expect,
            disk=self._disk(program),
            host_optimizer=self.host.optimizer,
        )

    def _disk(self, program: DifferentiatedProgram) -> DiskSpec | None:
        written = [node for node in program.graph.nodes if op_spec(node).way == "to disk"]
        if self.host.folder is None or not written:
            return None
        return DiskSpec(self.host.folder, max(num_bytes(values(node.all_input_nodes[0])[0]) for node in written))


def _end(program: Program, make_module: MakeModule) -> Piece | None:
    """Return the function that every rank runs at the end of a step, on whole values."""
    if program.end is None:
        return None
    graph, num_reads = program.end.graph, len(program.end.reads)
    placeholders = graph.find_nodes(op="placeholder")
    leaves = {n: source.name for n in placeholders[num_reads:] if (source := leaf(n)) is not None}
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    piece = Functions([], make_module).piece(nodes, list(outputs(graph)), set(leaves), {})
    by_name = dict(zip([n.name for n in placeholders[:num_reads]], program.end.reads, strict=True))
    by_name |= {n.name: name for n, name in leaves.items()}
    static, dynamic = (tuple(by_name[name] for name in names) for names in (piece.static, piece.dynamic))
    return Piece(piece.module, static, dynamic, program.end.makes)


def _results(program: DifferentiatedProgram) -> tuple[ValueSpec, ...]:
    whole = outputs(program.local.staged.sharded.program.graph)
    local = outputs(program.local.graph)
    last = program.local.staged.sharded.program.last
    names = [*(f"output {i}" for i in range(len(whole) - len(last))), *last]
    return tuple(
        ValueSpec(name, shape(a), value(a).dtype, program.local.sharding[b])
        for name, a, b in zip(names, whole, local, strict=True)
    )


def _stage_program(cut: StageCut, functions: Functions, sends: set[str], *, split: bool) -> StageProgram:
    """Return the functions of a stage. ``sends``: the names of values that it sends; ``split``: its backward is."""
    placeholders = [n for n in cut.program.graph.nodes if n.op == "placeholder"]
    leaves = {n: source for n in placeholders if (source := leaf(n)) is not None}
    # users' names stay out of generated code
    ids = {source.name: n.name for n, source in leaves.items() if source.kind == "parameter"}
    saved, results = cut.saved_values(), cut.results()
    returned = {*results.values(), *cut.carried.values()}
    static = {*cut.once, *placeholders} - cut.carried.keys()
    once = functions.piece(cut.once, _once_outputs(cut, returned), static, {})
    forward = functions.piece(cut.forward, _forward_outputs(cut, sends, returned), static, {})
    backward, backward_weight = _backward(cut, functions, sends, static, ids, split=split)
    used = [n for n in cut.used_leaves() if n in leaves]
    return StageProgram(
        cut.index,
        once,
        forward,
        backward,
        {n.name: leaves[n].name for n in used if leaves[n].kind != "input"},
        {n.name: _position(cut.program, n) for n in used if leaves[n].kind == "input"},
        {n.name: Slice(n.args[0].name, n.args[2], n.args[3]) for n in cut.slices},  # type: ignore[union-attr,arg-type]
        {position: n.name for position, n in results.items()},
        tuple(n.name for n in saved),
        _parameter_names(cut, sends, ids, split=split),
        backward_weight,
        {n.name: new.name for n, new in cut.carried.items()},
    )


def _once_outputs(cut: StageCut, returned: Set[fx.Node]) -> list[fx.Node]:
    """Return what microbatches read, or the step returns, of the nodes that run once."""
    sliced = {source for n in cut.slices for source in n.all_input_nodes}
    microbatch_nodes = {*cut.forward, *cut.backward}
    return [n for n in cut.once if n in sliced or n in returned or used_in(n, microbatch_nodes)]


def _forward_outputs(cut: StageCut, sends: Set[str], returned: Set[fx.Node]) -> list[fx.Node]:
    """Return what a microbatch's forward sends, returns or saves."""
    kept = {*returned, *cut.saved_values()}
    return [n for n in cut.forward if n.name in sends or n in kept]


def _halves(cut: StageCut, sends: Set[str], *, split: bool) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the backward in two parts: what other stages wait for, and the rest. If it is not split: all of it."""
    if not split:
        return cut.backward, []
    urgent = ancestors(cut.backward, {n for n in cut.backward if n.name in sends})
    return [n for n in cut.backward if n in urgent], [n for n in cut.backward if n not in urgent]


def _backward(
    cut: StageCut, functions: Functions, sends: Set[str], static: Set[fx.Node], ids: Mapping[str, str], *, split: bool
) -> tuple[Piece, Piece | None]:
    """Return a stage's backward, and its second half if it is split."""
    first, second = _halves(cut, sends, split=split)
    later = set(second)
    outputs_of_first = [n for n in first if n.name in sends or used_in(n, later)]
    gradients = {node: [ids[name] for name in names] for node, names in cut.gradients().items()}
    early = {n: names for n, names in gradients.items() if n not in later}
    late = {n: names for n, names in gradients.items() if n in later}
    backward = functions.piece(first, outputs_of_first, static, early)
    return backward, functions.piece(second, [], static, late) if split else None


def _parameter_names(cut: StageCut, sends: Set[str], ids: Mapping[str, str], *, split: bool) -> dict[str, str]:
    """Return the names of parameters whose gradients a stage computes or receives, by their ids in generated code."""
    first, second = _halves(cut, sends, split=split)
    gradients = cut.gradients()
    return {ids[name]: name for n in (*cut.received, *first, *second) for name in gradients.get(n, ())}


def _position(program: DifferentiatedProgram, node: fx.Node) -> int:
    inputs = [n for n in program.graph.nodes if n.op == "placeholder" and leaf(n).kind == "input"]  # type: ignore[union-attr]
    return inputs.index(node)


def _transfers(program: DifferentiatedProgram, received: dict[int, list[fx.Node]]) -> tuple[Transfer, ...]:
    forward: dict[tuple[int, int], list[str]] = defaultdict(list)
    backward: dict[tuple[int, int], list[str]] = defaultdict(list)
    for user, nodes in received.items():
        for node in nodes:
            home = program.stage[node]
            if facts(node).phase == "forward":
                assert home < user, f"{node} flows back from stage {home} to {user}"
                forward[home, user].append(node.name)
            else:
                assert home > user, f"the gradient {node} flows forward from stage {home} to {user}"
                backward[user, home].append(node.name)
    pairs = sorted({*forward, *backward})
    return tuple(Transfer(s, t, tuple(forward[s, t]), tuple(backward[s, t])) for s, t in pairs)


def _state(program: DifferentiatedProgram, *, host: bool) -> dict[str, StateSpec]:
    """Return every parameter, buffer and constant, used or not. ``host``: whether parameters are on the host."""
    local = program.local
    original = local.staged.sharded.program.leaves
    kinds = {leaf(n).name: s for n, s in local.sharding.items() if leaf(n) is not None}  # type: ignore[union-attr]
    stages: dict[str, set[int]] = defaultdict(set)
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            read_leaf = leaf(source)
            if read_leaf is not None and node in program.stage:
                stages[read_leaf.name].add(program.stage[node])
    for name, stage in program.gradients:  # a hook's backward may run where nothing reads the parameter
        stages[name].add(stage)
    return {
        source.name: StateSpec(
            source.name,
            source.kind,
            tuple(values(node)[0].shape),
            source.held or value(node).dtype,
            source.trainable,
            kinds[source.name],
            tuple(sorted(stages[source.name])) or (0,),
            *during_step(local.staged.sharded, node),
            *dtypes_of_step(local.staged.sharded.program, node),
            host and source.kind == "parameter",
        )
        for node, source in original.items()
        if source.kind != "input"
    }


def during_step(sharded: ShardedProgram, node: fx.Node) -> tuple[Sharding, Sharding]:
    """Return the shardings that a parameter has during a step, and in which its gradient is summed."""
    gather, stored = sharded.gathered.get(node), sharded.produced(node)
    if gather is None:
        return stored, stored
    return gather.sharding if gather.once else stored, gather.sharding if gather.deferred else stored


def dtypes_of_step(program: Program, node: fx.Node) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes in which operators read a leaf, microbatches sum its gradient, and ranks sum it."""
    stored = program.leaves[node].held or value(node).dtype
    return value(node).dtype, program.precision.accumulated(stored), program.precision.reduced(stored)


def _inputs(program: DifferentiatedProgram) -> tuple[ValueSpec, ...]:
    local = program.local
    kinds = {leaf(n).name: s for n, s in local.sharding.items() if leaf(n) is not None and leaf(n).kind == "input"}  # type: ignore[union-attr]
    whole = local.staged.sharded.program
    sizes = {
        node: (whole.batches * shape(node)[0], *shape(node)[1:]) if source.batched else shape(node)
        for node, source in whole.leaves.items()
        if source.kind == "input"
    }
    return tuple(
        ValueSpec(whole.leaves[node].name, tuple(size), value(node).dtype, kinds[whole.leaves[node].name])
        for node, size in sizes.items()
    )
