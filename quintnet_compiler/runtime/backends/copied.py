"""The values of one program's parameters, for another program of the same ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ...core.errors import CheckpointError, RunError
from ...ir.distributed_program import DistributedProgram, StateSpec
from ..state.reshard import held, moved_parts, reshard
from .backend import Backend, refuse_unset
from .processes import ProcessBackend


@dataclass(frozen=True)
class ProgramTensors:
    """What a program computes with, where it is kept, and the module that has it."""

    program: DistributedProgram
    backend: Backend
    model: nn.Module

    @property
    def parameters(self) -> dict[str, StateSpec]:
        return {name: spec for name, spec in self.program.state.items() if spec.kind == "parameter"}


def copied(target: ProgramTensors, source: ProgramTensors) -> int:
    """Give ``target`` the values of ``source``; the bytes that this rank received.

    Raises:
        CheckpointError: QN602, RunError: QN301 or QN604, see :meth:`ProgramGeneration.copy_parameters`.
    """
    _refuse_others(target, source)
    refuse_unset(source.backend.unset, source.program)
    device = target.backend.device if isinstance(target.backend, ProcessBackend) else None
    if (device is not None) != isinstance(source.backend, ProcessBackend):
        raise RunError(
            "QN301",
            "one of the programs has a process for each rank, and the other has all ranks in one",
            fix="give both meshes as many ranks as there are processes",
        )
    mine, theirs = ({spec.name: x for spec, x, _ in one.backend.parts(one.program)} for one in (target, source))
    received = 0
    with torch.no_grad():
        if device is None:
            for name in target.parameters:
                mine[name].copy_(theirs[name])
        else:
            for dtype in sorted({spec.dtype for spec in target.parameters.values()}, key=str):
                names = sorted(name for name, spec in target.parameters.items() if spec.dtype == dtype)
                parts = (
                    part
                    for name in names
                    for part in moved_parts(name, held(source.program, name), held(target.program, name))
                )
                received += reshard(parts, theirs, mine, torch.empty(0, dtype=dtype, device=device))
        buffers = dict(source.model.named_buffers())
        for name, buffer in target.model.named_buffers():
            if name in buffers and not buffers[name].is_meta:
                buffer.copy_(buffers[name])
    target.backend.unset -= target.parameters.keys()
    return received


def _refuse_others(target: ProgramTensors, source: ProgramTensors) -> None:
    ours, theirs = (
        {name: (tuple(spec.shape), str(spec.dtype)) for name, spec in one.parameters.items()}
        for one in (target, source)
    )
    odd = [
        f"{name} is {theirs.get(name, 'missing')} there, and {ours.get(name, 'missing')} here"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if odd:
        more = f", and {len(odd) - 8} more" if len(odd) > 8 else ""
        raise CheckpointError(
            "QN602",
            f"the other program has other parameters: {'; '.join(odd[:8])}{more}",
            fix="compile a copy of the same module",
        )
