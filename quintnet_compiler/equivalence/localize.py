"""Which operator is wrong? Every value of a step, put together from all ranks, beside the unsplit program's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.torch import pytree
from ..core import slices
from ..core.annotations import facts, is_getitem, leaf, needs_grad, origin, value
from ..core.rng import Key
from ..core.sharding import P, Shard, Sharding, gradient
from ..ir.distributed_program import DistributedProgram, StageProgram
from ..ir.program import DifferentiatedProgram, ShardedProgram, outputs
from ..ops.derivatives.user_derivatives import with_tangent
from ..ops.rank_local import dropout, noise
from ..runtime.backends.local import LocalBackend
from ..runtime.execute.executor import Run
from ..runtime.execute.interpreter_trace import Observer
from .random_functions import whole_noise
from .reference import differs, largest, whole_mask

Value = tuple[fx.Node, int]


@dataclass(frozen=True)
class Culprit:
    """The first operator whose result differs from the unsplit program's while what goes into it does not.

    ``runs``: how it runs on each axis, by which rule's strategy. ``error``: relative to the largest element. ``split``:
    whether an axis splits anything of it.
    """

    direction: str
    operators: tuple[str, ...]
    where: str
    runs: str
    error: float
    split: bool = True

    def __str__(self) -> str:
        many = " or ".join(self.operators)
        lines = [f"the first wrong value is made by {many}, in the {self.direction} (error {self.error:.1e})"]
        lines += [f"  at: {self.where}"] if self.where else []
        lines += [f"  it runs as {self.runs}"] if self.runs else []
        first = (
            "so look at its sharding rule first"
            if self.split
            else "no axis splits it, so its sharding is not the cause"
        )
        return "\n".join([*lines, f"  {first}"])


class _Collector:
    """Keeps every value that a rank computes, by microbatch and name."""

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
    how: Run,
    limit: float,
) -> Culprit | None:
    """The first wrong operator of one training step; None if every value that can be compared is right, or the model
    has derivatives of its own (no autograd beside the program follows those one by one), or a step has several batches.
    """
    if program.batches > 1 or any(
        node.target is with_tangent for node in program.source.local.staged.sharded.program.graph.nodes
    ):
        return None
    leaves = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    collectors = [_Collector() for _ in range(program.mesh.size)]
    before = swap_buffers(program, backend)
    backend.run(program, leaves, replace(how, train=True, check_finite=False), watch=collectors)
    swap_buffers(program, backend, before)
    found = _Found(program.source, program, collectors)
    sharded = program.source.local.staged.sharded
    values, cotangents = _unsplit(sharded, backend.tensors, leaves, how, backend.device)
    for key, expected in values.items():
        error = found.value(key, expected)
        if error > limit:
            return _culprit(sharded, "forward", [key[0]], error)
    floor = 1e-3 * largest(list(cotangents.values()))
    for key, expected in reversed(cotangents.items()):
        error = found.cotangent(key, expected, floor)
        if error > limit:
            return _culprit(sharded, "backward", _users(key) or [key[0]], error)
    return None


def swap_buffers(
    program: DistributedProgram, backend: LocalBackend, new: Mapping[str, Tensor] = MappingProxyType({})
) -> dict[str, Tensor]:
    """Copies of the buffers that forward changes; from now on they have the values ``new``."""
    found = {name: backend.tensors[name].clone() for name in program.captured.changed}
    for name, x in new.items():
        backend.tensors[name].copy_(x)
    return found


@dataclass(frozen=True)
class _Found:
    """What all ranks made of the values of the unsplit program."""

    after: DifferentiatedProgram
    program: DistributedProgram
    collectors: list[_Collector]

    def value(self, key: Value, expected: Tensor) -> float:
        """How wrong a value is; 0 where it cannot be compared."""
        local = self.after.local
        node = local.parts.get(key)
        made = self.after.values.get(origin(node)) if node is not None else None
        if node is None or made is None or made.op == "placeholder" or node not in local.sharding:
            return 0.0
        return self._error(made.name, local.sharding[node], expected)

    def cotangent(self, key: Value, expected: Tensor, floor: float) -> float:
        """How wrong the gradient of a value is; 0 where it cannot be compared."""
        local = self.after.local
        node = local.parts.get(key)
        if node is None or node not in local.sharding:
            return 0.0
        kinds = tuple(map(gradient, local.sharding[node]))
        found = leaf(node)
        if found is None:
            made = self.after.cotangents.get(origin(node))
            return 0.0 if made is None else self._error(made.name, kinds, expected, floor)
        kinds = tuple(map(gradient, self.program.state[found.name].accumulated))
        terms = [made.name for (name, _), made in self.after.gradients.items() if name == found.name]
        return self._error(terms[0], kinds, expected, floor) if len(terms) == 1 else 0.0

    def _error(self, name: str, kinds: Sharding, expected: Tensor, floor: float = 0.0) -> float:
        axes = self.program.axes
        split = [isinstance(kind, Shard) or kind is P for kind in kinds]
        parts: dict[tuple[int, ...], Tensor] = {}
        worst = 0.0
        for rank, collector in enumerate(self.collectors):
            place = self.program.mesh.coordinate(rank)
            for microbatch in range(self.program.schedule.num_microbatches):
                x = collector.seen.get((name, microbatch))
                if x is None:
                    continue
                here = [microbatch if axis.role == "time" else place.get(axis.name, 0) for axis in axes]
                key = tuple(index if cut else 0 for index, cut in zip(here, split, strict=True))
                if key in parts:  # ranks that should hold the same
                    worst = max(worst, differs(x, parts[key], floor))
                parts.setdefault(key, x)
        if len(parts) != math.prod(axis.size for axis, cut in zip(axes, split, strict=True) if cut):
            return worst
        return max(
            worst, differs(slices.assemble(parts, kinds, [axis.size for axis in axes], expected.shape), expected, floor)
        )


def _users(key: Value) -> list[fx.Node]:
    """The operators that take part in the gradient of a value."""
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
    """Whether an axis gives a rank less than the whole of what goes into one of these operators, or comes out."""
    kinds = {kind for node in nodes for s in sharded.strategies[node] for kind in (*s.inputs, *s.outputs)}
    return any(isinstance(kind, Shard) or kind is P for kind in kinds)


def _unsplit(
    sharded: ShardedProgram, tensors: Mapping[str, Tensor], batch: list[Tensor], how: Run, device: torch.device
) -> tuple[dict[Value, Tensor], dict[Value, Tensor]]:
    """Every value of the program on one device, in order, and the gradient of each, by autograd."""
    graph = sharded.program.graph
    env: dict[fx.Node, Any] = {}
    values: dict[Value, Tensor] = {}
    inputs = iter(batch)
    with torch.enable_grad():
        for node in graph.nodes:
            if node.op == "output":
                continue
            found = leaf(node) if node.op == "placeholder" else None
            if found is not None:
                given = next(inputs) if found.kind == "input" else tensors[found.name].detach()
                x = given.to(device, value(node).dtype, copy=True)
                env[node] = x.requires_grad_(found.trainable) if found.trainable else x
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                if node.target is dropout:
                    mask = whole_mask(args[0], args[1], Key(how.seed, how.step, kwargs["op"]))
                    env[node] = args[0] * mask * (0.0 if args[1] == 1 else 1 / (1 - args[1]))
                elif node.target is noise:
                    key = Key(how.seed, how.step, args[2])
                    env[node] = whole_noise(args[1], args[0], key, kwargs["dtype"], kwargs["device"])
                else:
                    env[node] = node.target(*args, **kwargs)
            if not is_getitem(node):
                made = env[node] if isinstance(env[node], (tuple, list)) else [env[node]]
                values |= {(node, i): x for i, x in enumerate(made) if isinstance(x, Tensor)}
        for x in values.values():
            if x.requires_grad and not x.is_leaf:
                x.retain_grad()
        env[outputs(graph)[0]].backward()
    cotangents = {key: x.grad for key, x in values.items() if x.requires_grad and x.grad is not None}
    return {key: x.detach() for key, x in values.items() if leaf(key[0]) is None}, cotangents
