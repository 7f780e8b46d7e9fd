"""Small harmful changes to compiled programs: does somebody notice? Each mutation is made at the level at which it
arises (typed graph, differentiated graph, ranks' functions and actions), and checked from there on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import fx

from quintnet_compiler.checks.backward import check_backward
from quintnet_compiler.checks.code import check_code
from quintnet_compiler.checks.padding import check_padding
from quintnet_compiler.checks.positions import check_positions
from quintnet_compiler.checks.types import check_types
from quintnet_compiler.core.annotations import facts, is_getitem, shape, value
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.core.sharding import I, R, Shard, parse_type
from quintnet_compiler.equivalence.dry_run import check_ranks
from quintnet_compiler.ir.distributed_program import DistributedProgram, Piece, RankProgram, StageProgram
from quintnet_compiler.ir.invariants import verify_invariants
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ir.program import DifferentiatedProgram, LocalProgram
from quintnet_compiler.ops.attention.ring_plan import ring_plan
from quintnet_compiler.ops.attention.tiled import tiled_attention, tiled_attention_backward
from quintnet_compiler.ops.catalog import op_spec
from quintnet_compiler.ops.collectives import (
    combine,
    convert,
    dispatch,
    dispatch_plan,
    return_runs,
    send_runs,
    share,
)
from quintnet_compiler.ops.experts.grouped_rows import group_plan, group_rows, grouped_linear
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.autodiff.differentiate import Differentiate
from quintnet_compiler.passes.codegen.generate_ranks import GenerateRanks
from quintnet_compiler.passes.lowering.coalesce_collectives import CoalesceCollectives
from quintnet_compiler.schedules.kinds import SCHEDULES
from quintnet_compiler.schedules.schedule import DIRECTION, Action, Op, Schedule
from quintnet_compiler.strategies.rule_book import RuleBook

aten = torch.ops.aten
Dice = random.Random


@dataclass(frozen=True)
class Mutant(DistributedProgram):
    """A program of which some ranks have their own."""

    others: Mapping[int, RankProgram] = field(default_factory=dict)

    def rank(self, rank: int) -> RankProgram:
        return self.others.get(rank) or super().rank(rank)


def as_mutant(program: DistributedProgram, others: Mapping[int, RankProgram] | None = None, **changes: Any) -> Mutant:
    given = {f.name: getattr(program, f.name) for f in fields(DistributedProgram)}
    return Mutant(**{**given, **changes}, others=others or {})


@dataclass(frozen=True)
class Change:
    """What a mutation made: a program at some level, and what it did."""

    kind: str
    what: str
    program: Any


# -- copies of graphs, to be changed


def copied(program: Any) -> tuple[Any, dict[fx.Node, fx.Node]]:
    """A program with a graph of its own, and where each node went."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], new.__getitem__))
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
    moved: dict[str, Any] = {"graph": graph}
    moved["stage"] = {new[n]: s for n, s in program.stage.items()}
    moved["once"] = frozenset(new[n] for n in program.once)
    if isinstance(program, LocalProgram):
        moved["sharding"] = {new[n]: s for n, s in program.sharding.items()}
        moved["parts"] = {key: new[n] for key, n in program.parts.items()}
        moved["deferred"] = {new[n]: new[start] for n, start in program.deferred.items()}
        moved["reads"] = {key: tuple(new[n] for n in found) for key, found in program.reads.items()}
    else:
        moved["outputs"] = tuple(new[n] for n in program.outputs)
        for name in ("gradients", "values", "cotangents"):
            moved[name] = {key: new[n] for key, n in getattr(program, name).items()}
        moved["copies"] = {new[a]: new[b] for a, b in program.copies.items()}
    return replace(program, **moved), new


def piece_copied(piece: Piece) -> tuple[Piece, dict[str, fx.Node]]:
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in piece.module.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], new.__getitem__))
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].meta = dict(node.meta)
    graph.set_codegen(piece.module.graph._codegen)
    return replace(piece, module=fx.GraphModule({}, graph)), {n.name: m for n, m in new.items()}


