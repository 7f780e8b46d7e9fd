"""Durations of a compiled program: its ranks' functions, priced node by node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ..core.annotations import num_bytes, tensor_inputs, values
from ..core.precision import widened
from ..cost_models.operators import leaving_runs, ring_steps
from ..ir.cost_protocol import RankCosts, way_seconds
from ..ir.distributed_program import DistributedProgram, StageProgram
from ..ir.expectations import ExpertLoad
from ..ops.catalog import collective_of, op_spec, priced_as
from ..ops.collectives import (
    COLLECTIVES,
    STARTS,
    CollectiveSpec,
    combine,
    dispatch_plan,
    return_runs,
    send_runs,
)
from ..ops.copies import WAYS
from ..ops.experts.grouped_rows import grouped_bias_grad, grouped_weight_grad
from ..runtime.state.buckets import Bucket
from ..runtime.state.gradients import GradientStore, shared_by
from ..runtime.transport.local import LocalTransport, LocalWorld
from ..schedules.schedule import RELEASES, Action, Op
from .piece_parts import ACCUMULATE, NodeTime, PieceParts, starts_collective
from .work import ActionWork, GradientSum, StepEndCollective, WorkPart

# labels of the functions that each action runs
_PIECES = MappingProxyType(
    {
        Op.FORWARD: ("forward",),
        Op.BACKWARD: ("backward", "weight"),
        Op.BACKWARD_INPUT: ("backward",),
        Op.BACKWARD_WEIGHT: ("weight",),
    }
)


class ProgramPrices:
    """The :class:`.work.Durations` of a program, for the ranks at coordinate 0 of all axes but the pipeline's.

    Raises:
        CompileError: QN210 if an operator or a collective has no price.
    """

    def __init__(self, program: DistributedProgram, costs: RankCosts) -> None:
        self.program, self.costs = program, costs
        self.overlaps, self.cores = costs.overlaps, costs.cores
        self.source = {node.name: node for node in program.source.graph.nodes}
        self.loads = expert_loads(program)
        self.ranks = [program.mesh.rank({"pp": place}) for place in range(program.mesh["pp"])]
        self.places = [costs.at(program.mesh, place) for place in range(program.mesh["pp"])]
        self.stages = {stage.index: stage for stage in program.stages}
        self._works: dict[tuple[int, Op], ActionWork] = {}
        self._nodes: dict[tuple[int, str], list[NodeTime]] = {}
        self._sums: dict[int, tuple[GradientSum, ...]] = {}

    # -- functions

    def begin(self, place: int) -> ActionWork:
        """Return what the rank at a pipeline place does before its first action."""
        stages = [stage for stage in self.program.stages if self.program.schedule.placement[stage.index] == place]
        parts = tuple(part for stage in stages for part in self.piece(stage, "once"))
        return ActionWork(parts, sum(self._host(stage, "once") for stage in stages))

    def work(self, action: Action) -> ActionWork:
        """Return a compute action."""
        key = action.stage, action.op
        if key not in self._works:
            stage = self.stages[action.stage]
            parts = [part for name in _PIECES[action.op] for part in self.piece(stage, name)]
            work = ActionWork((WorkPart(self.costs.action_seconds), *parts))
            lost = self._lost(work, self._at(stage)) if work.hidden else 0.0
            parts = [*work.parts, *([WorkPart(lost)] if lost else [])]
            self._works[key] = ActionWork(tuple(parts), sum(self._host(stage, name) for name in _PIECES[action.op]))
        return self._works[key]

    def _host(self, stage: StageProgram, name: str) -> float:
        return sum(time.host for time in self.node_times(stage, name)) if name in stage.pieces else 0.0

    def _at(self, stage: StageProgram) -> RankCosts:
        """Return the prices of the ranks that run a stage."""
        return self.places[self.program.schedule.placement[stage.index]]

    def _lost(self, work: ActionWork, costs: RankCosts) -> float:
        """Return the seconds that computing loses to concurrent collectives; copies take no multiprocessors."""
        hidden: dict[str, float] = defaultdict(float)
        for whole, waited in zip(work.parts, work.waited, strict=True):
            if whole.axis in self.program.mesh.names:
                hidden[whole.axis] += whole.seconds - waited.seconds
        return sum(costs.lost_seconds(seconds, self._peers(axis)) for axis, seconds in hidden.items() if seconds > 0)

    def _peers(self, axis: str) -> tuple[int, ...]:
        return self.program.mesh.peers(self.ranks[0], [axis])

    def piece(self, stage: StageProgram, name: str, ends: dict[fx.Node, int] | None = None) -> list[WorkPart]:
        """Return the parts of one function: computing and what it waits for, in turn.

        There are none if the stage has no function of the name. ``ends`` receives, for each node that adds up a
        gradient, how many parts are over after it.
        """
        if name not in stage.pieces:
            return []
        parts = PieceParts(self.overlaps, ends)
        for time in self.node_times(stage, name):
            parts.add_node(time)
        return parts.take_parts()

    def node_times(self, stage: StageProgram, name: str) -> list[NodeTime]:
        """Return the price of each node of a function that the stage has."""
        key = stage.index, name
        if key not in self._nodes:
            calls = [
                node for node in stage.pieces[name].module.graph.nodes if node.op in ("call_function", "call_method")
            ]
            self._nodes[key] = [self._priced(stage, node) for node in calls]
        return self._nodes[key]

    def _priced(self, stage: StageProgram, node: fx.Node) -> NodeTime:
        time = self._balanced(stage, node)
        start = node.all_input_nodes[-1] if op_spec(node).waits else node
        load = self.loads.get(self.source[start.name]) if start.name in self.source else None
        if load is None:
            return time
        factor = load.sent if collective_of(str(start.target)) in _EXPERT_EXCHANGES else load.computed
        return replace(time, compute=factor * time.compute, communication=factor * time.communication)

    def _balanced(self, stage: StageProgram, node: fx.Node) -> NodeTime:
        """Return the price of a node where ranks of experts have equally many rows."""
        name, source, costs = str(node.target), self.source.get(node.name), self._at(stage)
        if node.op == "call_function":
            assert source is not None
            return NodeTime(node, costs.node_seconds(source), host=costs.host_seconds(source))
        if name in ACCUMULATE:
            return NodeTime(node, self._accumulate(stage, node), host=costs.host_seconds(None))
        if name == "wait":  # started before, by the host too
            return replace(self._collective(node.all_input_nodes[-1], costs), node=node, begun=node.all_input_nodes[-1])
        time = NodeTime(node, 0.0) if starts_collective(node) else self._collective(node, costs)
        return replace(time, host=self._launch_seconds(node, source, costs))

    def _launch_seconds(self, node: fx.Node, source: fx.Node | None, costs: RankCosts) -> float:
        """Return the seconds of the host for a method of the rank's communication.

        That is a message, with the kernels of one that computes, or an operator that depends on the rank's coordinate.
        """
        if str(node.target) in WAYS:
            return costs.host_seconds(None)
        spec = collective_of(str(node.target))
        messages = costs.host_seconds(None) if spec is not None else 0.0
        computes = spec is None or spec.price in ("ring", "matmul")
        return messages + (costs.host_seconds(source) if computes and source is not None else 0.0)

    def _collective(self, node: fx.Node, costs: RankCosts) -> NodeTime:
        """Return the price of a collective, a copy, or an operator that depends on the rank's coordinate."""
        spec = collective_of(str(node.target))
        source = self.source[node.name]
        if str(node.target) in WAYS:
            way = WAYS[str(node.target)]
            return NodeTime(node, 0.0, way_seconds(costs, way, num_bytes(values(source)[0])), way)
        if spec is None:
            return NodeTime(node, costs.node_seconds(source))
        axis = str(node.args[2])
        ranks = self._peers(axis)
        if spec.price == "ring":
            return self._ring(node, source, axis, ranks, costs)
        if spec.price == "matmul":
            return self._fused(node, source, axis, ranks, costs)
        whole = whole_bytes(source, spec, len(ranks))
        return NodeTime(node, 0.0, costs.group_seconds(spec.price, whole, ranks), axis)

    def _ring(self, node: fx.Node, source: fx.Node, axis: str, ranks: tuple[int, ...], costs: RankCosts) -> NodeTime:
        """Return the price of ring attention.

        Keys and values travel while the previous blocks are computed, as long as any rank attends to them; gradients
        travel with them in 32 bits, and back to their owner.
        """

        def send(moved: float) -> float:
            return costs.send_seconds(moved, ranks[0], ranks[-1])

        computing = costs.node_seconds(source)
        backward = str(node.target) == "ring_attention_backward"
        operands = [values(x)[0] for x in tensor_inputs(source)[: 5 if backward else 3]]
        keys = operands[1 + backward : 3 + backward]
        steps = ring_steps(source)
        travelling = (steps - 1) * send(sum(map(num_bytes, keys)))
        if backward and steps > 1:
            wide = sum(x.numel() * widened(x.dtype).itemsize for x in keys)
            travelling += steps * send(wide)
        if not self.overlaps:
            return NodeTime(node, computing, travelling, axis)
        lost = costs.lost_seconds(min(travelling, computing), ranks)
        return NodeTime(node, computing + lost, max(0.0, travelling - computing - lost), axis)

    def _fused(self, node: fx.Node, source: fx.Node, axis: str, ranks: tuple[int, ...], costs: RankCosts) -> NodeTime:
        """Return the price of a product that is overlapped with its collective.

        Each slice but one travels while another is multiplied; the longer of the two decides. Sums are added up on
        their way.
        """
        gathers, hops = op_spec(node).slice_at == "input", len(ranks) - 1
        moved = num_bytes(values(tensor_inputs(source)[0] if gathers else source)[0])
        hop = costs.send_seconds(moved, ranks[0], ranks[-1])
        computing = costs.node_seconds(source)
        hidden = computing / len(ranks) if self.overlaps else 0.0
        adding = 0.0 if gathers else hops * costs.accumulate_seconds(moved)
        return NodeTime(node, computing + adding, hops * max(0.0, hop - hidden), axis)

    def _accumulate(self, stage: StageProgram, node: fx.Node) -> float:
        value = str(node.args[-1])
        name = stage.gradients[value]
        gradient = self.program.source.gradients[name, stage.index]
        if op_spec(node).accumulates == "product":
            return self._at(stage).node_seconds(gradient)
        return self._at(stage).accumulate_seconds(num_bytes(values(gradient)[0]))

    # -- between ranks

    def transfer(self, send: Action) -> float:
        """Return the time on the wire of what a send action sends."""
        forward = send.op is Op.SEND_FORWARD
        ends = (send.stage, send.peer) if forward else (send.peer, send.stage)
        names = next((t.forward if forward else t.backward) for t in self.program.transfers
                     if (t.source, t.target) == ends)  # fmt: skip
        placement = self.program.schedule.placement
        source, target = self.ranks[placement[send.stage]], self.ranks[placement[send.peer]]
        costs = self.places[placement[send.peer]]
        return sum(costs.send_seconds(_bytes(self.program.values[name]), source, target) for name in names)

    def sums(self, place: int) -> tuple[GradientSum, ...]:
        """Return the gradient sums of the rank at a pipeline place, in the order in which they start."""
        if place not in self._sums:
            self._sums[place] = tuple(self._gradient_sums(place))
        return self._sums[place]

    def _gradient_sums(self, place: int) -> list[GradientSum]:
        if not any(stage.gradients for stage in self.program.stages):
            return []
        part = self.program.rank(self.ranks[place])
        transport = LocalTransport(LocalWorld(self.program.mesh), part.rank)
        store = GradientStore(self.program, part, transport, torch.device("meta"))
        ready: dict[int, dict[int, float]] = {id(bucket): {} for bucket in store.buckets}
        for stage in part.stages:
            for name, seconds in self._seconds_before_end(stage).items():
                ready[id(store.where[name])].setdefault(stage.index, seconds)
        sums: list[GradientSum] = []
        for bucket in store.buckets:
            if terms := ready[id(bucket)]:
                sums += self._bucket_sums(part.rank, self.places[place], bucket, terms)
        actions = self.program.schedule.actions[place]
        order = {action.stage: index for index, action in enumerate(actions) if action.op in RELEASES}
        return sorted(sums, key=lambda term: max((order.get(s, 0), -seconds) for s, seconds in term.ready.items()))

    def _seconds_before_end(self, stage: StageProgram) -> dict[str, float]:
        """Return for each parameter how long before the end of a backward the stage has its gradient.

        The halves of the last backward are taken to follow each other: results of the first may exist earlier.
        """
        seconds: dict[str, float] = {}
        remaining = 0.0
        for label in reversed(_PIECES[Op.BACKWARD]):
            ends: dict[fx.Node, int] = {}
            work = ActionWork(tuple(self.piece(stage, label, ends)))
            waited, device = work.waited, max(work.seconds, 1e-12)
            slowdown = max(1.0, self._host(stage, label) / device)  # the host launches kernels all along
            after = list(accumulate((slowdown * part.seconds for part in reversed(waited)), initial=remaining))
            for node, end in reversed(ends.items()):
                seconds.setdefault(stage.gradients[str(node.args[-1])], after[len(waited) - end])
            remaining = after[-1]
        return seconds

    def _bucket_sums(
        self, rank: int, costs: RankCosts, bucket: Bucket, ready: Mapping[int, float]
    ) -> Iterator[GradientSum]:
        """Yield what happens to a bucket of gradients: its sum over ranks, and its copy to the host."""
        seconds = 0.0
        for kind, axes, moved in (
            ("reduce_scatter", bucket.scattered, bucket.buffer),
            ("all_reduce", bucket.summed, bucket.own),
        ):
            ranks = self.program.mesh.peers(rank, axes)
            seconds += costs.group_seconds(kind, num_bytes(moved), ranks) if len(ranks) > 1 else 0.0
        if seconds:
            yield GradientSum(bucket.label, (*bucket.scattered, *bucket.summed), seconds, ready)
        if bucket.host is not None:
            yield GradientSum(bucket.label, (WAYS["copy_out"],), costs.copy_seconds(num_bytes(bucket.own)), ready)

    def meetings(self) -> tuple[StepEndCollective, ...]:
        """Return what ranks do together after all actions, in order."""
        return self._shared + self._results

    @cached_property
    def _shared(self) -> tuple[StepEndCollective, ...]:
        sums = []
        trained = {name for stage in self.program.stages for name in stage.gradients.values()}
        for name, spec in sorted(self.program.state.items()):
            ranks = shared_by(spec, self.program, self.ranks[0]) if name in trained else ()
            if ranks:
                places = tuple(self.program.mesh.coordinate(rank)["pp"] for rank in ranks)
                gradient = next(node for (p, _), node in self.program.source.gradients.items() if p == name)
                seconds = self.places[0].group_seconds("all_reduce", num_bytes(values(gradient)[0]), ranks)
                sums.append(StepEndCollective(f"gradient of {name} over its stages", places, seconds))
        return tuple(sums)

    @cached_property
    def _results(self) -> tuple[StepEndCollective, ...]:
        mesh = self.program.mesh
        everyone = tuple(range(mesh.size))
        collectives = []
        for spec in self.program.results:
            if len(ranks := mesh.peers(self.ranks[0], axes := spec.summed(self.program.axes))) > 1:
                seconds = self.places[0].group_seconds("all_reduce", _bytes((spec.shape, spec.dtype)), ranks)
                collectives.append(StepEndCollective(spec.path, tuple(range(mesh["pp"])), seconds, axes[0]))
            if spec.shape == ():
                if mesh.size > 1:
                    seconds = self.places[0].group_seconds("all_reduce", 16, everyone)
                    collectives.append(StepEndCollective("the loss, over all ranks", (), seconds, "all", everyone=True))
            elif mesh["pp"] > 1:
                moved = _bytes((spec.shape, spec.dtype))
                seconds = self.places[0].group_seconds("broadcast", moved, tuple(self.ranks))
                collectives.append(StepEndCollective(spec.path, tuple(range(mesh["pp"])), seconds))
        return tuple(collectives)

    @cached_property
    def lockstep(self) -> tuple[str, ...]:
        """Return the axes along which ranks meet within the functions of every stage."""
        stage_axes: list[set[str]] = []
        for stage in self.program.stages:
            calls = [n for piece in stage.pieces.values() for n in piece.module.graph.nodes
                     if n.op == "call_method" and collective_of(str(n.target))]  # fmt: skip
            stage_axes.append({str(node.args[2]) for node in calls})
        return tuple(name for name in self.program.mesh.names if any(name in axes for axes in stage_axes))


