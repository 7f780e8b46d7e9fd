"""Find the first wrong operator: compare every value of a step, joined from all ranks, with the unsplit program's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.torch import pytree
from ..core import slices
from ..core.annotations import Leaf, facts, is_getitem, leaf, needs_grad, origin, value
from ..core.rng import Key
from ..core.sharding import P, Shard, Sharding, gradient
from ..ir.distributed_program import DistributedProgram, StageProgram
from ..ir.program import DifferentiatedProgram, ShardedProgram, outputs
from ..ops.catalog import op_spec
from ..ops.rank_local import dropout, noise
from ..runtime.backends.local import LocalBackend
from ..runtime.execute.executor import Run
from ..runtime.execute.interpreter_trace import Observer
from .random_functions import whole_noise
from .reference import differs, largest, whole_mask

Value = tuple[fx.Node, int]


@dataclass(frozen=True)
class Culprit:
    """The first operator whose result differs from the unsplit program's while its inputs do not.

    Attributes:
        direction: forward or backward.
        operators: the operator, or those of the backward that may be wrong.
        where: the line of the user's code.
        runs: the strategy of its rule on each axis.
        error: relative to the largest element.
        split: whether an axis splits its inputs or results.
    """

    direction: str
    operators: tuple[str, ...]
    where: str
    runs: str
    error: float
    split: bool = True

    def __str__(self) -> str:
        operators = " or ".join(self.operators)
        lines = [f"the first wrong value is made by {operators}, in the {self.direction} (error {self.error:.1e})"]
        lines += [f"  at: {self.where}"] if self.where else []
        lines += [f"  it runs as {self.runs}"] if self.runs else []
        advice = (
            "so look at its sharding rule first"
            if self.split
            else "no axis splits it, so its sharding is not the cause"
        )
        return "\n".join([*lines, f"  {advice}"])


class _Collector:
    """Collects every value that a rank computes, by name and microbatch."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], Tensor] = {}

    def observer(self, stage: StageProgram, phase: str, microbatch: int) -> Observer:
        def observe(node: fx.Node, value: Any) -> None:
            if isinstance(value, Tensor) and not value.is_meta and node.op != "placeholder":  # and not in a file
                self.seen[node.name, microbatch] = value.detach().clone()

        return observe


def localize(
    program: DistributedProgram,
    backend: LocalBackend,
    batch: Any,
    run: Run,
    limit: float,
) -> Culprit | None:
    """Return the first wrong operator of one training step; None if every value that can be compared is right.

    None, too, if the model has derivatives of its own, which autograd does not follow one by one, or a step has several
    batches.
    """
    if program.batches > 1 or any(
        op_spec(node).user_derivative == "tangent" for node in program.source.local.staged.sharded.program.graph.nodes
    ):
        return None
    leaves = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    collectors = [_Collector() for _ in range(program.mesh.size)]
    buffers = swap_buffers(program, backend)
    backend.run(program, leaves, replace(run, train=True, check_finite=False), watch=collectors)
    swap_buffers(program, backend, buffers)
    of_ranks = _RankValues(program.source, program, collectors)
    sharded = program.source.local.staged.sharded
    values, cotangents = _unsplit(sharded, backend.tensors, leaves, run, backend.device)
    for key, expected in values.items():
        error = of_ranks.value_error(key, expected)
        if error > limit:
            return _culprit(sharded, "forward", [key[0]], error)
    floor = 1e-3 * largest(list(cotangents.values()))
    for key, expected in reversed(cotangents.items()):
        error = of_ranks.cotangent_error(key, expected, floor)
        if error > limit:
            return _culprit(sharded, "backward", _users(key) or [key[0]], error)
    return None


def swap_buffers(
    program: DistributedProgram, backend: LocalBackend, new: Mapping[str, Tensor] = MappingProxyType({})
) -> dict[str, Tensor]:
    """Set buffers that forward changes to ``new``, and return copies of all their values before."""
    old = {name: backend.tensors[name].clone() for name in program.captured.changed}
    for name, x in new.items():
        backend.tensors[name].copy_(x)
    return old