def rebuilt(piece: Piece) -> Piece:
    piece.module.recompile()
    return piece


def _swap_args(a: fx.Node, b: fx.Node) -> None:
    a.args, b.args = (b.args[0], *a.args[1:]), (a.args[0], *b.args[1:])


def _look(node: fx.Node) -> tuple[Any, ...]:
    return tuple(shape(node)), value(node).dtype


# -- the typed graph


def typed(program: LocalProgram, dice: Dice) -> Iterator[Change]:
    moves = [n for n in program.graph.nodes if n.target is convert]
    axes = [a.name for a in program.staged.sharded.axes if a.role != "time"]
    for node in moves:
        mutant, new = copied(program)
        new[node].replace_all_uses_with(new[node].args[0])
        yield Change("drop a conversion", node.name, mutant)
        mutant, new = copied(program)
        other = dice.choice([a for a in axes if a != node.args[1]] or axes)
        new[node].args = (new[node].args[0], other, *new[node].args[2:])
        yield Change("regroup a conversion", f"{node.name} to {other}", mutant)
        mutant, new = copied(program)
        before, after = node.args[3:]
        kinds = [k for k in ("I", "R", "P") if k not in (before, after)]
        if not isinstance(parse_type(str(after)), Shard):
            new[node].args = (*new[node].args[:4], dice.choice(kinds))
            yield Change("convert to another type", f"{node.name} {after} to {new[node].args[4]}", mutant)
        elif not isinstance(parse_type(str(before)), Shard):
            new[node].args = (*new[node].args[:3], dice.choice(kinds), after)
            yield Change("convert from another type", f"{node.name} {before} to {new[node].args[3]}", mutant)
    for node in program.deferred:
        mutant, new = copied(program)
        fewer = {n: start for n, start in mutant.deferred.items() if n is not new[node]}
        yield Change("scatter a gradient in each microbatch", node.name, replace(mutant, deferred=fewer))
    for node in program.at_start:
        mutant, new = copied(program)
        yield Change("gather in each microbatch", node.name, replace(mutant, once=mutant.once - {new[node]}))
    yield from _attention(program)


def _attention(program: Any) -> Iterator[Change]:
    """Attention in tiles, forward or backward, that is told something else."""
    for node in [n for n in program.graph.nodes if n.target in (tiled_attention, tiled_attention_backward)]:
        names = [known.name for known in node.target._schema.arguments]
        given = dict(zip(names, node.args, strict=True))
        wrong: dict[str, dict[str, Any]] = {
            "swap keys and values": {"k": given["v"], "v": given["k"]},
            "change a scale": {"scale": given["scale"] * 2},
            "see other keys": {"mask": "all" if given["mask"] == "causal" else "causal"},
            "see fewer keys": {"mask": "chunk_2" if given["mask"] != "chunk_2" else "chunk_3"},
            "attend from other positions": {"axes": [], "sizes": [], "parts": []},
        }
        for kind, changes in wrong.items():
            mutant, new = copied(program)
            args = fx.map_arg(tuple((given | changes).values()), new.__getitem__)
            new[node].args = args
            yield Change(kind, node.name, mutant)


# -- the differentiated graph


