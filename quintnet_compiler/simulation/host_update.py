"""What an optimizer on the host takes, where a plan has ``offload=("optimizer",)``: of AdamW, as torch keeps it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..compat.torch import storage_key
from ..core import slices
from ..core.sharding import local_shape
from ..ir.cost_protocol import RankCosts
from ..ir.distributed_program import DistributedProgram, StateSpec
from ..runtime.backends.whole_parameters import owners_of
from .live_memory import LiveMemory
from .timeline import HostUpdate

MOMENTS = 2  # of AdamW as torch keeps it, for each element of a parameter, in the dtype in which ranks hold that
GATHERED = 3  # parts of a parameter and of its gradient go to their owner, and parts of the parameter come back


def host_updates(
    program: DistributedProgram, costs: Sequence[RankCosts], *, processes: bool = True
) -> tuple[HostUpdate, ...]:
    """Of the rank at each pipeline place that has the most parameters whole; ``costs``: prices of each place. None
    where optimizers are on the device. ``processes``: each rank is a process of its own; else all are in one, whose
    host has all parameters."""
    if not program.host_optimizer or not any(stage.gradients for stage in program.stages):
        return ()
    return tuple(_OfPlace(program, place, one, processes).update() for place, one in enumerate(costs))


@dataclass(frozen=True)
class _OfPlace:
    program: DistributedProgram
    place: int
    costs: RankCosts
    processes: bool

    def update(self) -> HostUpdate:
        ranks, specs = self._ranks, self._whole
        trained = {name for stage in self.program.stages for name in stage.gradients.values()}
        held, updated = Counter[int](), Counter[int]()
        for spec, owner in zip(specs, owners_of([prod(spec.shape) for spec in specs], ranks), strict=True):
            size = prod(spec.shape) * spec.dtype.itemsize
            held[owner] += size
            updated[owner] += size if spec.name in trained else 0
        most = max(ranks, key=lambda rank: held[rank] + (MOMENTS + 1) * updated[rank])
        moving = [spec for spec in specs if spec.name in trained]
        kinds = {(spec.shape, spec.dtype, spec.sharding): spec for spec in moving if self.processes}
        kept = held[most] + MOMENTS * updated[most]
        return HostUpdate(
            self._gathering(moving),
            self.costs.copy_seconds(2 * updated[most]),
            self.costs.host_update_seconds(updated[most]),
            self.costs.copy_seconds(updated[most]),
            max((self._on_device(spec) for spec in kinds.values()), default=0),
            kept + updated[most],
            kept,
        )

    @property
    def _ranks(self) -> tuple[int, ...]:
        """Those of the place: among them, each parameter is whole on one."""
        mesh = self.program.mesh
        first = mesh.rank({"pp": self.place})
        return mesh.peers(first, [name for name in mesh.names if name != "pp"]) if self.processes else (first,)

    @property
    def _whole(self) -> list[StateSpec]:
        """Parameters that are whole on the host for this; in one process, those on the host are whole there anyway."""
        placement = self.program.schedule.placement
        found = [spec for spec in self.program.state.values() if spec.kind == "parameter"]
        if self.processes:
            return [spec for spec in found if any(placement[stage] == self.place for stage in spec.stages)]
        return [spec for spec in found if not spec.host]

    def _gathering(self, moving: Sequence[StateSpec]) -> float:
        if len(self._ranks) == 1:
            return 0.0
        part = sum(prod(self._part(spec)) * spec.dtype.itemsize for spec in moving)
        return GATHERED * self.costs.group_seconds("all_gather", len(self._ranks) * part, self._ranks)

    @property
    def _sizes(self) -> list[int]:
        return [axis.size for axis in self.program.axes]

    def _part(self, spec: StateSpec) -> tuple[int, ...]:
        return local_shape(spec.shape, spec.sharding, self._sizes)

    def _on_device(self, spec: StateSpec) -> int:
        """Bytes of the device of the rank that has a parameter whole, while that, or its gradient, is gathered, and
        while it is handed out: the runtime's own functions take them, of tensors without values."""
        mesh, sizes, ranks = self.program.mesh, self._sizes, self._ranks
        places = [mesh.coordinate(rank) for rank in ranks]
        there = [tuple(place.get(axis.name, 0) for axis in self.program.axes) for place in places]
        part, whole = self._part(spec), torch.empty(spec.shape, dtype=spec.dtype, device="meta")

        def gather() -> None:
            parts = {place: whole.new_empty(part) for place in there} if len(ranks) > 1 else {there[0]: whole}
            arrived = whole.new_empty(part) if spec.host else None  # what a rank stores
            slices.assemble(parts, spec.sharding, sizes, spec.shape).contiguous()
            del arrived

        def hand_out() -> list[Tensor]:
            return [
                whole.new_empty(part),
                *(slices.take_all(whole, spec.sharding, sizes, p).contiguous() for p in there),
            ]

        return max(_taken(gather, whole), _taken(hand_out, whole) + whole.nbytes)


def _taken(call: Callable[[], object], own: Tensor) -> int:
    """Bytes that a call takes at most while it runs, beside those of ``own``."""
    memory = LiveMemory([storage_key(own)], ())
    memory.communicate(call, ())
    return memory.working
