"""DifferentiatedProgram -> DifferentiatedProgram: saved values wait for their backward in host memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor, fx

from ...compat.torch import OpOverload
from ...core.annotations import Facts, annotate, facts, leaf, num_bytes, origin, value, viewed
from ...ir.program import DifferentiatedProgram
from ...ir.repeated_blocks import block_of
from ...ops.catalog import op_spec, spec_of
from ...ops.copies import BACK, copy_out, write_out
from ...passes.autodiff.recompute_budget import Leaves

MIN_OFFLOAD_BYTES = 1024  # starting a copy of fewer costs more than their memory is worth (as in torchtune)
HOST = torch.device("cpu")
Key = tuple[int, fx.Node]  # a stage, and the value that owns the memory


@dataclass(frozen=True)
class OffloadActivations:
    """Copy saved values to the host after the forward, and back before the backward reads them.

    After Rhu et al. 2016, vDNN; or to files, by ``write_out`` and ``read_in`` (Rajbhandari et al. 2021, ZeRO-Infinity).

    Before: %h = linear(%x, %w);  %y = gelu(%h);  ...;  %g = gelu_backward(%gy, %h)
    After:  %h = linear(%x, %w);  %y = gelu(%h);  %o = copy_out(%h);  ...
            %i = copy_in(%o);  %g = gelu_backward(%gy, %i)
    Ensures: the same values. Of a value that is copied nothing stays on the device: its views are views of the copy
    again. Leaves, values that are computed once a step, results and parts of the batch stay where they are; so do
    values of less than a kilobyte, and those that are read before they could be there and back. A value comes back
    once, before its first reader.

    ``seconds``: of a node, also of a copy. ``alone``: the stages in which the backward of a microbatch directly follows
    its forward; in others there is enough time between the two. ``disk``: values wait in files.
    """

    seconds: Callable[[fx.Node], float]
    alone: frozenset[int] = frozenset()
    disk: bool = False

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        """Return the program in which values that pay leave the device."""
        memory = _Memory(program)
        moved = {key for key in _saved(program, memory) if self._pays(program, memory, key)}
        return _Rewriting(program, memory, moved, self.out).run() if moved else program

    @property
    def out(self) -> OpOverload:
        """Return the operator that copies a value to the host or a file."""
        return write_out if self.disk else copy_out

    def away(self, program: DifferentiatedProgram) -> Leaves:
        """Return a predicate: would a value be on the host if a stage saved it?

        ``program``: before recomputing. True means on the host whatever is recomputed: the backward of a block may then
        read any of its values first.
        """
        memory = _Memory(program)
        block_starts: dict[tuple[int, Hashable], int] = {}
        for place, node in enumerate(memory.nodes):
            if node.op == "call_function" and facts(node).phase == "backward" and node in program.stage:
                block_starts.setdefault((program.stage[node], block_of(node)), place)
        results = {memory.root(program.stage[n], n) for n in program.outputs if n in program.stage}
        decisions: dict[Key, bool] = {}

        def _leaves(key: Key) -> bool:
            stage, root = key
            if root in results or not _is_saved(program, root) or num_bytes(value(root)) < MIN_OFFLOAD_BYTES:
                return False
            if stage not in self.alone:
                return True
            blocks = {(stage, block_of(user)) for user in root.users if program.stage.get(user) == stage}
            first = [block_starts[block] for block in blocks if block in block_starts]
            memory.first[key] = min([*first, memory.first.get(key, len(memory.nodes))])
            return self._pays(program, memory, key)

        def away(stage: int, node: fx.Node) -> bool:
            key = stage, memory.root(stage, node)
            if key not in decisions:
                decisions[key] = _leaves(key)
            return decisions[key]

        return away

    def _pays(self, program: DifferentiatedProgram, memory: _Memory, key: Key) -> bool:
        stage, root = key
        if num_bytes(value(root)) < MIN_OFFLOAD_BYTES:
            return False
        if stage not in self.alone:
            return True
        out, back = (self.seconds(_copy(root, target)) for target in (self.out, BACK[self.out]))
        return memory.between(key, self.seconds) >= out + back


@dataclass
class _Memory:
    """The memory of each stage's values, and its ``last`` reader in the forward, its ``first`` in the backward."""

    program: DifferentiatedProgram
    own: dict[fx.Node, fx.Node] = field(default_factory=dict)
    last: dict[Key, int] = field(default_factory=dict)
    first: dict[Key, int] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)
    clocks: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = list(self.program.graph.nodes)
        for place, node in enumerate(self.nodes):
            stage = self.program.stage.get(node)
            if stage is None:
                continue
            whole = viewed(node)
            self.own[node] = node if whole is None else self.root(stage, whole)
            for source in node.all_input_nodes:
                key = stage, self.root(stage, source)
                if facts(node).phase == "backward":
                    self.first.setdefault(key, place)
                else:
                    self.last[key] = place

    def root(self, stage: int, node: fx.Node) -> fx.Node:
        """Return the value that owns a value's memory on a stage; values from other stages own theirs."""
        return self.own[node] if self.program.stage.get(node) == stage else node

    def behind(self, key: Key) -> fx.Node:
        """Return the last node of the forward that makes or reads a value."""
        return self.nodes[self.last[key]] if key in self.last else key[1]

    def between(self, key: Key, seconds: Callable[[fx.Node], float]) -> float:
        """Return the seconds that a stage computes between a value's last forward reader and first backward reader."""
        stage = key[0]
        if stage not in self.clocks:
            times = (seconds(n) if self._runs(n, stage) else 0.0 for n in self.nodes)
            self.clocks[stage] = list(accumulate(times, initial=0.0))
        clock, end = self.clocks[stage], self.first[key]
        start = self.last.get(key, self.nodes.index(key[1]))
        return clock[end] - clock[start + 1]

    def _runs(self, node: fx.Node, stage: int) -> bool:
        return node.op == "call_function" and self.program.stage.get(node) == stage and node not in self.program.once


