"""The time and memory of an optimizer on the host: AdamW, as torch keeps it."""

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

MOMENTS = 2  # numbers that AdamW keeps for each element of a parameter, in that parameter's dtype
GATHERED = 3  # exchanges: a parameter and its gradient are gathered by their owner, and the parameter scattered


def host_updates(
    program: DistributedProgram, costs: Sequence[RankCosts], *, processes: bool = True
) -> tuple[HostUpdate, ...]:
    """Return the update of the rank at each pipeline place that owns the most parameters.

    Args:
        program: a compiled program; without an optimizer on the host, the result is empty.
        costs: prices of each place.
        processes: whether each rank is a process of its own; else all are in one, whose host has all parameters.
    """
    if not program.host_optimizer or not any(stage.gradients for stage in program.stages):
        return ()
    return tuple(_PlaceUpdate(program, *place_costs, processes).update() for place_costs in enumerate(costs))


@dataclass(frozen=True)
class _PlaceUpdate:
    """The optimizer of one pipeline place."""

    program: DistributedProgram
    place: int
    costs: RankCosts
    processes: bool

    def update(self) -> HostUpdate:
        """Return the update of the rank with the most memory."""
        ranks, specs = self._ranks, self._whole
        trained = {name for stage in self.program.stages for name in stage.gradients.values()}
        held, updated = Counter[int](), Counter[int]()
        for spec, owner in zip(specs, owners_of([prod(spec.shape) for spec in specs], ranks), strict=True):
            size = prod(spec.shape) * spec.dtype.itemsize
            held[owner] += size
            updated[owner] += size if spec.name in trained else 0
        largest = max(ranks, key=lambda rank: held[rank] + (MOMENTS + 1) * updated[rank])
        moving = [spec for spec in specs if spec.name in trained]
        kinds = {(spec.shape, spec.dtype, spec.sharding): spec for spec in moving if self.processes}
        kept_bytes = held[largest] + MOMENTS * updated[largest]
        return HostUpdate(
            gathering=self._gathering(moving),
            out=self.costs.copy_seconds(2 * updated[largest]),
            update=self.costs.host_update_seconds(updated[largest]),
            back=self.costs.copy_seconds(updated[largest]),
            device_bytes=max((self._on_device(spec) for spec in kinds.values()), default=0),
            host_bytes=kept_bytes + updated[largest],
            kept_bytes=kept_bytes,
        )

    @property
    def _ranks(self) -> tuple[int, ...]:
        """Return the ranks of the place: each parameter is whole on one of them."""
        mesh = self.program.mesh
        first = mesh.rank({"pp": self.place})
        return mesh.peers(first, [name for name in mesh.names if name != "pp"]) if self.processes else (first,)

    @property
    def _whole(self) -> list[StateSpec]:
        """Return the parameters that are gathered on the host; in one process, those on the host are whole anyway."""
        placement = self.program.schedule.placement
        parameters = [spec for spec in self.program.state.values() if spec.kind == "parameter"]
        if self.processes:
            return [spec for spec in parameters if any(placement[stage] == self.place for stage in spec.stages)]
        return [spec for spec in parameters if not spec.host]

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
        """Return the bytes of the device while a parameter of its owner, or the gradient, is gathered or scattered.

        The runtime's own functions allocate them, of tensors without values.
        """
        mesh, sizes, ranks = self.program.mesh, self._sizes, self._ranks
        places = [mesh.coordinate(rank) for rank in ranks]
        positions = [tuple(place.get(axis.name, 0) for axis in self.program.axes) for place in places]
        part, whole = self._part(spec), torch.empty(spec.shape, dtype=spec.dtype, device="meta")

        def gather() -> None:
            parts = {p: whole.new_empty(part) for p in positions} if len(ranks) > 1 else {positions[0]: whole}
            arrived = whole.new_empty(part) if spec.host else None  # what a rank stores
            slices.assemble(parts, spec.sharding, sizes, spec.shape).contiguous()
            del arrived

        def hand_out() -> list[Tensor]:
            pieces = [slices.take_all(whole, spec.sharding, sizes, p).contiguous() for p in positions]
            return [whole.new_empty(part), *pieces]

        return max(_peak_bytes(gather, whole), _peak_bytes(hand_out, whole) + whole.nbytes)


def _peak_bytes(call: Callable[[], object], argument: Tensor) -> int:
    """Return the bytes that a call takes at most while it runs, without those of ``argument``."""
    memory = LiveMemory([storage_key(argument)], ())
    memory.communicate(call, ())
    return memory.working
