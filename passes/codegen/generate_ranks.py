"""DifferentiatedProgram -> DistributedProgram: generated functions per stage, layouts of state, a schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...compat.torch import function_name
from ...compat.torch_texts import goes_with_its_text
from ...core.annotations import facts, is_getitem, leaf, num_bytes, origin, shape, value, values
from ...core.errors import CompileError
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
from ...ir.generated import GeneratedModule, UnwrittenModule
from ...ir.plan import Offloaded
from ...ir.program import BUCKET_MIB, DifferentiatedProgram, Program, ShardedProgram, outputs
from ...ops.collectives import COMMUNICATION, SIZED, share
from ...ops.copies import COPIES, write_out
from ...ops.rank_local import RANKED, microbatch
from ...schedules.check import verify_schedule
from ...schedules.schedule import Op, Schedule, StageEdge, with_transfers
from .python_ops import SPELLING
from .source_lines import WIDTH, in_lines, written

Made = Callable[[fx.Graph], GeneratedModule]


@dataclass(frozen=True)
class GenerateRanks:
    """Cut the graph into one forward and one backward function per stage, and order them by a schedule.

    ``schedule``: compute actions alone. Where it splits a stage's backwards, so is the function: the first half has
    what values that other stages wait for depend on, the second the rest. ``checked``: whether the schedule is verified
    and code written; not so for a program that is only priced, whose schedule says no more than which functions there
    are.

    Ensures: each stage has every value that it needs from itself, from ``once``, or by a transfer; the schedule with
    its transfers is verified; the generated code of all ranks of a stage is the same. ``bucket_mib``,
    ``expert_imbalance``, ``hot_rows``, ``offload`` and
    ``offload_folder``: see :class:`...ir.plan.Plan`.
    """

    mesh: Mesh
    schedule: Schedule
    checked: bool = True
    bucket_mib: float = BUCKET_MIB
    expert_imbalance: float = 1.0
    hot_rows: float | None = None
    offload: tuple[Offloaded, ...] = ()
    offload_folder: str | None = None

    def __call__(self, program: DifferentiatedProgram, /) -> DistributedProgram:
        stages = program.local.staged.num_stages
        sites: list[str] = []
        cuts = [_Cut(program, index, stages) for index in range(stages)]
        wants = {cut.index: cut.received for cut in cuts}
        transfers = _transfers(program, wants)
        sends: dict[int, set[str]] = defaultdict(set)
        for transfer in transfers:
            sends[transfer.source].update(transfer.forward)
            sends[transfer.target].update(transfer.backward)
        split = {action.stage for row in self.schedule.actions for action in row if action.op is Op.BACKWARD_WEIGHT}
        made = _module if self.checked else UnwrittenModule
        built = tuple(cut.build(sends[cut.index], sites, made, split=cut.index in split) for cut in cuts)
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
            _state(program, host="parameters" in self.offload),
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
            end=_end(whole, made),
            expert_imbalance=self.expert_imbalance,
            hot_rows=self.hot_rows,
            disk=self._disk(program),
            host_optimizer="optimizer" in self.offload,
        )

    def _disk(self, program: DifferentiatedProgram) -> DiskSpec | None:
        written = [node for node in program.graph.nodes if node.target in (write_out, COPIES[write_out])]
        if self.offload_folder is None or not written:
            return None
        return DiskSpec(self.offload_folder, max(num_bytes(values(node.all_input_nodes[0])[0]) for node in written))


def _end(program: Program, made: Made) -> Piece | None:
    """The function that runs when a step is over, on whole values, on every rank."""
    if program.end is None:
        return None
    graph, many = program.end.graph, len(program.end.reads)
    given = graph.find_nodes(op="placeholder")
    kept = {n: known.name for n in given[many:] if (known := leaf(n)) is not None}
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    found = _piece(nodes, list(outputs(graph)), set(kept), {}, [], made)
    by_name = dict(zip([n.name for n in given[:many]], program.end.reads, strict=True))
    by_name |= {n.name: name for n, name in kept.items()}
    static, dynamic = (tuple(by_name[name] for name in names) for names in (found.static, found.dynamic))
    return Piece(found.module, static, dynamic, program.end.makes)


def _results(program: DifferentiatedProgram) -> tuple[ValueSpec, ...]:
    whole = outputs(program.local.staged.sharded.program.graph)
    local = outputs(program.local.graph)
    last = program.local.staged.sharded.program.last
    names = [*(f"output {i}" for i in range(len(whole) - len(last))), *last]
    return tuple(
        ValueSpec(name, shape(a), value(a).dtype, program.local.sharding[b])
        for name, a, b in zip(names, whole, local, strict=True)
    )


@dataclass
class _Cut:
    """One stage's share of the graph."""

    program: DifferentiatedProgram
    index: int
    num_stages: int
    once: list[fx.Node] = field(default_factory=list)
    forward: list[fx.Node] = field(default_factory=list)
    backward: list[fx.Node] = field(default_factory=list)
    slices: list[fx.Node] = field(default_factory=list)
    received: list[fx.Node] = field(default_factory=list)
    carried: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stage = self.program.stage
        needed: set[fx.Node] = {n for n in self._results().values() if n.op != "placeholder"}
        needed.update(node for (_, index), node in self.program.gradients.items() if index == self.index)
        order = [n for n in self.program.graph.nodes if n.op == "call_function"]
        while True:  # what a buffer becomes may depend on another one
            for node in reversed(order):
                if stage.get(node) == self.index or (node in needed and node not in stage):
                    needed.add(node)
                    needed.update(n for n in node.all_input_nodes if n.op == "call_function")
            self.carried = self._carried(needed)
            made = {new for new in self.carried.values() if new.op == "call_function"}
            if made <= needed:
                break
            needed |= made
        for node in order:
            if node not in needed:
                continue
            if node in stage and stage[node] != self.index:
                self.received.append(node)
            elif node.target is microbatch:
                self.slices.append(node)
            elif node in self.program.once:
                self.once.append(node)
            elif facts(node).phase == "backward":
                self.backward.append(node)
            else:
                self.forward.append(node)

    def _carried(self, needed: Set[fx.Node]) -> dict[fx.Node, fx.Node]:
        """The buffers that this stage reads, and what a batch of the step makes of them for the next.

        Raises:
            CompileError: QN206 if another stage makes it.
        """
        carried = self.program.local.staged.sharded.program.carried
        given = (node for node in self.program.graph.nodes if node.op == "placeholder")
        buffers = {node: known.name for node in given if (known := leaf(node)) and known.name in carried}
        found: dict[fx.Node, fx.Node] = {}
        here = (node for node in needed if self.program.stage.get(node, self.index) == self.index)
        todo = {n for node in here for n in node.all_input_nodes} | set(self._results().values())
        while todo := todo & buffers.keys() - found.keys():
            found |= {node: self.program.outputs[carried[buffers[node]]] for node in todo}
            todo = {found[node] for node in todo}  # two buffers may change places
        for node, new in found.items():
            if (home := self.program.stage.get(new, self.index)) != self.index:
                raise CompileError(
                    "QN206",
                    f"stage {self.index} reads the buffer {buffers[node]}, stage {home} changes it in each microbatch",
                    where=facts(new).where,
                    fix="let the stages begin elsewhere: stages=",
                )
        return {node: found[node] for node in self.program.graph.nodes if node in found}

    def _results(self) -> dict[int, fx.Node]:
        """By position: one value may be several results."""
        last = self.num_stages - 1
        return {
            position: node
            for position, node in enumerate(self.program.outputs)
            if self.program.stage.get(node, last) == self.index
        }

    def build(self, sends: set[str], sites: list[str], made: Made, *, split: bool) -> StageProgram:
        # two parameters may have one gradient: those of a + b
        gradients: dict[fx.Node, list[str]] = defaultdict(list)
        for (name, stage), node in self.program.gradients.items():
            if stage == self.index:
                gradients[node].append(name)
        # users' names stay out of generated code
        leaves = {n: leaf(n) for n in self.program.graph.nodes if n.op == "placeholder"}
        ids = {found.name: n.name for n, found in leaves.items() if found is not None and found.kind == "parameter"}
        forward, backward, once = set(self.forward), set(self.backward), set(self.once)
        own = (
            forward | set(self.slices) | {n for n in self.received if facts(n).phase == "forward"} | self.carried.keys()
        )
        saved = [n for n in self.program.graph.nodes if n in own and _used_in(n, backward)]
        places = self._results()
        results = list(dict.fromkeys((*places.values(), *self.carried.values())))
        static = (once | {n for n in self.program.graph.nodes if n.op == "placeholder"}) - self.carried.keys()
        later = {u for n in self.slices for u in n.all_input_nodes}
        needed = forward | backward
        once_out = [n for n in self.once if n in later or n in results or _used_in(n, needed)]
        kept = set(saved)
        forward_out = [n for n in self.forward if n.name in sends or n in results or n in kept]
        first, second = self._halves(sends) if split else (self.backward, [])
        rest = set(second)
        backward_out = [n for n in first if n.name in sends or _used_in(n, rest)]
        settled = {n: [ids[name] for name in names] for n, names in gradients.items()}
        early = {n: names for n, names in settled.items() if n not in rest}
        late = {n: names for n, names in settled.items() if n in rest}
        used = _leaves([*self.once, *self.forward, *self.backward, *self.slices, *results])
        return StageProgram(
            self.index,
            _piece(self.once, once_out, static, {}, sites, made),
            _piece(self.forward, forward_out, static, {}, sites, made),
            _piece(first, backward_out, static, early, sites, made),
            {n.name: found.name for n in used if (found := leaf(n)) is not None and found.kind != "input"},
            {n.name: _position(self.program, n) for n in used if (f := leaf(n)) is not None and f.kind == "input"},
            {n.name: Slice(n.args[0].name, n.args[2], n.args[3]) for n in self.slices},  # type: ignore[union-attr,arg-type]
            {position: n.name for position, n in places.items()},
            tuple(n.name for n in saved),
            {ids[name]: name for n in [*self.received, *first, *second] for name in gradients.get(n, ())},
            _piece(second, [], static, late, sites, made) if split else None,
            {n.name: new.name for n, new in self.carried.items()},
        )

    def _halves(self, sends: set[str]) -> tuple[list[fx.Node], list[fx.Node]]:
        """The backward in two parts: what other stages wait for, and the rest."""
        waited = before_others(self.backward, {n for n in self.backward if n.name in sends})
        return [n for n in self.backward if n in waited], [n for n in self.backward if n not in waited]