# operators whose results have no rows of experts any more
_ENDS = frozenset({combine, STARTS[combine], grouped_weight_grad, grouped_bias_grad})


_EXPERT_EXCHANGES = (COLLECTIVES["dispatch"], COLLECTIVES["combine"])


def expert_loads(program: DistributedProgram) -> dict[fx.Node, ExpertLoad]:
    """Return the load of the busiest rank for each node whose time depends on the rows that a rank's experts get."""
    rows, loads = dict[fx.Node, ExpertLoad](), dict[fx.Node, ExpertLoad]()
    for node in program.source.graph.nodes:
        load = next((rows[n] for n in node.all_input_nodes if n in rows), None)
        if op_spec(node).routing == "dispatch":
            *_, experts, _, hot = _planned(node).args
            load = ExpertLoad.expected(program.expect, len(hot), experts)  # type: ignore[arg-type]
        if load is not None and load != ExpertLoad():
            loads[node] = load
            if priced_as(node) not in _ENDS:
                rows[node] = load
    return loads


def _planned(node: fx.Node) -> fx.Node:
    """Return the dispatch plan of a dispatch; its order may have been offloaded and copied back."""
    while op_spec(node).routing != "plan":
        node = node.all_input_nodes[-2] if op_spec(node).routing == "dispatch" else node.all_input_nodes[0]
    return node


def whole_bytes(source: fx.Node, spec: CollectiveSpec, ranks: int) -> int:
    """Return the bytes of a collective's values, as all ranks of its axis have them together."""
    if spec.price == "all_gather":
        return sum(map(num_bytes, values(source)))
    moved = sum(num_bytes(values(x)[0]) for x in _moved(source))
    if spec.op in (send_runs, return_runs):
        return round(moved * leaving_runs(source))
    if spec.op is dispatch_plan:
        moved = num_bytes(values(source)[1]) // 2  # how many rows go to each rank
    return moved * ranks if spec.price == "all_to_all" else moved


def _moved(source: fx.Node) -> Sequence[fx.Node]:
    """Return the first argument of a collective: a value, or several."""
    first: Any = source.args[0]
    return first if isinstance(first, (list, tuple)) else [first]


def _bytes(value: tuple[tuple[int, ...], torch.dtype]) -> int:
    shape, dtype = value
    return torch.Size(shape).numel() * dtype.itemsize
