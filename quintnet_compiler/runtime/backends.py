"""Where ranks run: all in this process, or one per process."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh import Mesh
from ..program import DistributedProgram
from .backend import Backend
from .engines import Engine, eager
from .local_backend import LocalBackend
from .process_backend import ProcessBackend


def open_backend(
    mesh: Mesh,
    program: DistributedProgram,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    plan: str = "",
    engine: Engine = eager,
) -> Backend:
    """One rank per process inside an initialised process group of more than one rank, else all ranks here.

    ``plan``: as text, for ranks to compare. ``engine``: what runs generated functions.

    Raises:
        RunError: QN301 if the process group has another size than the mesh, QN403 if ranks have other programs.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return ProcessBackend(mesh, program, tensors, device, plan, engine)
    return LocalBackend(mesh, program, tensors, device, engine)
