"""The process group that a program finds itself in."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ...compat.torch import built_for_xpu
from ...core.errors import CompileError, RunError
from ...core.mesh import Mesh
from .accelerator import group_accelerator
from .launchers import started


def enter_world(mesh: Mesh) -> None:
    """Make sure that there is a process group of all processes, where a launcher started several.

    Raises:
        RunError: QN301 if their number is not that of the mesh, or if they cannot meet.
    """
    alone = not (dist.is_available() and dist.is_initialized())
    found = started() if alone else None
    size = found.size if found is not None else 1 if alone else dist.get_world_size()
    if size not in (1, mesh.size):
        raise RunError(
            "QN301",
            f"{mesh} needs {mesh.size} ranks, and the world has {size}",
            fix=f"start {mesh.size} processes, or give the mesh {size} ranks",
        )
    if found is not None:
        found.join()


def default_device(model: nn.Module, given: torch.device | str | None) -> torch.device:
    """Where programs run: as asked, or the accelerator of an accelerator's process group, or the model's device.

    Raises:
        CompileError: QN108 for a device that this build of PyTorch was made without.
    """
    if given is not None:
        wanted = torch.device(given)
        if not _built_for(wanted.type):
            raise CompileError(
                "QN108",
                f"device={str(given)!r}: PyTorch {torch.__version__} was built without {wanted.type}",
                fix=f"install a build of PyTorch for {wanted.type}, or leave device out",
            )
        return wanted
    if (accelerator := group_accelerator()) is not None:
        return accelerator
    found = next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if found.type == "meta" else found


def _built_for(kind: str) -> bool:
    """Whether this PyTorch can make programs for a kind of device; its autograd ends the process where it cannot."""
    if kind == "xpu":
        return built_for_xpu()
    backend = {"cuda": torch.backends.cuda, "mps": torch.backends.mps}.get(kind)
    return backend is None or bool(backend.is_built())


def has_process(mesh: Mesh, device: torch.device) -> bool:
    """Whether each rank of ``mesh`` is a process, of which this is one. That of a mesh of one rank is, if its process
    group communicates between accelerators: it then runs as one of many does."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != mesh.size:
        return False
    accelerator = group_accelerator()
    return mesh.size > 1 or (accelerator is not None and accelerator.type == device.type)


def many() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def judges() -> bool:
    """Whether this process does what one rank does for all."""
    return not many() or dist.get_rank() == 0
