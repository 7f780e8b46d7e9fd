"""State that is whole in this process, whatever the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from ...core import slices
from ...ir.distributed_program import DistributedProgram, StateSpec
from ..state.true_part import StoredPart
from ..state.whole_optimizer import WholeTensors
from .whole_parameters import AllHere, AllOnHost


class WholeState:
    """The tensors of backends of one process: parameters, buffers and constants by name (``tensors``)."""

    tensors: dict[str, Tensor]
    label = ""

    def _follow_module(self) -> None:
        """Read tensors that were assigned to the module since."""

    def parts(
        self, program: DistributedProgram, kinds: Sequence[str] = ("parameter",)
    ) -> Iterator[tuple[StateSpec, Tensor, list[Tensor]]]:
        self._follow_module()
        for spec in program.state.values():
            if spec.kind in kinds:
                yield spec, self.tensors[spec.name], slices.positions(spec.shape, (), (), ())

    def wholes(self, program: DistributedProgram, names: Sequence[str]) -> Iterator[tuple[str, Tensor | None]]:
        self._follow_module()
        for name in names:
            yield name, self.tensors[name]

    def whole_tensors(self, program: DistributedProgram) -> WholeTensors:
        on_host = any(spec.host for spec in program.state.values())
        return AllOnHost() if program.host_optimizer and not on_host else AllHere()

    def weights_stay(self) -> AbstractContextManager[None]:
        return nullcontext()

    def cuts(self) -> Mapping[str, StoredPart]:
        return {}

    def everywhere(self, program: DistributedProgram, names: Sequence[str]) -> dict[str, Tensor]:
        self._follow_module()
        return {name: self.tensors[name] for name in names}

    def agree(self, claims: Mapping[str, str], fix: str = "") -> None:
        pass

    def saved(self, path: object) -> None:
        pass

    def told(self, text: str) -> tuple[str, ...]:
        return (text,)

    @property
    def first(self) -> bool:
        return True
