"""A program for a GPU that this machine does not have: its state stays in the module, and nothing runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from ...core.absent_gpu import AbsentGpu
from ...core.errors import RunError
from ...ir.distributed_program import DistributedProgram, StateSpec
from ..execute.loss_scale import LossScale
from .whole_state import WholeState


def refuse_absent(what: str, gpu: AbsentGpu) -> NoReturn:
    """Raise QN305."""
    kind = ".".join(map(str, gpu.capability))
    raise RunError(
        "QN305",
        f"{what}: the program is for CUDA GPUs (compute capability {kind}), and this machine has none",
        fix='dump, explain or simulate it here; compile with device="cpu" for a program that runs here',
    )


class AbsentBackend(WholeState):
    """The module's own tensors, where they are: on the CPU, or without values on the meta device."""

    def __init__(self, program: DistributedProgram, tensors: Mapping[str, Tensor], gpu: AbsentGpu) -> None:
        self.gpu, self.scaler, self.tensors = gpu, LossScale.initial(program), dict(tensors)
        self.unset = {name for name, x in tensors.items() if x.is_meta}
        names = {name for name, spec in program.state.items() if spec.kind == "parameter"}
        self.parameters = {n: x for n, x in tensors.items() if n in names and isinstance(x, nn.Parameter)}

    def parts(
        self, program: DistributedProgram, kinds: Sequence[str] = ("parameter",)
    ) -> Iterator[tuple[StateSpec, Tensor, list[Tensor]]]:
        for spec, part, positions in super().parts(program, kinds):
            if part.is_meta:
                refuse_absent(f"{spec.name} is on the meta device, and gets values where it is trained", self.gpu)
            yield spec, part, positions

    def run(self, *_: Any, **__: Any) -> NoReturn:
        refuse_absent("a step", self.gpu)

    def new_caches(self, *_: Any) -> NoReturn:
        refuse_absent("a cache", self.gpu)

    def clip_grad_norm(self, program: DistributedProgram, max_norm: float) -> NoReturn:
        refuse_absent("clip_grad_norm", self.gpu)

    def learn(self, program: DistributedProgram, tensors: Mapping[str, Tensor]) -> None:
        """Nothing that would run has constants of its own."""

    def forget(self, program: DistributedProgram) -> None:
        """Nothing ran it."""