def before_others(backward: Sequence[fx.Node], sent: Set[fx.Node]) -> set[fx.Node]:
    """Of a stage's backward, what it computes before other stages can go on: what is ``sent``, and what that needs."""
    waited = set(sent)
    for node in reversed(backward):
        if node in waited:
            waited.update(node.all_input_nodes)
    for node in backward:
        if is_getitem(node) and node.args[0] in waited:  # several results cannot be handed over as one
            waited.add(node)
    return waited


def _used_in(node: fx.Node, users: Set[fx.Node]) -> bool:
    return any(user in users for user in node.users)


def _leaves(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    for node in nodes:
        for source in (node, *node.all_input_nodes):
            if source.op == "placeholder":
                found[source] = None
    return list(found)


def _position(program: DifferentiatedProgram, node: fx.Node) -> int:
    inputs = [n for n in program.graph.nodes if n.op == "placeholder" and leaf(n).kind == "input"]  # type: ignore[union-attr]
    return inputs.index(node)


def _transfers(program: DifferentiatedProgram, wants: dict[int, list[fx.Node]]) -> tuple[Transfer, ...]:
    forward: dict[tuple[int, int], list[str]] = defaultdict(list)
    backward: dict[tuple[int, int], list[str]] = defaultdict(list)
    for user, nodes in wants.items():
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


def _piece(
    nodes: list[fx.Node],
    returned: list[fx.Node],
    static: set[fx.Node],
    gradients: Mapping[fx.Node, list[str]],
    sites: list[str],
    made: Made,
) -> Piece:
    """A function of ``nodes``. A parameter's gradient is handed over as soon as it exists, not returned; at once if it
    is what another stage sent, as it came."""
    graph = fx.Graph()
    nodes, inside = _taken_apart(nodes), set(nodes)
    inputs: dict[fx.Node, None] = dict.fromkeys(n for n in gradients if n not in inside)
    for node in nodes:
        inputs.update((n, None) for n in node.all_input_nodes if n not in inside)
    ordered = [n for n in inputs if n in static] + [n for n in inputs if n not in static]
    comm = graph.placeholder("comm")
    env: dict[fx.Node, fx.Node] = {}
    for node in ordered:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in ordered:
        for name in gradients.get(node, ()):
            graph.call_method("accumulate", (comm, env[node], name))
    for node in nodes:
        parameters = gradients.get(node, [])
        if len(parameters) == 1 and _is_matmul(node):
            left, right = node.args
            graph.call_method("accumulate_matmul", (comm, env[left], env[right], parameters[0]))  # type: ignore[index]
            continue
        env[node] = _emit(graph, node, env, comm, sites)
        for name in parameters:
            graph.call_method("accumulate", (comm, env[node], name))
    graph.output(tuple(env[n] for n in returned))
    names = {n for n in ordered if n in static}
    return Piece(
        made(graph),
        tuple(n.name for n in ordered if n in names),
        tuple(n.name for n in ordered if n not in names),
        tuple(n.name for n in returned),
    )


def _module(graph: fx.Graph) -> GeneratedModule:
    graph.set_codegen(_Boxed())
    graph.on_generate_code(lambda _: written)
    return goes_with_its_text(fx.GraphModule({}, graph))


def _taken_apart(nodes: list[fx.Node]) -> list[fx.Node]:
    """Each result of an operator is taken right behind it: while one is still to be taken, all of them are alive."""
    inside, found = set(nodes), list[fx.Node]()
    parts: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if is_getitem(node) and (made := origin(node)[0]) in inside and made.target not in COMMUNICATION:
            parts[made].append(node)
    moved = {node for some in parts.values() for node in some}
    for node in nodes:
        found += [node, *parts[node]] if node not in moved else []
    return found


def _is_matmul(node: fx.Node) -> bool:
    """A matrix product that only the gradient needs: it can be added up where it is computed."""
    return node.target is torch.ops.aten.mm.default and len(node.users) == 1 and len(node.all_input_nodes) == 2


def _emit(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node], comm: fx.Node, sites: list[str]) -> fx.Node:
    if node.target is share:
        new = graph.create_node("call_function", torch.div, (env[node.args[0]], node.args[2]), name=node.name)  # type: ignore[index]
        new.meta = dict(node.meta)
        return new
    if node.target not in RANKED:
        new = graph.node_copy(node, lambda n: env[n])
        new.meta = dict(node.meta)
        new.target = SPELLING.get(node.target, node.target)
        return new
    name = str(node.target).split(".")[1]
    args = list(fx.map_arg(node.args, lambda n: env[n]))
    over = ""
    size = f" {sum(map(num_bytes, values(node)))} bytes" if name.startswith("start_") else ""
    if node.target in SIZED:
        over = f"[{args[1]}]"
        del args[2]  # the transport knows the axis' size
    moved = value(node.all_input_nodes[0]).dtype if node.target in SIZED else None
    of = f" {str(moved).removeprefix('torch.')}" if moved else ""
    sites.append(f"{name}{over}{of}{size} {facts(node).where}".strip())
    new = graph.create_node("call_method", name, (comm, *args, len(sites) - 1), name=node.name)
    new.meta = dict(node.meta)
    return new