def joint(program: DifferentiatedProgram, dice: Dice) -> Iterator[Change]:
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    moves = [n for n in nodes if op_spec(n).takes_size]
    plans = [n for n in moves if n.target is dispatch_plan]
    rings = [n for n in moves if _several(n) and n not in plans]
    moves = [n for n in moves if not _several(n)]
    axes = [a.name for a in program.local.staged.sharded.axes if a.role != "time"]

    def at(node: fx.Node) -> tuple[DifferentiatedProgram, fx.Node, dict[fx.Node, fx.Node]]:
        mutant, new = copied(program)
        return mutant, new[node], new

    for node in moves:
        mutant, here, _ = at(node)
        here.replace_all_uses_with(here.args[0])
        yield Change("drop a collective", node.name, _renamed(mutant, here, here.args[0]))
        if len(axes) > 1:
            mutant, here, _ = at(node)
            here.args = (here.args[0], next(a for a in axes if a != node.args[1]), *here.args[2:])
            yield Change("regroup a collective", node.name, mutant)
        if len(node.args) > 3 and isinstance(node.args[3], int) and len(shape(node)) > 1:
            mutant, here, _ = at(node)
            other = (int(node.args[3]) + 1) % len(shape(node))
            here.args = (*here.args[:3], other, *here.args[4:])
            yield Change("a collective along another dim", node.name, mutant)
        if _look(node) == _look(node.args[0]):
            mutant, here, _ = at(node)
            with here.graph.inserting_after(here):
                again = here.graph.node_copy(here)
            here.replace_all_uses_with(again, delete_user_cb=lambda user, a=again: user is not a)
            again.args = (here, *here.args[1:])
            mutant = replace(mutant, stage={**mutant.stage, again: mutant.stage.get(here, 0)})
            yield Change("duplicate a collective", node.name, _renamed(mutant, here, again))
    assigned = [n for n in nodes if n.target is ring_plan]
    for node in rings:
        for plan in [None, *assigned]:
            if plan is not node.args[-4] and (plan is None or _early(plan, node)):
                mutant, here, new = at(node)
                here.args = (*here.args[:-4], None if plan is None else new[plan], *here.args[-3:])
                yield Change("runs of another plan", node.name, mutant)
        mutant, here, _ = at(node)
        here.args = (here.args[0], here.args[1], here.args[2], here.args[4], here.args[3], *here.args[5:])
        yield Change("swap keys and values", node.name, mutant)
    yield from _attention(program)
    for node in moves:
        for plan in plans if node.target in (dispatch, combine) else []:
            parts = sorted((n for n in plan.users if is_getitem(n)), key=lambda n: n.args[1])
            if parts[0] is not node.args[3] and _early(parts[1], node):
                mutant, here, new = at(node)
                here.args = (*here.args[:3], *(new[part] for part in parts))
                yield Change("travel by another plan", node.name, mutant)
    for node in nodes:
        if node.target is ring_plan:
            mutant, here, _ = at(node)
            here.args = (*here.args[:3], "all", *here.args[4:])
            yield Change("assign runs by other work", node.name, mutant)
        if node.target in (send_runs, return_runs):
            mutant, here, _ = at(node)
            here.target = return_runs if node.target is send_runs else send_runs
            yield Change("send runs the other way", node.name, mutant)
        if node.target is dispatch_plan:
            mutant, here, _ = at(node)
            here.args = (*here.args[:4], here.args[4] * 2, here.args[5])
            yield Change("plan for other experts", node.name, mutant)
        if node.target is group_plan:
            mutant, here, _ = at(node)
            here.args = (here.args[0], here.args[1] - 1, *here.args[2:])
            yield Change("group for other experts", node.name, mutant)
        if node.target is group_rows:
            mutant, here, _ = at(node)
            here.replace_all_uses_with(here.args[0])
            yield Change("leave rows as they are", node.name, _renamed(mutant, here, here.args[0]))
        if node.target is grouped_linear and shape(node) == shape(node.args[0]):
            mutant, here, _ = at(node)
            here.args = (*here.args[:4], not here.args[4])
            yield Change("turn the matrices of experts", node.name, mutant)
    same: dict[Any, list[fx.Node]] = {}
    for node in moves:
        same.setdefault((node.target, node.args[1:], _look(node.args[0]), program.stage.get(node)), []).append(node)
    for group in same.values():
        for a, b in itertools.pairwise(group):
            if a not in b.all_input_nodes and not _depends(b.args[0], a):
                mutant, new = copied(program)
                if _early(new[b].args[0], new[a]):
                    _swap_args(new[a], new[b])
                    yield Change("swap two collectives", f"{a.name} and {b.name}", mutant)
    for node in nodes:
        if node.target in (aten.mul.Scalar, aten.div.Scalar):
            mutant, here, _ = at(node)
            here.args = (here.args[0], here.args[1] * 2)
            yield Change("change a scale", node.name, mutant)
        if node.target is share:
            mutant, here, _ = at(node)
            here.args = (*here.args[:2], here.args[2] * 2)
            yield Change("change a scale", node.name, mutant)
        backward = facts(node).phase == "backward"
        if node.target is aten.add.Tensor and backward and node.args[0] is not node.args[1]:
            for keep in (0, 1):
                mutant, here, _ = at(node)
                here.replace_all_uses_with(here.args[keep])
                yield Change("drop a term of a gradient", node.name, _renamed(mutant, here, here.args[keep]))
            mutant, here, _ = at(node)
            here.args = (here.args[0], here.args[0])
            yield Change("count a term twice", node.name, mutant)
        if node.target is aten.reshape.default and len(node.args[1]) > 1 and node.args[1][0] != node.args[1][1]:
            mutant, here, _ = at(node)
            first, second, *rest = here.args[1]
            here.args = (here.args[0], [second, first, *rest])
            yield Change("change a shape", node.name, mutant)
    for (name, stage), node in program.gradients.items():
        mutant, new = copied(program)
        rest = {key: n for key, n in mutant.gradients.items() if key != (name, stage)}
        yield Change("forget a gradient", name, replace(mutant, gradients=rest))
        twins = [
            k for k, n in program.gradients.items() if k != (name, stage) and _look(n) == _look(node) and k[1] == stage
        ]
        if twins:
            mutant, new = copied(program)
            other = dice.choice(twins)
            changed = {**mutant.gradients, (name, stage): new[program.gradients[other]]}
            yield Change(
                "another parameter's gradient", f"{name} gets {other[0]}'s", replace(mutant, gradients=changed)
            )
    tied = [key for key in program.gradients if sum(k[0] == key[0] for k in program.gradients) > 1]
    for name, stage in tied:
        mutant, new = copied(program)
        moved = {k: n for k, n in mutant.gradients.items() if k != (name, stage)}
        other = next(k[1] for k in tied if k[0] == name and k[1] != stage)
        moved[name, other] = mutant.gradients[name, stage]
        yield Change("a tied weight's gradient in another stage", name, replace(mutant, gradients=moved))