@dataclass(frozen=True)
class _RankValues:
    """The values that all ranks have computed, by the unsplit program's values."""

    after: DifferentiatedProgram
    program: DistributedProgram
    collectors: list[_Collector]

    def value_error(self, key: Value, expected: Tensor) -> float:
        """Return the error of a value; 0 if it cannot be compared."""
        local = self.after.local
        node = local.parts.get(key)
        computed = self.after.values.get(origin(node)) if node is not None else None
        if node is None or computed is None or computed.op == "placeholder" or node not in local.sharding:
            return 0.0
        return self._error(computed.name, local.sharding[node], expected)

    def cotangent_error(self, key: Value, expected: Tensor, floor: float) -> float:
        """Return the error of the gradient of a value; 0 if it cannot be compared."""
        local = self.after.local
        node = local.parts.get(key)
        if node is None or node not in local.sharding:
            return 0.0
        sharding = tuple(map(gradient, local.sharding[node]))
        source = leaf(node)
        if source is None:
            computed = self.after.cotangents.get(origin(node))
            return 0.0 if computed is None else self._error(computed.name, sharding, expected, floor)
        sharding = tuple(map(gradient, self.program.state[source.name].accumulated))
        terms = [term.name for (name, _), term in self.after.gradients.items() if name == source.name]
        return self._error(terms[0], sharding, expected, floor) if len(terms) == 1 else 0.0

    def _error(self, name: str, sharding: Sharding, expected: Tensor, floor: float = 0.0) -> float:
        """Return the largest error of a value: between ranks that hold the same part, or of the whole."""
        axes = self.program.axes
        split = [isinstance(kind, Shard) or kind is P for kind in sharding]
        parts: dict[tuple[int, ...], Tensor] = {}
        worst = 0.0
        for index, x in self._values_of(name):
            key = tuple(i if cut else 0 for i, cut in zip(index, split, strict=True))
            if key in parts:  # ranks that should hold the same
                worst = max(worst, differs(x, parts[key], floor))
            parts.setdefault(key, x)
        if len(parts) != math.prod(axis.size for axis, cut in zip(axes, split, strict=True) if cut):
            return worst
        whole = slices.assemble(parts, sharding, [axis.size for axis in axes], expected.shape)
        return max(worst, differs(whole, expected, floor))

    def _values_of(self, name: str) -> Iterator[tuple[list[int], Tensor]]:
        """Yield a value of each rank and microbatch, with its index on each axis."""
        for rank, collector in enumerate(self.collectors):
            coordinate = self.program.mesh.coordinate(rank)
            for microbatch in range(self.program.schedule.num_microbatches):
                x = collector.seen.get((name, microbatch))
                if x is not None:
                    axes = self.program.axes
                    yield [microbatch if axis.role == "time" else coordinate.get(axis.name, 0) for axis in axes], x


def _users(key: Value) -> list[fx.Node]:
    """Return the operators whose backward contributes to the gradient of a value."""
    node, index = key
    direct = [u for u in node.users if u.op == "call_function" and not is_getitem(u)]
    picked = [w for u in node.users if is_getitem(u) and u.args[1] == index for w in u.users]
    return [u for u in (*direct, *picked) if u.op == "call_function" and needs_grad(u)]


def _culprit(sharded: ShardedProgram, direction: str, nodes: list[fx.Node], error: float) -> Culprit:
    names = tuple(dict.fromkeys(str(node.target) for node in nodes))
    runs = "; ".join(
        f"{axis.name}: {s.signature} ({s.label})"
        for axis, s in zip(sharded.axes, sharded.strategies[nodes[0]], strict=True)
    )
    return Culprit(direction, names, str(facts(nodes[0]).where), runs, error, _splits(sharded, nodes))


def _splits(sharded: ShardedProgram, nodes: list[fx.Node]) -> bool:
    """Return whether an axis splits an input or result of these operators."""
    kinds = {kind for node in nodes for s in sharded.strategies[node] for kind in (*s.inputs, *s.outputs)}
    return any(isinstance(kind, Shard) or kind is P for kind in kinds)


def _unsplit(
    sharded: ShardedProgram, tensors: Mapping[str, Tensor], batch: list[Tensor], run: Run, device: torch.device
) -> tuple[dict[Value, Tensor], dict[Value, Tensor]]:
    """Return every value of the program on one device, in order, and the gradient of each, by autograd."""
    graph = sharded.program.graph
    env: dict[fx.Node, Any] = {}
    values: dict[Value, Tensor] = {}
    inputs = iter(batch)
    with torch.enable_grad():
        for node in graph.nodes:
            if node.op == "output":
                continue
            source = leaf(node) if node.op == "placeholder" else None
            if source is not None:
                x = next(inputs) if source.kind == "input" else tensors[source.name].detach()
                env[node] = _leaf_value(node, source, x, device)
            else:
                env[node] = _run_node(node, env, run)
            if not is_getitem(node):
                values |= _tensors_of(node, env[node])
        for x in values.values():
            if x.requires_grad and not x.is_leaf:
                x.retain_grad()
        env[outputs(graph)[0]].backward()
    cotangents = {key: x.grad for key, x in values.items() if x.requires_grad and x.grad is not None}
    return {key: x.detach() for key, x in values.items() if leaf(key[0]) is None}, cotangents


def _tensors_of(node: fx.Node, result: Any) -> dict[Value, Tensor]:
    """Return the tensors among the results of an operator."""
    results = result if isinstance(result, (tuple, list)) else [result]
    return {(node, i): x for i, x in enumerate(results) if isinstance(x, Tensor)}


def _leaf_value(node: fx.Node, source: Leaf, x: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a leaf's value in the dtype that operators read."""
    copy = x.to(device, value(node).dtype, copy=True)
    return copy.requires_grad_(source.trainable) if source.trainable else copy


def _run_node(node: fx.Node, env: Mapping[fx.Node, Any], run: Run) -> Any:
    """Run an operator on whole values. Random numbers are those of the step."""
    arguments: Any = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    args, kwargs = arguments
    target: Any = node.target
    draw = _DRAWN.get(target)
    return target(*args, **kwargs) if draw is None else draw(run, *args, **kwargs)


def _dropped(run: Run, x: Tensor, p: float, *, op: int) -> Tensor:
    mask = whole_mask(x, p, Key(run.seed, run.step, op))
    return x * mask * (0.0 if p == 1 else 1 / (1 - p))


def _noise(run: Run, size: Sequence[int], kind: str, op: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return whole_noise(kind, size, Key(run.seed, run.step, op), dtype, device)


_DRAWN: Mapping[Any, Callable[..., Tensor]] = {dropout: _dropped, noise: _noise}