class _Boxed(fx.graph.CodeGen):
    """Takes its arguments in a list, which it empties: a value dies at its last use, not when the caller returns."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        unpack = f"{', '.join(names)}, = args" if names else "pass"
        if len(unpack) > WIDTH:
            unpack = f"{in_lines(names)} = args".replace("\n", "\n    ")
        return f"def {function_name(self)}(self, args):\n    {unpack}\n    args.clear()"


def _state(program: DifferentiatedProgram, *, host: bool) -> dict[str, StateSpec]:
    """Every parameter, buffer and constant of the model, used or not; ``host``: whether parameters are on the host."""
    local = program.local
    original = local.staged.sharded.program.leaves
    kinds = {leaf(n).name: s for n, s in local.sharding.items() if leaf(n) is not None}  # type: ignore[union-attr]
    stages: dict[str, set[int]] = defaultdict(set)
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            found = leaf(source)
            if found is not None and node in program.stage:
                stages[found.name].add(program.stage[node])
    for name, stage in program.gradients:  # a hook's backward may run where nothing reads the parameter
        stages[name].add(stage)
    return {
        found.name: StateSpec(
            found.name,
            found.kind,
            tuple(values(node)[0].shape),
            found.held or value(node).dtype,
            found.trainable,
            kinds[found.name],
            tuple(sorted(stages[found.name])) or (0,),
            *during_step(local.staged.sharded, node),
            *dtypes_of_step(local.staged.sharded.program, node),
            host and found.kind == "parameter",
        )
        for node, found in original.items()
        if found.kind != "input"
    }


def during_step(sharded: ShardedProgram, node: fx.Node) -> tuple[Sharding, Sharding]:
    """The types in which a parameter is resident during a step, and in which its gradient is added up."""
    held, stored = sharded.gathered.get(node), sharded.produced(node)
    if held is None:
        return stored, stored
    return held.sharding if held.once else stored, held.sharding if held.deferred else stored


def dtypes_of_step(program: Program, node: fx.Node) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The dtypes in which operators read a leaf, microbatches add up its gradient, and ranks do."""
    held = program.leaves[node].held or value(node).dtype
    return value(node).dtype, program.precision.accumulated(held), program.precision.reduced(held)


def _inputs(program: DifferentiatedProgram) -> tuple[ValueSpec, ...]:
    local = program.local
    kinds = {leaf(n).name: s for n, s in local.sharding.items() if leaf(n) is not None and leaf(n).kind == "input"}  # type: ignore[union-attr]
    whole = local.staged.sharded.program
    sizes = {
        node: (whole.batches * shape(node)[0], *shape(node)[1:]) if found.batched else shape(node)
        for node, found in whole.leaves.items()
        if found.kind == "input"
    }
    return tuple(
        ValueSpec(whole.leaves[node].name, tuple(size), value(node).dtype, kinds[whole.leaves[node].name])
        for node, size in sizes.items()
    )