def _several(node: fx.Node) -> bool:
    return isinstance(facts(node).value, tuple)


def _renamed(program: DifferentiatedProgram, old: fx.Node, new: Any) -> DifferentiatedProgram:
    """Tables that name ``old`` name ``new``."""

    def swap(table: Mapping[Any, fx.Node]) -> dict[Any, fx.Node]:
        return {key: new if n is old else n for key, n in table.items()}

    return replace(
        program,
        values=swap(program.values),
        cotangents=swap(program.cotangents),
        gradients=swap(program.gradients),
        outputs=tuple(new if n is old else n for n in program.outputs),
    )


def _depends(node: Any, on: fx.Node) -> bool:
    seen, todo = set(), [node]
    while todo:
        here = todo.pop()
        if here is on:
            return True
        if here not in seen:
            seen.add(here)
            todo += here.all_input_nodes
    return False


def _early(operand: Any, node: fx.Node) -> bool:
    """Whether ``operand`` exists before ``node`` in the graph."""
    for here in node.graph.nodes:
        if here is operand:
            return True
        if here is node:
            return False
    return False


# -- ranks


def ranks(program: DistributedProgram, dice: Dice) -> Iterator[Change]:
    yield from _functions(program, dice)
    yield from _actions(program, dice)
    yield from _tables(program, dice)


