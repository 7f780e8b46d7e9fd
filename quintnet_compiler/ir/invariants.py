"""Invariants of every program type, checked after every pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any

from torch import Tensor, fx

from ..core.annotations import facts, is_getitem, origin, shape, tensor_inputs, value, values
from ..core.errors import REPORT, CompileError
from ..core.precision import narrows
from ..core.sharding import P, Shard, local_shape
from ..ops.catalog import op_spec
from .codegen_allowlist import check_source
from .distributed_program import DistributedProgram
from .program import DifferentiatedProgram, LocalProgram, Program, ShardedProgram, StagedProgram


def _require(holds: bool, message: Callable[[], str], node: fx.Node | None = None) -> None:
    if not holds:
        where = facts(node).where if node is not None and node.op != "output" else None
        raise CompileError("QN209", message(), where=where, fix=REPORT)


@singledispatch
def verify_invariants(program: Any) -> None:
    """Check a program's invariants.

    Raises:
        CompileError: QN209, with the node that breaks one; QN701 for generated code that is not of the known form.
    """


@verify_invariants.register
def _(program: Program) -> None:
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        _require(node.op in ("placeholder", "call_function"), lambda: f"{node.op} node {node}", node)  # noqa: B023
        _require(all(v.device.type != "meta" for v in values(node)), lambda: f"{node} has no device", node)  # noqa: B023


@verify_invariants.register
def _(program: ShardedProgram) -> None:
    """Check that parts and units of shardings divide shapes, and that only linear strategies read partial values."""
    for node, strategies in program.strategies.items():
        if node.op == "output" or is_getitem(node):
            continue
        _require(len(strategies) == len(program.axes), lambda: f"{node} lacks a strategy", node)  # noqa: B023
        for index, whole in enumerate(values(node)):
            local = tuple(whole.shape)
            for axis, kind in zip(program.axes, program.produced(node, index), strict=True):
                if isinstance(kind, Shard):
                    fits = local[kind.dim] % (kind.parts * kind.unit) == 0
                    _require(fits, lambda: f"{node} of {local} cannot be {kind} over {axis}", node)  # noqa: B023
                local = local_shape(local, (kind,), (axis.size,))
        for strategy in strategies:
            if P in strategy.inputs and op_spec(node).user_derivative != "declaration":
                makes = strategy.outputs if strategy.inside is None else strategy.inside[1:]
                _require(P in makes, lambda: f"{node} loses a partial sum", node)  # noqa: B023


@verify_invariants.register
def _(program: StagedProgram) -> None:
    for node, stage in program.stage.items():
        _require(0 <= stage < program.num_stages, lambda: f"{node} in stage {stage}", node)  # noqa: B023
        for source in tensor_inputs(node):
            earlier = program.stage.get(source, 0)
            _require(earlier <= stage, lambda: f"{node} in stage {stage} reads stage {earlier}", node)  # noqa: B023


@verify_invariants.register
def _(program: LocalProgram) -> None:
    """Check that local shapes are those of the shardings, and that conversions change the type."""
    sharded = program.staged.sharded
    for node in program.graph.nodes:
        if node.op == "call_function" and op_spec(node).converts:
            _require(node.args[3] != node.args[4], lambda: f"{node} converts nothing", node)  # noqa: B023
        stage = program.stage.get(node)
        for source in tensor_inputs(node) if stage is not None else ():
            _require(program.stage.get(source, 0) <= stage, lambda: f"{node} reads a later stage", node)  # type: ignore[operator]  # noqa: B023
    for whole, node in zip(
        sharded.program.graph.output_node().args[0],  # type: ignore[arg-type]
        program.graph.output_node().args[0],  # type: ignore[arg-type]
        strict=True,
    ):
        assert isinstance(whole, fx.Node) and isinstance(node, fx.Node)
        source, index = origin(whole)
        expected = local_shape(values(source)[index].shape, program.sharding[node], sharded.axis_sizes)
        _require(shape(node) == expected, lambda: f"the output {whole} has the wrong shape", node)  # noqa: B023


@verify_invariants.register
def _(program: DifferentiatedProgram) -> None:
    """Check gradients, that no typed conversion remains, and that caches are written where they are stored.

    Each gradient has the local shape of its parameter (of the gathered one, if the gradient is scattered later), and a
    dtype that its sum can hold.
    """
    local = program.local
    sizes = {facts(n).leaf.name: n for n in local.graph.nodes if n.op == "placeholder" and facts(n).leaf}  # type: ignore[union-attr]
    sizes |= {facts(n).leaf.name: whole for whole, n in local.deferred.items()}  # type: ignore[union-attr]
    for (name, _), node in program.gradients.items():
        parameter = sizes[name]
        held = facts(local.deferred.get(parameter, parameter))
        assert isinstance(held.value, Tensor)
        summed = local.staged.sharded.program.precision.accumulated(held.value.dtype)
        fits = shape(node) == shape(parameter) and not narrows(value(node).dtype, summed)
        mismatch = f"{shape(node)} {value(node).dtype}, not {shape(parameter)} {summed}"
        _require(fits, lambda: f"the gradient of {name} is {mismatch}", node)  # noqa: B023
    for node in program.graph.nodes:
        _require(not op_spec(node).converts, lambda: f"{node} is not lowered", node)  # noqa: B023
        for cache in (node.args[position] for position in op_spec(node).caches):
            _require(_is_cache(cache), lambda: f"{node} writes to {cache}, which nobody keeps", node)  # noqa: B023


def _is_cache(node: Any) -> bool:
    """Return whether a node is a rank's cache, or a microbatch's rows of it, and only one operator writes to it."""
    if op_spec(node).cuts_microbatch:
        return len(node.users) == 1 and node.args[2:] == (0, 1) and _is_cache(node.args[0])
    cache = facts(node).leaf
    return cache is not None and cache.kind == "cache" and len(node.users) == 1


@verify_invariants.register
def _(program: DistributedProgram) -> None:
    """Check that every stage has each value that it reads, and that its code is of the generated form.

    A value comes from the stage itself, from state, or from a transfer.
    """
    for code in {p.module.code for stage in program.stages for p in stage.pieces.values()}:
        check_source(code)
    for stage in program.stages:
        whole = {*stage.state, *stage.inputs, *stage.once.outputs}
        received = {n for t in program.transfers if t.target == stage.index for n in t.forward}
        returned = {n for t in program.transfers if t.source == stage.index for n in t.backward}
        forward_values = received | set(stage.slices) | set(stage.carried)
        backward_values = forward_values | set(stage.forward.outputs) | returned
        weight_values = backward_values | set(stage.backward.outputs)
        available = {"forward": forward_values, "backward": backward_values, "weight": weight_values}
        for label, values_of_microbatch in available.items():
            if label not in stage.pieces:
                continue
            piece = stage.pieces[label]
            for name in piece.static:
                _require(name in whole, lambda: f"stage {stage.index} lacks {name}")  # noqa: B023
            for name in piece.dynamic:
                _require(name in values_of_microbatch, lambda: f"stage {stage.index} lacks {name}")  # noqa: B023
