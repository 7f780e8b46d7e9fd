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
        own = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {n: spec for n, spec in self.program.state.items() if spec.kind == "parameter" and n in own}


def copied(target: ProgramTensors, source: ProgramTensors) -> int:
    """Give ``target`` the values of ``source``, rounded to its dtypes, and return the bytes that this rank received.

    Raises:
        CheckpointError: QN602, RunError: QN301 or QN604, see :meth:`ProgramGeneration.copy_parameters`.
    """
    _refuse_others(target.parameters, given := source.parameters)
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
    mine, theirs = ({spec.name: x for spec, x, _ in one.backend.parts(one.program)} for one in (target, source))
    received = 0
    with torch.no_grad():
        if device is None:
            for name in target.parameters:
                mine[name].copy_(theirs[name])
        else:
            sent = {name: _narrower(given[name].dtype, spec.dtype) for name, spec in target.parameters.items()}
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


def _refuse_others(ours: Mapping[str, StateSpec | Tensor], theirs: Mapping[str, StateSpec | Tensor]) -> None:
    """Raises: CheckpointError QN602 if one has what the other has not, in another shape, or in a dtype whose numbers it
    cannot be given by rounding each."""
    odd = [
        f"{name} is {_described(theirs.get(name))} there, and {_described(ours.get(name))} here"
        for name in sorted(ours.keys() | theirs.keys())
        if not _alike(ours.get(name), theirs.get(name))
    ]
    if odd:
        more = f", and {len(odd) - 8} more" if len(odd) > 8 else ""
        raise CheckpointError(
            "QN602",
            f"the other program has other parameters: {'; '.join(odd[:8])}{more}",
            fix="compile a copy of the same module; it may have another floating-point dtype of 16 bits or more",
        )


def _alike(one: StateSpec | Tensor | None, other: StateSpec | Tensor | None) -> bool:
    if one is None or other is None or tuple(one.shape) != tuple(other.shape):
        return False
    return one.dtype == other.dtype or (_rounds(one.dtype) and _rounds(other.dtype))


def _rounds(dtype: torch.dtype) -> bool:
    """Return whether numbers of other such dtypes are rounded to this one; those of 8 bits come with scales."""
    return dtype.is_floating_point and not is_narrow(dtype)


def _narrower(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """In which of two dtypes numbers travel, which are rounded once."""
    return target if target.itemsize < source.itemsize else source


def _described(x: StateSpec | Tensor | None) -> str:
    return "missing" if x is None else f"{(tuple(x.shape), str(x.dtype))}"
