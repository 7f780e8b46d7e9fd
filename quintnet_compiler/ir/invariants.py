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
from ..ops.attention.paged import paged_attention
from ..ops.collectives import convert
from ..ops.derivatives.user_derivatives import declare_gradient
from ..ops.rank_local import microbatch
from .codegen_allowlist import check_source
from .distributed_program import DistributedProgram
from .program import DifferentiatedProgram, LocalProgram, Program, ShardedProgram, StagedProgram


def _require(holds: bool, what: Callable[[], str], node: fx.Node | None = None) -> None:
    if not holds:
        where = facts(node).where if node is not None and node.op != "output" else None
        raise CompileError("QN209", what(), where=where, fix=REPORT)


@singledispatch
def verify(program: Any) -> None:
    """Check a program's invariants.

    Raises:
        CompileError: QN209, with the node that breaks one; QN701 for generated code that is not of the known form.
    """


@verify.register
def _(program: Program) -> None:
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        _require(node.op in ("placeholder", "call_function"), lambda: f"{node.op} node {node}", node)  # noqa: B023
        _require(all(v.device.type != "meta" for v in values(node)), lambda: f"{node} has no device", node)  # noqa: B023


@verify.register
def _(program: ShardedProgram) -> None:
    """Parts and units of shardings divide every shape; the only partial inputs are those of strategies that are linear
    in them."""
    for node, strategies in program.strategies.items():
        if node.op == "output" or is_getitem(node):
            continue
        _require(len(strategies) == len(program.axes), lambda: f"{node} lacks a strategy", node)  # noqa: B023
        for index, whole in enumerate(values(node)):
            left = tuple(whole.shape)
            for axis, kind in zip(program.axes, program.produced(node, index), strict=True):
                if isinstance(kind, Shard):
                    fits = left[kind.dim] % (kind.parts * kind.unit) == 0
                    _require(fits, lambda: f"{node} of {left} cannot be {kind} over {axis}", node)  # noqa: B023
                left = local_shape(left, (kind,), (axis.size,))
        for strategy in strategies:
            if P in strategy.inputs and node.target is not declare_gradient:
                makes = strategy.outputs if strategy.inside is None else strategy.inside[1:]
                _require(P in makes, lambda: f"{node} loses a partial sum", node)  # noqa: B023


@verify.register
def _(program: StagedProgram) -> None:
    for node, stage in program.stage.items():
        _require(0 <= stage < program.num_stages, lambda: f"{node} in stage {stage}", node)  # noqa: B023
        for source in tensor_inputs(node):
            before = program.stage.get(source, 0)
            _require(before <= stage, lambda: f"{node} in stage {stage} reads stage {before}", node)  # noqa: B023


@verify.register
def _(program: LocalProgram) -> None:
    """Local shapes are those of the shardings; conversions name what they convert."""
    sharded = program.staged.sharded
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is convert:
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
        expected = local_shape(values(source)[index].shape, program.sharding[node], sharded.ranks)
        _require(shape(node) == expected, lambda: f"the output {whole} has the wrong shape", node)  # noqa: B023


@verify.register
def _(program: DifferentiatedProgram) -> None:
    """Each gradient has the local shape of its parameter (of what it is gathered to, if the gradient is scattered
    later) and a dtype that its sum can hold, nothing typed is left, and caches are written where they are kept."""
    local = program.local
    sizes = {facts(n).leaf.name: n for n in local.graph.nodes if n.op == "placeholder" and facts(n).leaf}  # type: ignore[union-attr]
    sizes |= {facts(n).leaf.name: whole for whole, n in local.deferred.items()}  # type: ignore[union-attr]
    for (name, _), node in program.gradients.items():
        parameter = sizes[name]
        held = facts(local.deferred.get(parameter, parameter))
        assert isinstance(held.value, Tensor)
        summed = local.staged.sharded.program.precision.accumulated(held.value.dtype)
        fits = shape(node) == shape(parameter) and not narrows(value(node).dtype, summed)
        told = f"{shape(node)} {value(node).dtype}, not {shape(parameter)} {summed}"
        _require(fits, lambda: f"the gradient of {name} is {told}", node)  # noqa: B023
    for node in program.graph.nodes:
        _require(node.target is not convert, lambda: f"{node} is not lowered", node)  # noqa: B023
        for given in node.args[3:5] if node.target is paged_attention else ():
            _require(_is_cache(given), lambda: f"{node} writes to {given}, which nobody keeps", node)  # noqa: B023


def _is_cache(node: Any) -> bool:
    """Whether this is what a rank keeps, or a microbatch's rows in it, and one operator alone writes there."""
    if node.target is microbatch:
        return len(node.users) == 1 and node.args[2:] == (0, 1) and _is_cache(node.args[0])
    found = facts(node).leaf
    return found is not None and found.kind == "cache" and len(node.users) == 1


@verify.register
def _(program: DistributedProgram) -> None:
    """Every stage gets each value it reads from itself, from state, or from a transfer; code is what we generate."""
    for code in {p.module.code for stage in program.stages for p in stage.pieces.values()}:
        check_source(code)
    for stage in program.stages:
        whole = {*stage.state, *stage.inputs, *stage.once.outputs}
        came = {n for t in program.transfers if t.target == stage.index for n in t.forward}
        returned = {n for t in program.transfers if t.source == stage.index for n in t.backward}
        fresh = came | set(stage.slices) | set(stage.carried)
        kept = fresh | set(stage.forward.outputs)
        behind = kept | returned | set(stage.backward.outputs)
        for label, known in (("forward", fresh), ("backward", kept | returned), ("weight", behind)):
            if label not in stage.pieces:
                continue
            piece = stage.pieces[label]
            for name in piece.static:
                _require(name in whole, lambda: f"stage {stage.index} lacks {name}")  # noqa: B023
            for name in piece.dynamic:
                _require(name in known, lambda: f"stage {stage.index} lacks {name}")  # noqa: B023
