"""The values of one program's parameters, for another program of the same ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...core.errors import CheckpointError, RunError
from ...ir.distributed_program import DistributedProgram, StateSpec
from ..state.reshard import held, moved_parts, reshard
from ..transport.narrow import is_narrow
from .backend import Backend, refuse_unset
from .processes import ProcessBackend


@dataclass(frozen=True)
class ProgramTensors:
    """The tensors that a program computes with, their backend, and their module."""

    program: DistributedProgram
    backend: Backend
    model: nn.Module

    @property
    def parameters(self) -> dict[str, StateSpec]:
        """Return the module's parameters; those of a loss are not among them."""
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {n: spec for n, spec in self.program.state.items() if spec.kind == "parameter" and n in names}


def copy_values(target: ProgramTensors, source: ProgramTensors) -> int:
    """Give ``target`` the values of ``source``, rounded to its dtypes, and return the bytes that this rank received.

    Raises:
        CheckpointError: QN602, RunError: QN301 or QN604, see :meth:`ProgramGeneration.copy_parameters`.
    """
    source_specs = source.parameters
    _refuse_others(target.parameters, source_specs)
    buffers = dict(source.model.named_buffers())
    _refuse_others(dict(target.model.named_buffers()), buffers)
    refuse_unset(source.backend.unset, source.program)
    device = target.backend.device if isinstance(target.backend, ProcessBackend) else None
    if (device is not None) != isinstance(source.backend, ProcessBackend):
        raise RunError(
            "QN301",
            "one of the programs has a process for each rank, and the other has all ranks in one",
            fix="give both meshes as many ranks as there are processes",
        )
    mine, theirs = (_parts(tensors) for tensors in (target, source))
    received = 0
    with torch.no_grad():
        if device is None:
            for name in target.parameters:
                mine[name].copy_(theirs[name])
        else:
            sent = {name: _narrower(source_specs[name].dtype, spec.dtype) for name, spec in target.parameters.items()}
            for dtype in sorted(set(sent.values()), key=str):
                names = sorted(name for name in sent if sent[name] == dtype)
                parts = (
                    part
                    for name in names
                    for part in moved_parts(name, held(source.program, name), held(target.program, name))
                )
                received += reshard(parts, theirs, mine, torch.empty(0, dtype=dtype, device=device))
        for name, buffer in target.model.named_buffers():
            if not buffers[name].is_meta:
                buffer.copy_(buffers[name])
    target.backend.unset -= target.parameters.keys()
    return received


def _parts(tensors: ProgramTensors) -> dict[str, Tensor]:
    """Return this rank's parts by name."""
    return {spec.name: x for spec, x, _ in tensors.backend.parts(tensors.program)}


def _refuse_others(ours: Mapping[str, StateSpec | Tensor], theirs: Mapping[str, StateSpec | Tensor]) -> None:
    """Raise CheckpointError QN602 if names or shapes differ, or a dtype that cannot be rounded to the other."""
    differences = [
        f"{name} is {_described(theirs.get(name))} there, and {_described(ours.get(name))} here"
        for name in sorted(ours.keys() | theirs.keys())
        if not _alike(ours.get(name), theirs.get(name))
    ]
    if differences:
        more = f", and {len(differences) - 8} more" if len(differences) > 8 else ""
        raise CheckpointError(
            "QN602",
            f"the other program has other parameters: {'; '.join(differences[:8])}{more}",
            fix="compile a copy of the same module; it may have another floating-point dtype of 16 bits or more",
        )


def _alike(ours: StateSpec | Tensor | None, theirs: StateSpec | Tensor | None) -> bool:
    if ours is None or theirs is None or tuple(ours.shape) != tuple(theirs.shape):
        return False
    return ours.dtype == theirs.dtype or (_rounds(ours.dtype) and _rounds(theirs.dtype))


def _rounds(dtype: torch.dtype) -> bool:
    """Return whether values are converted to and from this dtype by rounding; those of 8 bits have scales."""
    return dtype.is_floating_point and not is_narrow(dtype)


def _narrower(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """Return the smaller of two dtypes, in which values are sent, so that they are rounded once."""
    return target if target.itemsize < source.itemsize else source


def _described(x: StateSpec | Tensor | None) -> str:
    return "missing" if x is None else f"{(tuple(x.shape), str(x.dtype))}"
