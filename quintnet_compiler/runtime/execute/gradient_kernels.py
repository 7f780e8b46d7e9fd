"""Kernels that put gradients into sums of more bits."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from ...ir.distributed_program import DistributedProgram, RankProgram
from ..state.gradients import GradientStore
from ..transport.transport import Transport
from .engines import CompiledSegment, Engine, Inductor

aten = torch.ops.aten
MIN_ELEMENTS = 2**20  # of a gradient that is worth a kernel of its own
MAX_KERNELS = 16  # of one program


@dataclass(frozen=True)
class GradientKernels:
    """Adds gradients to sums on a GPU with kernels of inductor, where the sums have more bits.

    torch's own copy with a cast reaches 0.6 of the bandwidth of such a kernel. Results are equal bit by bit.

    Attributes:
        device_type: where the kernels are used.
        kernels: by what they do, and the layouts that they are for.
        warned: reasons for which inductor did not compile one, which runs as torch's operators then.
    """

    device_type: str = "cuda"
    kernels: dict[object, CompiledSegment] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def set_sum(self, slot: Tensor, gradient: Tensor) -> None:
        """Set ``slot`` to ``gradient``, of the same shape."""
        if not self._run("put", slot, gradient):
            slot.copy_(gradient)

    def add_to_sum(self, slot: Tensor, gradient: Tensor) -> None:
        """Add ``gradient`` to ``slot``, of the same shape."""
        if not self._run("add", slot, gradient):
            slot.add_(gradient)

    def _run(self, name: str, slot: Tensor, gradient: Tensor) -> bool:
        """Run a kernel, unless torch's own is as good."""
        equal = slot.dtype is gradient.dtype or slot.device.type != self.device_type
        if equal or slot.numel() < MIN_ELEMENTS:
            return False
        if slot.is_contiguous() and gradient.is_contiguous():  # one kernel for all shapes of a size
            slot, gradient = slot.view(-1), gradient.view(-1)
        key = name, gradient.dtype, slot.dtype, slot.shape, slot.stride(), gradient.stride()
        if key not in self.kernels:
            if len(self.kernels) == MAX_KERNELS:
                return False
            self.kernels[key] = CompiledSegment(_module(name), "sums of gradients", self.warned, alone=True)
        self.kernels[key]([slot, gradient])
        return True


def gradient_kernels(engine: Engine) -> GradientKernels | None:
    """Return the kernels that belong to ``engine``, if it makes kernels."""
    return GradientKernels(warned=engine.warned) if isinstance(engine, Inductor) else None


def gradient_store(
    program: DistributedProgram, part: RankProgram, transport: Transport, device: torch.device, engine: Engine
) -> GradientStore:
    """Return the store of a rank's gradients, which adds them with the kernels of ``engine``."""
    return GradientStore(program, part, transport, device, gradient_kernels(engine))


def _module(name: str) -> fx.GraphModule:
    """Return ``slot.copy_(gradient)``, or ``slot.add_(gradient)`` as an expression that is copied."""
    graph = fx.Graph()
    inputs = graph.placeholder("inputs")
    slot, gradient = (graph.call_function(operator.getitem, (inputs, i)) for i in range(2))
    if name == "add":
        gradient = graph.call_function(aten.add.Tensor, (slot, gradient))
    graph.call_function(aten.copy_.default, (slot, gradient))
    graph.output(())
    return fx.GraphModule({}, graph)