def _functions(program: DistributedProgram, dice: Dice) -> Iterator[Change]:
    for stage in program.stages:
        for label, piece in stage.pieces.items():
            calls = [n for n in piece.module.graph.nodes if n.op == "call_method"]
            moves = [n for n in calls if not str(n.target).startswith("accumulate")]
            settled = [n for n in calls if str(n.target).startswith("accumulate")]
            for node in dice.sample(moves, min(4, len(moves))):
                if not _several(node) and value(node).shape == value(node.args[1]).shape:
                    yield _one_rank(program, stage, label, "drop a collective on one rank", node, _drop)
                    yield _one_rank(program, stage, label, "duplicate a collective on one rank", node, _again)
                if isinstance(node.args[2], str):
                    yield _one_rank(
                        program, stage, label, "regroup a collective on one rank", node, _other_axis(program)
                    )
            for a, b in itertools.pairwise(n for n in moves if isinstance(n.args[1], fx.Node)):  # not of lists
                if a.target == b.target and _look(a.args[1]) == _look(b.args[1]) and not _depends(b.args[1], a):
                    yield _one_rank(program, stage, label, "swap two collectives on one rank", a, _swap_with(b))
            for node in dice.sample(settled, min(3, len(settled))):
                yield _every_rank(program, stage, label, "skip an accumulation", node, _erase)
                yield _every_rank(program, stage, label, "accumulate twice", node, _repeat)
                others = [n for n in settled if n is not node and _same_parameter(program, stage, n, node)]
                if others:
                    chosen = dice.choice(others).args[-1]
                    yield _every_rank(program, stage, label, "accumulate elsewhere", node, _into(chosen))
            scales = [n for n in piece.module.graph.nodes if n.target in (torch.mul, torch.div) and len(n.args) == 2]
            for node in [n for n in scales if isinstance(n.args[1], (int, float))][:2]:
                yield _one_rank(program, stage, label, "change a scale on one rank", node, _double)
            twins = _twins(piece)
            if twins:
                a, b = dice.choice(twins)
                names = list(piece.dynamic)
                names[a], names[b] = names[b], names[a]
                changed = replace(stage, **{label: replace(piece, dynamic=tuple(names))})
                yield Change("swap two values", f"{names[a]} and {names[b]}", _with_stage(program, changed))


def _twins(piece: Piece) -> list[tuple[int, int]]:
    places = [n for n in piece.module.graph.nodes if n.op == "placeholder"][1 + len(piece.static) :]
    return [(i, j) for i in range(len(places)) for j in range(i) if _look(places[i]) == _look(places[j])]


def _same_parameter(program: DistributedProgram, stage: StageProgram, a: fx.Node, b: fx.Node) -> bool:
    first, second = (program.state[stage.gradients[str(n.args[-1])]] for n in (a, b))
    return (first.shape, first.sharding, first.dtype) == (second.shape, second.sharding, second.dtype)


def _with_stage(program: DistributedProgram, changed: StageProgram) -> Mutant:
    stages = tuple(changed if s.index == changed.index else s for s in program.stages)
    return as_mutant(program, stages=stages)


Edit = Callable[[fx.Node, Mapping[str, fx.Node]], None]


def _edited(stage: StageProgram, label: str, node: fx.Node, edit: Edit) -> StageProgram:
    piece, new = piece_copied(getattr(stage, label))
    edit(new[node.name], new)
    return replace(stage, **{label: rebuilt(piece)})


def _every_rank(
    program: DistributedProgram, stage: StageProgram, label: str, kind: str, node: fx.Node, edit: Edit
) -> Change:
    return Change(kind, f"{node.name} in stage {stage.index}", _with_stage(program, _edited(stage, label, node, edit)))


def _one_rank(
    program: DistributedProgram, stage: StageProgram, label: str, kind: str, node: fx.Node, edit: Edit
) -> Change:
    changed = _edited(stage, label, node, edit)
    rank = next(r for r in range(program.mesh.size) if any(s is stage for s in program.rank(r).stages))
    part = program.rank(rank)
    mine = replace(part, stages=tuple(changed if s is stage else s for s in part.stages))
    return Change(kind, f"{node.name} on rank {rank}", as_mutant(program, {rank: mine}))