def _saved(program: DifferentiatedProgram, memory: _Memory) -> list[Key]:
    """Return the values that only stages hold from their forward to their backward."""
    results = {memory.root(program.stage[n], n) for n in program.outputs if n in program.stage}
    return [key for key in memory.first if _is_saved(program, key[1]) and key[1] not in results]


def _is_saved(program: DifferentiatedProgram, root: fx.Node) -> bool:
    if root.op != "call_function" or leaf(root) is not None or root in program.once or root not in program.stage:
        return False
    if facts(root).phase != "forward" or op_spec(root).cuts_microbatch or spec_of(origin(root)[0].target).save:
        return False
    return isinstance(facts(root).value, Tensor) and _dense(value(root))


def _dense(x: Tensor) -> bool:
    """Return whether a value fills its memory, in any order of dims."""
    strides = sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
    filled = 1
    for stride, size in strides:
        if stride != filled:
            return False
        filled *= size
    return x.numel() > 0


def _copy(root: fx.Node, target: object) -> fx.Node:
    """Return a node that copies a value, to ask for its price."""
    graph = fx.Graph()
    return annotate(graph.create_node("call_function", target, (graph.placeholder("x"),)), facts(root))  # type: ignore[arg-type]


@dataclass
class _Rewriting:
    """A copy of a program in which the values ``moved`` leave the device; ``there``: those that came back."""

    program: DifferentiatedProgram
    memory: _Memory
    moved: set[Key]
    out: OpOverload
    graph: fx.Graph = field(default_factory=fx.Graph)
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    there: dict[Key, fx.Node] = field(default_factory=dict)
    outside: dict[Key, fx.Node] = field(default_factory=dict)
    stage: dict[fx.Node, int] = field(default_factory=dict)

    def run(self) -> DifferentiatedProgram:
        leaving: dict[fx.Node, list[Key]] = defaultdict(list)
        for key in self.memory.first:
            if key in self.moved:
                leaving[self.memory.behind(key)].append(key)
        for node in self.program.graph.nodes:
            stage = self.program.stage.get(node)
            if stage is not None and facts(node).phase == "backward":
                for source in node.all_input_nodes:
                    self._return(stage, source)
            self._emit(node, stage)
            for key in leaving[node]:
                self._leave(key)
        self.graph.lint()
        program = self.program.moved(self.graph, self.new, self.stage)
        copies = {copy: self.new[node] for (_, node), copy in self.there.items() if copy.target is not BACK[self.out]}
        return replace(program, copies={**program.copies, **copies})

    def _emit(self, node: fx.Node, stage: int | None) -> None:
        back = stage is not None and facts(node).phase == "backward"
        self.new[node] = self.graph.node_copy(
            node, lambda n: self.there.get((stage, n), self.new[n]) if back and stage is not None else self.new[n]
        )
        if stage is not None:
            self.stage[self.new[node]] = stage

    def _leave(self, key: Key) -> None:
        root = key[1]
        x = value(root)
        with self.program.local.mode:
            host = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=HOST)
        self.outside[key] = self._put(key, self.out, (self.new[root],), "out", replace(facts(root), value=host))

    def _return(self, stage: int, node: fx.Node) -> None:
        """Bring ``node`` back for the backward of a stage, if its memory has left the device."""
        root = self.memory.root(stage, node)
        if (stage, root) not in self.moved or (stage, node) in self.there or facts(node).phase == "backward":
            return
        new_facts = replace(facts(node), phase="backward")
        if node is root:
            args = self.outside[stage, root], torch.device(value(root).device.type)
            self.there[stage, node] = self._put((stage, node), BACK[self.out], args, "in", new_facts)
            return
        for source in node.all_input_nodes:  # a view
            self._return(stage, source)
        view = self.graph.node_copy(node, lambda n: self.there.get((stage, n), self.new.get(n)))
        self.there[stage, node], self.stage[annotate(view, new_facts)] = view, stage

    def _put(self, key: Key, target: object, args: tuple[object, ...], suffix: str, new_facts: Facts) -> fx.Node:

        copy = self.graph.create_node("call_function", target, args, name=f"{key[1].name}_{suffix}")  # type: ignore[arg-type]
        self.stage[annotate(copy, new_facts)] = key[0]
        return copy
