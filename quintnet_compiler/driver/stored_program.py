"""A compiled program as text, and back: plain data and the source of its functions, without the graphs that they were
made from. Those are made again by compiling, for reports that read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ..core.errors import CompileError
from ..cost_models.operators import model_flops
from ..ir.distributed_program import DistributedProgram, Piece, StageProgram
from ..ir.generated import GeneratedModule, StoredModule
from ..ir.program import Captured, DifferentiatedProgram
from .plain_data import restored, to_plain_data, types_of

_GIVEN = ("captured", "made_from", "stages", "key", "end")  # fields that are no plain data
_PIECES = ("once", "forward", "backward", "weight")

Compile = Callable[[], DistributedProgram]


def program_data(program: DistributedProgram) -> dict[str, Any]:
    """Return ``program`` as plain data for JSON."""
    kinds = types_of(DistributedProgram)
    fields = {name: to_plain_data(getattr(program, name), kind) for name, kind in kinds.items() if name not in _GIVEN}
    flops = program.flops
    if flops is None:
        flops = model_flops(program.source.local.staged.sharded.program.graph)
    stages = [_stage_data(stage) for stage in program.stages]
    end = None if program.end is None else _piece_data(program.end)
    return {**fields, "flops": flops, "stages": stages, "end": end, "digest": program.digest}


def read_program(data: Mapping[str, Any], captured: Captured, key: str, compile: Compile) -> DistributedProgram:
    """Return the program of ``data``.

    ``captured``: what it was compiled from; ``compile``: compiles it again.

    Raises:
        ValueError: if it is of another form, or not the program whose digest it has.
    """
    again, kinds = _CompiledAgain(compile, str(data["digest"])), types_of(DistributedProgram)
    fields = {name: restored(data[name], kind) for name, kind in kinds.items() if name not in _GIVEN}
    stages = tuple(_stage(position, stage, again) for position, stage in enumerate(data["stages"]))
    end = None if data["end"] is None else _piece("the end of a step", data["end"], again.end_module)
    program = DistributedProgram(
        captured=captured, stages=stages, made_from=lambda: again.source, key=key, end=end, **fields
    )
    if program.digest != data["digest"]:
        raise ValueError("it is not the program that was written")
    return program


@dataclass(frozen=True)
class _CompiledAgain:
    """The same program, compiled when somebody asks for its graphs."""

    compile: Compile
    digest: str

    @cached_property
    def program(self) -> DistributedProgram:
        fresh = self.compile()
        if fresh.digest != self.digest:
            raise CompileError(
                "QN209",
                "the program that was read from the cache is another one than the compiler makes now",
                fix="remove the folder given as cache=, and start again",
            )
        return fresh

    @property
    def source(self) -> DifferentiatedProgram:
        return self.program.source

    def module(self, stage: int, name: str) -> GeneratedModule:
        return self.program.stages[stage].pieces[name].module

    def end_module(self) -> GeneratedModule:
        assert self.program.end is not None
        return self.program.end.module


def _stage_data(stage: StageProgram) -> dict[str, Any]:
    kinds = types_of(StageProgram)
    fields = {name: to_plain_data(getattr(stage, name), kind) for name, kind in kinds.items() if name not in _PIECES}
    return {**fields, "pieces": {name: _piece_data(piece) for name, piece in stage.pieces.items()}}


def _piece_data(piece: Piece) -> dict[str, Any]:
    return {"code": piece.code, "static": piece.static, "dynamic": piece.dynamic, "outputs": piece.outputs}


def _stage(position: int, data: Mapping[str, Any], again: _CompiledAgain) -> StageProgram:
    kinds = types_of(StageProgram)
    fields = {name: restored(data[name], kind) for name, kind in kinds.items() if name not in _PIECES}
    pieces = {
        name: _piece(f"{name} of stage {position}", piece, partial(again.module, position, name))
        for name, piece in data["pieces"].items()
    }
    return StageProgram(**{**fields, **pieces})


def _piece(name: str, data: Mapping[str, Any], compile: Callable[[], GeneratedModule]) -> Piece:
    module = StoredModule(str(data["code"]), name, compile)
    names = (restored(data[key], tuple[str, ...]) for key in ("static", "dynamic", "outputs"))
    return Piece(module, *names)
