"""Where ranks run: all in this process, or one per process."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...core.mesh import Mesh
from ...ir.distributed_program import DistributedProgram
from ..execute.engines import Engine, eager
from ..execute.malloc import tune_malloc
from ..launch.world import has_process, many
from ..state.module_parameters import Slots
from ..state.same_values import EVERY
from .backend import Backend
from .local import LocalBackend


def open_backend(
    mesh: Mesh,
    program: DistributedProgram,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    plan: str = "",
    engine: Engine = eager,
    slots: Slots | None = None,
    *,
    tune_process: bool = True,
    compare_every: int = EVERY,
) -> Backend:
    """Return the backend of a mesh: one rank per process, or all ranks in this process.

    One rank per process inside an initialised process group of more than one rank, or of an accelerator's backend
    (NCCL). ``plan``: as text, for ranks to compare. ``engine``: runs generated functions. ``slots``: where modules keep
    ``tensors``. ``tune_process``, ``compare_every``: see :func:`quintnet.compile`.

    Raises:
        RunError: QN301 if the process group has another size than the mesh, QN403 if ranks have other programs.
    """
    if tune_process and device.type == "cpu":
        tune_malloc()
    if many() or has_process(mesh, device):
        from .processes import ProcessBackend

        return ProcessBackend(
            mesh,
            program,
            tensors,
            device,
            plan,
            engine,
            slots,
            tune_process=tune_process,
            compare_every=compare_every,
        )
    return LocalBackend(mesh, program, tensors, device, engine, slots)
