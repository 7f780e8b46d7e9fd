"""The process group that a program finds itself in."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ...compat.torch import built_for_xpu
from ...core.absent_gpu import CUDA, AbsentGpu
from ...core.errors import CompileError, RunError
from ...core.mesh import Mesh
from .accelerator import group_accelerator
from .launchers import started


def enter_world(mesh: Mesh) -> None:
    """Make sure of a process group of all processes, with a heartbeat, where a launcher started several.

    Raises:
        RunError: QN301 if their number is not that of the mesh, or if they cannot meet.
    """
    size = world_size()
    if size not in (1, mesh.size):
        raise RunError(
            "QN301",
            f"{mesh} needs {mesh.size} ranks, and the world has {size}",
            fix=f"start {mesh.size} processes, or give the mesh {size} ranks",
        )
    launcher = started()
    if launcher is not None and launcher.size > 1 and not (dist.is_available() and dist.is_initialized()):
        launcher.join()
    if many():
        from .group_heartbeat import watch_group

        watch_group()


def world_size() -> int:
    """Return the number of processes, whether they have a process group yet or a launcher started them."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    launcher = started()
    return 1 if launcher is None else launcher.size


def device_for(
    model: nn.Module, given: torch.device | str | None, gpu: AbsentGpu | None = None
) -> tuple[torch.device, AbsentGpu | None]:
    """Return where programs run, and the GPU that this stands for, if this machine has no such GPU.

    This is ``given``, or the accelerator of an accelerator's process group, or the model's device. ``gpu``: that of
    the cluster that is planned for, if there is one. Where neither a device nor a process group says where to run, the
    model is on the CPU and this machine has no GPU, programs are for the cluster's.

    Raises:
        CompileError: QN108 for a device that this build of PyTorch was made without, or that this process, one of
            several ranks, does not have.
    """
    alone = not (dist.is_available() and dist.is_initialized())
    if given is None and gpu is not None and alone and not torch.cuda.is_available() and _at_rest(model):
        return CUDA, gpu
    device = _present_device(model, given)
    if device.type != "cuda" or torch.cuda.is_available():
        return device, None
    if many():
        raise CompileError(
            "QN108",
            f"device={str(given)!r}: this process is one of {dist.get_world_size()} ranks, and has no CUDA device",
            fix="start one process on each GPU; or compile in a single process, which only looks at the program",
        )
    return device, gpu or AbsentGpu()


def _at_rest(model: nn.Module) -> bool:
    """Return whether no device was chosen for the model."""
    return all(p.device.type in ("cpu", "meta") for p in model.parameters())


def _present_device(model: nn.Module, given: torch.device | str | None) -> torch.device:
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
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _built_for(kind: str) -> bool:
    """Return whether programs can be compiled for a kind of device.

    PyTorch's autograd ends the process on tensors of one that it was built without; only programs for CUDA are compiled
    without it.
    """
    if kind == "xpu":
        return built_for_xpu()
    return kind != "mps" or bool(torch.backends.mps.is_built())


def has_process(mesh: Mesh, device: torch.device) -> bool:
    """Return whether each rank of ``mesh`` is a process, of which this is one.

    That of a mesh of one rank is, if its process group communicates between accelerators: it then runs as one of many.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != mesh.size:
        return False
    accelerator = group_accelerator()
    return mesh.size > 1 or (accelerator is not None and accelerator.type == device.type)


def many() -> bool:
    """Return whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def judges() -> bool:
    """Return whether this process does what one rank does for all."""
    return not many() or dist.get_rank() == 0


def own_rank() -> int:
    """Return the number of this process among the ranks, 0 if it is alone."""
    return dist.get_rank() if many() else 0