def _drop(node: fx.Node, _: Mapping[str, fx.Node]) -> None:
    node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]
    node.graph.erase_node(node)


def _again(node: fx.Node, _: Mapping[str, fx.Node]) -> None:
    with node.graph.inserting_after(node):
        again = node.graph.node_copy(node)
        again.meta = dict(node.meta)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    again.args = (again.args[0], node, *again.args[2:])


def _other_axis(program: DistributedProgram) -> Edit:
    def edit(node: fx.Node, _: Mapping[str, fx.Node]) -> None:
        axis = next(name for name in program.mesh.names if name != node.args[2])
        node.args = (*node.args[:2], axis, *node.args[3:])

    return edit


def _swap_with(other: fx.Node) -> Edit:
    def edit(node: fx.Node, new: Mapping[str, fx.Node]) -> None:
        later = new[other.name]
        if _early(later.args[1], node):  # the later one first: as a rank that calls them in another order
            node.prepend(later)
        else:
            node.args, later.args = (*node.args[:-1], later.args[-1]), (*later.args[:-1], node.args[-1])

    return edit


def _erase(node: fx.Node, _: Mapping[str, fx.Node]) -> None:
    node.graph.erase_node(node)


def _repeat(node: fx.Node, _: Mapping[str, fx.Node]) -> None:
    with node.graph.inserting_after(node):
        node.graph.node_copy(node)


def _into(place: Any) -> Edit:
    def edit(node: fx.Node, _: Mapping[str, fx.Node]) -> None:
        node.args = (*node.args[:-1], place)

    return edit


def _double(node: fx.Node, _: Mapping[str, fx.Node]) -> None:
    node.args = (node.args[0], node.args[1] * 2)  # type: ignore[operator]


def _actions(program: DistributedProgram, dice: Dice) -> Iterator[Change]:
    schedule = program.schedule

    def changed(rank: int, row: list[Action]) -> Mutant:
        rows = [list(r) for r in schedule.actions]
        rows[rank] = row
        return as_mutant(program, schedule=replace(schedule, actions=tuple(map(tuple, rows))))

    for rank, row in enumerate(schedule.actions):
        transfers = [i for i, action in enumerate(row) if action.op in DIRECTION]
        for index in dice.sample(transfers, min(4, len(transfers))):
            action = row[index]
            others = [s for s in range(schedule.num_stages) if s not in (action.peer, action.stage)]
            if others:
                swapped = [*row[:index], replace(action, peer=dice.choice(others)), *row[index + 1 :]]
                yield Change("change a peer", str(action), changed(rank, swapped))
            yield Change("drop a transfer", str(action), changed(rank, [*row[:index], *row[index + 1 :]]))
            yield Change("duplicate a transfer", str(action), changed(rank, [*row[: index + 1], *row[index:]]))
            moved = replace(action, microbatch=(action.microbatch + 1) % schedule.num_microbatches)
            yield Change(
                "a transfer of another microbatch", str(action), changed(rank, [*row[:index], moved, *row[index + 1 :]])
            )
        for a, b in itertools.pairwise(transfers):
            if row[a].op == row[b].op:
                order = list(row)
                order[a], order[b] = order[b], order[a]
                yield Change("reorder two transfers", f"{row[a]} and {row[b]}", changed(rank, order))
    for microbatch in range(schedule.num_microbatches):
        rows = [tuple(a for a in row if a.microbatch != microbatch or a.op is Op.REDUCE) for row in schedule.actions]
        mutant = as_mutant(program, schedule=replace(schedule, actions=tuple(rows)))
        yield Change("skip a microbatch", str(microbatch), mutant)


