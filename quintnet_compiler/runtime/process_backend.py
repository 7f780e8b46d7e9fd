"""One rank per process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import layout
from ..errors import RunError
from ..mesh import Mesh
from ..program import Axis, DistributedProgram, StateSpec
from ..sharding import I, Shard
from .backend import Caches, Ready, clip, not_known, parts_of_gradients, refuse_unset, total_norm
from .buckets import reduced_axes, scattered_axes
from .distributed import DistributedTransport, device_mesh, gradient_groups
from .engines import Engine, eager
from .executor import Executor, Run
from .gradients import GradientStore, shared_by
from .handover import HandOver
from .handshake import agree, tell
from .loss_scale import LossScale
from .record import Recorder
from .same_values import SameValues
from .state import new_caches, part_of, sharded_dtensor


class ProcessBackend:
    """One rank per process."""

    def __init__(
        self,
        mesh: Mesh,
        program: DistributedProgram,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        plan: str,
        engine: Engine = eager,
    ) -> None:
        self.mesh, self.device, self.engine = mesh, device, engine
        self.scaler = LossScale.of(program)
        self.unset = {name for name, x in tensors.items() if x.is_meta}
        rank = dist.get_rank()
        if dist.get_world_size() != mesh.size:
            raise RunError(
                "QN301",
                f"{mesh} needs {mesh.size} ranks, and the world has {dist.get_world_size()}",
                fix=f"start {mesh.size} processes, or give the mesh {dist.get_world_size()} ranks",
            )
        agree({"torch": torch.__version__, "plan": plan}, device)
        self.values = SameValues(mesh, device)
        self.values.see(tensors)
        self.devices = device_mesh(mesh, device.type)
        self.transport = DistributedTransport(mesh, self.devices)
        names = tuple(n for n in self.devices.mesh_dim_names or () if n != "pp")
        self.stage_mesh = self.devices[names] if names != self.devices.mesh_dim_names else self.devices
        self.place = mesh.coordinate(rank)
        self.ready: dict[int, _Process] = {}
        self.counted: dict[int, tuple[DistributedProgram, set[str]]] = {}  # parameters whose norm this rank adds
        mine = set(self._owned(program))
        self.state = {
            name: _kept(tensors[name].detach(), spec, program.axes, self.place, device)
            for name, spec in program.state.items()
            if name in mine or spec.kind != "parameter"
        }
        self.parameters = {
            name: nn.Parameter(
                sharded_dtensor(self.state[name], spec, program, self.stage_mesh), requires_grad=spec.trainable
            )
            for name, spec in program.state.items()
            if spec.kind == "parameter" and name in mine
        }
        self.values.keep(self.state, self.parameters)

    def _owned(self, program: DistributedProgram) -> Iterator[str]:
        here = self.place.get("pp", 0)
        for name, spec in program.state.items():
            if any(program.schedule.placement[stage] == here for stage in spec.stages):
                yield name

    def run(
        self,
        program: DistributedProgram,
        inputs: Sequence[Tensor],
        how: Run,
        *,
        caches: Caches | None = None,
        recorder: Recorder | None = None,
    ) -> list[Tensor]:
        refuse_unset(self.unset, program)
        ready, how = self._ready(program, inputs, how), self.scaler.run(program, how)
        # rows that are already this data rank's are not split again
        axes = [replace(a, size=1) if how.local and a.role == "data" else a for a in program.axes]
        place = {**self.place, **({"dp": 0, "ep": 0} if how.local else {})}
        mine = [
            part_of(x, spec.sharding, axes, place).to(self.device)
            for x, spec in zip(inputs, program.inputs, strict=True)
        ]
        state = {**self.state, **(caches or {}).get(self.transport.rank, {})}
        with torch.no_grad():
            old = ready.handover.take() if how.train else None
            if how.train and ready.handover.kept:
                ready = self.ready[id(program)] = self._made(program, how.train)
            try:
                results, good = ready.step(state, mine, how, recorder=recorder)
            except RunError:
                if old is not None:
                    ready.handover.put(old)
                raise
            if how.train:
                self.scaler.update(how, finite=good)
                ready.handover.put(repeat(None)) if self.scaler.skipped else ready.handover.give(old)
        return results

    def learn(self, program: DistributedProgram, tensors: Mapping[str, Tensor]) -> None:
        new = not_known(program, self.state)
        self.values.see({name: tensors[name] for name in new})
        for name in new:
            spec = program.state[name]
            self.state[name] = _kept(tensors[name].detach(), spec, program.axes, self.place, self.device)
        self.values.keep({name: self.state[name] for name in new})

    def new_caches(self, program: DistributedProgram) -> Caches:
        rank = self.transport.rank
        return {rank: new_caches(program, program.rank(rank), self.device)}

    def clip_grad_norm(self, program: DistributedProgram, max_norm: float) -> Tensor:
        gradients = parts_of_gradients(self.parameters)
        if id(program) not in self.counted:
            mine = {name for name in self.parameters if self._counts(program.state[name], program)}
            self.counted[id(program)] = program, mine
        counted = [gradient for name, gradient in gradients.items() if name in self.counted[id(program)][1]]
        squares = total_norm(counted, program, self.device) ** 2
        if self.mesh.size > 1:
            everyone = tuple(range(self.mesh.size))
            squares = self.transport.start_sum(squares, everyone, "gradient norm")()
        total = squares.sqrt()
        clip(list(gradients.values()), max_norm, total)
        return total

    def parts(
        self, program: DistributedProgram, kinds: Sequence[str] = ("parameter",)
    ) -> Iterator[tuple[StateSpec, Tensor, list[Tensor]]]:
        sizes = [axis.size for axis in program.axes]
        places = [self.place.get(axis.name, 0) for axis in program.axes]
        for spec in program.state.values():
            if spec.kind in kinds and spec.name in self.state:
                yield spec, self.state[spec.name], layout.positions(spec.shape, spec.sharding, sizes, places)

    def wholes(self, program: DistributedProgram, names: Sequence[str]) -> Iterator[tuple[str, Tensor | None]]:
        for name in names:
            yield name, self._whole(program, program.state[name])

    def _whole(self, program: DistributedProgram, spec: StateSpec) -> Tensor | None:
        """Joined by the ranks of the first stage that has it, then handed to rank 0."""
        stage = program.schedule.placement[spec.stages[0]] if spec.kind == "parameter" else 0
        sender = self.mesh.rank({**dict.fromkeys(self.mesh.names, 0), **({"pp": stage} if "pp" in self.place else {})})
        whole: Tensor | None = None
        if self.place.get("pp", 0) == stage:
            part = sharded_dtensor(self.state[spec.name], spec, program, self.stage_mesh)
            whole = part.full_tensor()  # on every rank of the stage, one tensor at a time
        if sender == 0:
            return whole if self.first else None
        if self.transport.rank == sender:
            assert whole is not None
            dist.send(whole.contiguous(), 0)
        if not self.first:
            return None
        found = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        dist.recv(found, sender)
        return found

    def agree(self, claims: Mapping[str, str]) -> None:
        agree(claims, self.device)

    def told(self, text: str) -> tuple[str, ...]:
        return tell(text, self.device)

    @property
    def first(self) -> bool:
        return dist.get_rank() == 0

    def _counts(self, spec: StateSpec, program: DistributedProgram) -> bool:
        """Whether this rank speaks for its part: one of the ranks that hold the same, in the first stage with it."""
        whole = [a.name for a, k in zip(program.axes, spec.sharding, strict=True) if not isinstance(k, Shard)]
        first = program.schedule.placement[spec.stages[0]]
        return self.place.get("pp", 0) == first and all(self.place.get(axis, 0) == 0 for axis in whole)

    def _ready(self, program: DistributedProgram, inputs: Sequence[Tensor], how: Run) -> _Process:
        found = self.ready.get(id(program))
        if found is None:
            agree({"program": program.digest}, self.device)
            self.values.require(program, inputs, self.state, local=how.local)
            self.transport.add_groups(_groups(program, self.mesh))
            found = self.ready[id(program)] = self._made(program, how.train)
        else:
            where = f"step {how.step}" if how.train else "a run without training"
            self.values.look(program, inputs, where, local=how.local)
        return found

    def _made(self, program: DistributedProgram, train: bool) -> _Process:
        part = program.rank(self.transport.rank)
        store = GradientStore(program, part, self.transport, self.device) if train else None
        settled = store.settled if store else {}
        parameters = [self.parameters[name] for name in settled]
        gradients = [sharded_dtensor(x, program.state[name], program, self.stage_mesh) for name, x in settled.items()]
        executor = Executor(program, part, self.transport, self.device, store, self.engine)
        return _Process(program, executor, store, HandOver(parameters, gradients))


@dataclass(frozen=True)
class _Process(Ready):
    """The same, with what parameters get."""

    handover: HandOver


def _groups(program: DistributedProgram, mesh: Mesh) -> list[tuple[int, ...]]:
    """Every group that settling gradients needs."""
    trained = [spec for spec in program.state.values() if spec.trainable]
    axes = {axes(spec, program) for spec in trained for axes in (reduced_axes, scattered_axes)}
    found = dict.fromkeys(gradient_groups(mesh, axes - {()}))
    for _, spec in sorted(program.state.items()):
        for rank in range(mesh.size):
            found[shared_by(spec, program, rank)] = None
    return [ranks for ranks in found if ranks]


def _kept(
    whole: Tensor, spec: StateSpec, axes: Sequence[Axis], place: Mapping[str, int], device: torch.device
) -> Tensor:
    """A part in memory of its own (with room for what is gathered there); without values if the module has none."""
    resident = spec.resident if spec.in_place else spec.sharding
    part = part_of(whole, resident, axes, place)
    kept = torch.empty(part.shape, dtype=part.dtype, device=device)
    if not part.is_meta:
        kept.copy_(part)
    later = tuple(kind if kind != there else I for kind, there in zip(spec.sharding, resident, strict=True))
    return part_of(kept, later, axes, place)
