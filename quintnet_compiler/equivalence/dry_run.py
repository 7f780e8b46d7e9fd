"""Run all ranks' programs on shapes, by the interpreter that trains.

Every collective must meet the same one on the other ranks, every message its receiver, and no rank may wait forever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from ..core.annotations import has_facts, values
from ..core.errors import REPORT, CompileError, RunError
from ..core.sharding import Sharding
from ..core.slices import take_all
from ..ir.distributed_program import DistributedProgram, Piece, RankProgram, StageProgram
from ..ops.catalog import collective_of, op_spec
from ..ops.copies import WAYS
from ..runtime.execute.comm import Comm
from ..runtime.execute.executor import Executor, Run
from ..runtime.state.gradients import GradientStore
from ..runtime.transport.local import LocalTransport, LocalWorld

META = torch.device("meta")


def check_ranks(program: DistributedProgram, ranks: Mapping[int, RankProgram] | None = None) -> None:
    """Run all ranks on shapes. ``ranks``: other programs for some of them.

    Ranks with the same functions and actions meet their peers by construction: then one rank of each stage stands for
    all.

    Raises:
        CompileError: QN209 with the two ranks, the operators and the places in the model that do not fit.
    """
    changed = ranks or {}
    first = {axis: 0 for axis in program.mesh.names if axis != "pp"}
    of_stages = {program.mesh.rank({**first, "pp": index}) for index in range(program.mesh["pp"])}
    present = sorted(of_stages) if not changed else range(program.mesh.size)
    parts = {rank: changed.get(rank) or program.rank(rank) for rank in present}
    skeletons: dict[int, StageProgram] = {}
    world = LocalWorld(program.mesh, program.sites)
    try:
        with torch.no_grad():
            world.run_ranks({rank: _DryRank(program, part, skeletons).run_rank for rank, part in parts.items()})
    except RunError as error:
        raise CompileError("QN209", f"ranks do not fit: {error.message}", fix=REPORT) from error
    except (KeyError, IndexError, RuntimeError) as error:
        message = f"a rank cannot run: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        raise CompileError("QN209", message, fix=REPORT) from error


class _DryRank:
    """A rank whose functions only communicate."""

    def __init__(self, program: DistributedProgram, part: RankProgram, skeletons: dict[int, StageProgram]) -> None:
        self.program = program
        for stage in part.stages:
            if id(stage) not in skeletons:
                skeletons[id(stage)] = _skeleton(stage)
        self.part = replace(part, stages=tuple(skeletons[id(stage)] for stage in part.stages))

    def run_rank(self, transport: LocalTransport) -> None:
        program, part = self.program, self.part
        train = any(stage.gradients for stage in program.stages)
        store = _ShapeStore(program, part, transport, META) if train else None
        state = {s.name: self._empty(s.shape, s.dtype, s.sharding) for s in program.state.values()}
        inputs = [self._empty(s.shape, s.dtype, s.sharding) for s in program.inputs]
        Executor(program, part, transport, META, store).step(state, inputs, Run(train=train, check_finite=False))

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, sharding: Sharding) -> Tensor:
        axes = self.program.axes
        places = [self.part.coordinate.get(axis.name, 0) for axis in axes]
        return take_all(torch.empty(shape, dtype=dtype, device=META), sharding, [axis.size for axis in axes], places)


def _skeleton(stage: StageProgram) -> StageProgram:
    changed: dict[str, Any] = {
        name: replace(piece, module=cast(Any, _Skeleton(piece))) for name, piece in stage.pieces.items()
    }
    return replace(stage, **changed)


class _ShapeStore(GradientStore):
    """A gradient store of shapes.

    The first two terms of a gradient are added as in training; further terms of the same shapes are only counted.
    """

    def begin(self, scale: float | Tensor | None = None) -> None:
        super().begin(scale)
        self.added = Counter[Hashable]()

    def accumulate(self, gradient: Tensor, value: str) -> None:
        if self._new(value, gradient):
            super().accumulate(gradient, value)

    def accumulate_matmul(self, left: Tensor, right: Tensor, value: str) -> None:
        if self._new(value, left, right):
            super().accumulate_matmul(left, right, value)

    def _new(self, value: str, *terms: Tensor) -> bool:
        key = value, *((x.shape, x.dtype) for x in terms)
        self.added[key] += 1
        if self.added[key] <= 2:
            return True
        self._count(self.where[self.names[value]])
        return False


class _Skeleton:
    """A stand-in for a generated function that communicates shapes and returns shapes, those of its own graph.

    If no other rank took part in its first call, further calls only compare their arguments and accumulate gradients.
    """

    def __init__(self, piece: Piece) -> None:
        self.nodes = [n for n in piece.module.graph.nodes if _matters(n)]
        self.inputs = [n for n in piece.module.graph.nodes if n.op == "placeholder"]
        self.shapes = {n: _shape(n) for n in piece.module.graph.nodes if has_facts(n)}
        self.alone = False

    def forward(self, args: list[Any]) -> tuple[Any, ...]:
        """Run the function, and return shapes of its results."""
        comm, *inputs = args
        args.clear()
        for node, x in zip(self.inputs[1:], inputs, strict=True):
            if tuple(x.shape) != tuple(self.shapes[node].shape) or x.dtype != self.shapes[node].dtype:
                raise RuntimeError(f"{node.name} is {tuple(x.shape)} {x.dtype} where {self.shapes[node]} is expected")
        met = comm.transport.met
        results = self._communicate(comm, [n for n in self.nodes if not self.alone or _repeats(n)])
        self.alone = self.alone or comm.transport.met == met
        return results

    def _communicate(self, comm: Comm, nodes: Sequence[fx.Node]) -> tuple[Any, ...]:
        """Make the calls of ``nodes``, and return the results of the function."""
        pending: dict[fx.Node, Any] = {}
        for node in nodes:
            if node.op == "output":
                if pending:
                    raise RuntimeError(f"{next(iter(pending)).name} is never waited for")
                return tuple(self.shapes[n] for n in node.args[0])  # type: ignore[union-attr]
            if op_spec(node).waits and node.args[1] not in pending:
                raise RuntimeError(f"{node.name} waits for {node.args[1]}, which is not under way")
            _, *call_args = fx.map_arg(node.args, lambda n: pending.pop(n) if n in pending else self.shapes.get(n))
            result = getattr(comm, str(node.target))(*call_args)
            if str(node.target).startswith("start_"):
                pending[node] = result
                continue
            for x, wanted in zip(_as_tuple(result), _as_tuple(self.shapes.get(node)), strict=False):
                if tuple(x.shape) != tuple(wanted.shape) or x.dtype != wanted.dtype:
                    raise RuntimeError(f"{node.name} gives {tuple(x.shape)} {x.dtype}, and {wanted} is expected")
        raise AssertionError("a generated function returns")


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else () if result is None else (result,)


def _matters(node: fx.Node) -> bool:
    method = str(node.target) if node.op == "call_method" else ""
    return _repeats(node) or collective_of(method) is not None or method in WAYS or method == "wait"


def _repeats(node: fx.Node) -> bool:
    """Return whether a node has an effect in every call of the function."""
    return node.op == "output" or (node.op == "call_method" and str(node.target).startswith("accumulate"))


def _shape(node: fx.Node) -> Any:
    tensors = [torch.empty(v.shape, dtype=v.dtype, device=META) if v is not None else None for v in values(node)]
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