def _tables(program: DistributedProgram, dice: Dice) -> Iterator[Change]:
    for name, spec in program.state.items():
        for index, kind in enumerate(spec.sharding):
            if kind in (R, I) and spec.trainable:
                kinds = list(spec.sharding)
                kinds[index] = I if kind is R else R
                label = "drop a gradient reduction" if kind is R else "reduce a gradient twice"
                state = {**program.state, name: replace(spec, sharding=tuple(kinds))}
                yield Change(label, f"{name} over {program.axes[index].name}", as_mutant(program, state=state))
        for which in ("accumulated", "resident"):
            if getattr(spec, which) != spec.sharding:
                state = {**program.state, name: replace(spec, **{which: spec.sharding})}
                yield Change(f"another {which} type", name, as_mutant(program, state=state))
        if len(spec.stages) > 1:
            state = {**program.state, name: replace(spec, stages=spec.stages[:1])}
            yield Change("a tied weight in one stage only", name, as_mutant(program, state=state))
    for name, (size, dtype) in program.values.items():
        if len(size) > 1:
            wrong = {**program.values, name: ((size[1], size[0], *size[2:]), dtype)}
            yield Change("change a transfer's shape", name, as_mutant(program, values=wrong))
        other = torch.float32 if dtype is torch.float64 else torch.float64
        yield Change(
            "change a transfer's dtype", name, as_mutant(program, values={**program.values, name: (size, other)})
        )
    for stage in program.stages:
        for name, cut in stage.slices.items():
            slices = {**stage.slices, name: replace(cut, parts=cut.parts + 1)}
            yield Change("slice the batch otherwise", name, _with_stage(program, replace(stage, slices=slices)))
    for transfer in program.transfers:
        for names in (transfer.forward, transfer.backward):
            same = [(a, b) for i, a in enumerate(names) for b in names[:i] if program.values[a] == program.values[b]]
            if names:
                fewer = tuple(n for n in names[1:])
                way = "forward" if names is transfer.forward else "backward"
                others = tuple(replace(t, **{way: fewer}) if t is transfer else t for t in program.transfers)
                yield Change("send a value too few", names[0], as_mutant(program, transfers=others))
            for a, b in same[:1]:
                order = tuple(b if n == a else a if n == b else n for n in names)
                way = "forward" if names is transfer.forward else "backward"
                others = tuple(replace(t, **{way: order}) if t is transfer else t for t in program.transfers)
                yield Change("send two values in another order", f"{a} and {b}", as_mutant(program, transfers=others))


# -- from a mutated level to a program that could run


def _schedule(mesh: Mesh, plan: Plan) -> Schedule:
    return SCHEDULES[plan.schedule](mesh["pp"], plan.microbatches, plan.virtual_stages)


def check(program: Any, mesh: Mesh, plan: Plan) -> DistributedProgram:
    """What compiling does from this level on: every check, then the program.

    Raises:
        CompileError: from whichever check notices.
    """
    if isinstance(program, LocalProgram):
        verify_invariants(program)
        check_types(program, RuleBook(RULES))
        check_padding(program, RuleBook(RULES))
        check_positions(program)
        program = Differentiate()(program)
    if isinstance(program, DifferentiatedProgram):
        verify_invariants(program)
        check_backward(program)
        program = GenerateRanks(mesh, _schedule(mesh, plan))(CoalesceCollectives()(program))
    assert isinstance(program, DistributedProgram)
    verify_invariants(program)
    others = program.others if isinstance(program, Mutant) else {}
    check_code(program, [s for part in others.values() for s in part.stages] or None)
    check_ranks(program, others)
    return program


def unchecked(program: Any, mesh: Mesh, plan: Plan) -> DistributedProgram:
    """The same without the checks."""
    if isinstance(program, LocalProgram):
        program = Differentiate()(program)
    if isinstance(program, DifferentiatedProgram):
        program = GenerateRanks(mesh, _schedule(mesh, plan))(CoalesceCollectives()(program))
    assert isinstance(program, DistributedProgram)
    return program
