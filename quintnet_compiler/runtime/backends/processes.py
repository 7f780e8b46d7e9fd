"""One rank per process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...compat.distributed import local_tensor, replace_local_tensor
from ...compat.torch_hooks import share_hooks
from ...core.empty_storage import of_other_ranks
from ...core.errors import RunError
from ...core.mesh import Mesh
from ...core.sharding import I, Shard
from ...dtensors import local_values, whole_dtensors
from ...ir.distributed_program import DistributedProgram, StateSpec
from ...ir.program import Axis
from ..execute.engines import Engine, eager
from ..execute.executor import Executor, Run
from ..execute.gradient_kernels import gradient_store
from ..execute.host_linears import HostLinears
from ..execute.loss_scale import LossScale
from ..execute.record import Recorder
from ..execute.whole_steps import step_function
from ..launch.calls import next_label
from ..launch.consistency import SAME_SCRIPT, agree, tell
from ..state.buckets import reduced_axes, scattered_axes
from ..state.changed_state import split_results, written_state
from ..state.grad_handoff import HandOver
from ..state.gradients import shared_by, too_many_gradients
from ..state.module_parameters import Slots, check_fits, local_of, move_tensor, retire
from ..state.optimizer_settings import OptimizerSettings
from ..state.same_state import SameState, Saved
from ..state.same_values import EVERY, SameValues
from ..state.split_parameter import split_parameter
from ..state.split_updates import watch_optimizers
from ..state.state import new_caches, part_of, sharded_dtensor
from ..state.true_part import StoredPart, TruePart
from ..transport.connections import connections_of
from ..transport.distributed import gradient_groups, shared_transport
from ..transport.gloo_threads import lower_gloo_thread_priority
from ..transport.host_copies import host_room
from .backend import Caches, Ready, clip, gradients_of, home_of, new_constants, refuse_unset, running_on, total_norm
from .whole_parameters import OneOwnerEach


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
        slots: Slots | None = None,
        *,
        tune_process: bool = True,
        compare_every: int = EVERY,
    ) -> None:
        self.mesh, self.device, self.engine, self.linears = mesh, device, engine, HostLinears()
        self.scaler = LossScale.initial(program)
        self.unset = {name for name, x in tensors.items() if x.is_meta}
        if dist.get_world_size() != mesh.size:
            raise RunError(
                "QN301",
                f"{mesh} needs {mesh.size} ranks, and the world has {dist.get_world_size()}",
                fix=f"start {mesh.size} processes, or give the mesh {dist.get_world_size()} ranks",
            )
        agree({"torch": torch.__version__, "plan": plan}, device)
        self.label = next_label()
        whole_dtensors.use_whole_dtensors()
        watch_optimizers()
        self.values = SameValues(mesh, device)
        self.values.see(tensors)
        self.transport = shared_transport(mesh, device.type)
        self.devices, self.tune_process = self.transport.devices, tune_process
        self._tune()
        names = tuple(n for n in self.devices.mesh_dim_names or () if n != "pp")
        self.stage_mesh = self.devices[names] if names != self.devices.mesh_dim_names else self.devices
        self.place = mesh.coordinate(dist.get_rank())
        self.ready: dict[int, _Process] = {}
        self.counted: dict[int, tuple[DistributedProgram, set[str]]] = {}  # parameters whose norm this rank adds
        self.slots, self.specs, self.axes = slots, program.state, program.axes
        self.mine = set(self._owned_names(program))
        self.placed = frozenset(() if slots is None else slots.names)
        self.state: dict[str, Tensor] = {}  # this rank's parts, without padding
        self.padded: dict[str, Tensor] = {}  # what programs read, where a part has padding
        self.buffers: dict[str, Tensor] = {}  # the module's own, which are whole on every rank
        self.parameters: dict[str, nn.Parameter] = {}
        self._take_all(tensors)
        self.values.remember_parts(self.state, self.parameters)
        self.same = SameState(mesh, device, compare_every, OptimizerSettings(self.parameters))

    def _tune(self) -> None:
        """Set the priority of gloo's threads, after process groups were made."""
        if self.tune_process:
            lower_gloo_thread_priority()

    def _take_all(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep this rank's parts of these tensors, and leave nothing else of the module's parameters."""
        new = {name: self._take(x, self.specs[name]) for name, x in tensors.items() if name in self.specs}
        if self.slots is not None:
            self.slots.replace_tensors(new)

    def _take(self, x: Tensor, spec: StateSpec) -> Tensor:
        """Return the tensor that replaces ``x`` in the module."""
        name = spec.name
        if spec.kind != "parameter":
            if spec.kind == "buffer" and not x.is_meta:
                x = move_tensor(x, self.device)
                self.buffers[name] = x.detach()
                self.state[name] = part_of(self.buffers[name], spec.sharding, self.axes, self.place)
                return x
            self.state[name] = _stored_part(x.detach(), spec, self.axes, self.place, self.device)
            if self.state[name].shape != x.shape:
                return x
            self.buffers[name] = self.state[name]
            return self.state[name]
        trainable = x.requires_grad if isinstance(x, nn.Parameter) else spec.trainable
        if name in self.mine:
            self.state[name] = self._stored_part(x.detach(), spec)
            part: Tensor = sharded_dtensor(self.state[name], spec, self.axes, self.stage_mesh)
        else:
            part = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        parameter: nn.Parameter
        if name in self.mine:
            parameter = split_parameter(part, trainable=trainable)  # type: ignore[assignment]
        else:
            parameter = nn.Parameter(part, requires_grad=trainable)
        if isinstance(x, nn.Parameter):
            parameter.__dict__.update({k: v for k, v in x.__dict__.items() if k not in parameter.__dict__})
            share_hooks(x, parameter)
            if name in self.placed:
                retire(x)
        if name not in self.mine:
            return of_other_ranks(parameter, self.device)
        self.parameters[name] = parameter
        return parameter

    def _stored_part(self, x: Tensor, spec: StateSpec) -> Tensor:
        """Return this rank's part of a parameter, where there is room for its padding."""
        part = _stored_part(x, spec, self.axes, self.place, self.device)
        mine = self._true_part(spec).of_padded(part)
        if mine.shape != part.shape:
            self.padded[spec.name] = part
        return mine

    def _reallocate(self, mine: Tensor, spec: StateSpec) -> Tensor:
        """Copy a part that was assigned to new memory: other references to the old memory keep their values."""
        room = _room(spec, self.axes, self.place, spec.dtype, self.device).zero_()
        self.padded.pop(spec.name, None)
        self.state[spec.name] = self._true_part(spec).of_padded(room)
        if room.shape != self.state[spec.name].shape:
            self.padded[spec.name] = room
        return self.state[spec.name].copy_(mine)

    def _true_part(self, spec: StateSpec) -> TruePart:
        return TruePart.on_rank(spec.shape, spec.sharding, self.axes, self.place)

    def cuts(self) -> dict[str, StoredPart]:
        """Return which part of each parameter this rank has."""
        sizes = tuple(axis.size for axis in self.axes)
        places = tuple(self.place.get(axis.name, 0) for axis in self.axes)
        return {
            name: StoredPart(spec.shape, spec.sharding, sizes, places, self._true_part(spec))
            for name, spec in ((name, self.specs[name]) for name in self.parameters)
        }

    def _follow_module(self) -> None:
        """Read tensors that were assigned to the module since, or raise QN112 if they do not fit the program."""
        if self.slots is None or self.slots.same:
            return
        changed = {name: x for name, x in self.slots.changed().items() if name in self.mine or not x.is_meta}
        for name, x in changed.items():
            check_fits(name, x, self.specs[name], home_of(self.specs[name], self.device))
            self.values.built.pop(name, None)
        with torch.no_grad():
            for name, x in list(changed.items()):
                if isinstance(x, DTensor):  # the object stays; its memory gets room for the gathered value
                    replace_local_tensor(x, self._reallocate(local_tensor(x), self.specs[name]))
                    self.parameters[name] = changed.pop(name)  # type: ignore[assignment]
            self._take_all(changed)
            self.slots.look()
            self.ready = {key: self._new_process(old.program, old.store is not None) for key, old in self.ready.items()}

    def _owned_names(self, program: DistributedProgram) -> Iterator[str]:
        place = self.place.get("pp", 0)
        for name, spec in program.state.items():
            if any(program.schedule.placement[stage] == place for stage in spec.stages):
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
        self._follow_module()
        refuse_unset(self.unset, program)
        with running_on(self.device):
            ready, how = self._ready(program, inputs, how), self.scaler.with_scale(program, how)
            self._compare(program, how)
        own_inputs = self._own_inputs(program, inputs, local=how.local)
        state = {**self.state, **self.padded, **(caches or {}).get(self.transport.rank, {})}
        with torch.no_grad(), running_on(self.device):
            old = ready.handover.take_gradients() if how.train else None
            if how.train:
                self._free_gradients(program)
            if how.train and ready.handover.kept:
                ready = self.ready[id(program)] = self._new_process(program, how.train)
            try:
                results, good = ready.step(state, own_inputs, how, recorder=recorder)
            except RunError:
                if old is not None:
                    ready.handover.set_gradients(old)
                raise
            if how.train:
                self.scaler.update(how, finite=good)
                ready.handover.set_gradients(repeat(None)) if self.scaler.skipped else ready.handover.give(old)
            results, new = split_results(program, results, self.buffers)
            self._write(program, new)
        return results

    def _own_inputs(self, program: DistributedProgram, batch: Sequence[Tensor], *, local: bool) -> list[Tensor]:
        """Return this rank's parts of a batch; ``local``: its rows are this data rank's already."""
        axes = [replace(axis, size=1) if local and axis.role == "data" else axis for axis in program.axes]
        place = {**self.place, **({"dp": 0, "ep": 0} if local else {})}
        return [part_of(x, s.sharding, axes, place).to(self.device) for x, s in zip(batch, program.inputs, strict=True)]

    def _compare(self, program: DistributedProgram, how: Run) -> None:
        """Raise QN404 if ranks hold different values, which is compared from time to time."""
        if not how.train:
            self.same.finish_comparison()
            return
        random = f"seed {how.seed}, step {how.step}, loss scale {self.scaler.scale}"
        self.same.look(program, lambda: {**self.state, **self.buffers}, random, f"before step {how.step}")

    def saved(self, path: Saved) -> None:
        self.same.newest = path

    def _free_gradients(self, program: DistributedProgram) -> None:
        """Release the gradients of other programs, but of a few whose graphs write them."""
        stores = {key: x.store for key, x in self.ready.items() if key != id(program) and x.store is not None}
        for key, store in stores.items():
            if key in too_many_gradients(stores) or self.ready[key].handover.kept:
                del self.ready[key]  # the caller holds them: the program gets new ones when it runs next
            else:
                store.free_memory()

    def _write(self, program: DistributedProgram, new: Mapping[str, Tensor]) -> None:
        """Keep the new values of buffers and parameters, of which this rank has parts."""
        stored = {spec.name: spec for spec in program.stored.values()}
        parts = {n: self._true_part(s).of_padded(new[n]) for n, s in stored.items() if n in self.mine}
        buffers = {name: x for name, x in new.items() if name not in stored}
        there = {**self.buffers, **{name: self.state[name] for name in parts}}
        if parts:
            self.linears.changed()
        now = written_state(program, {**buffers, **parts}, there) if new else {}
        assigned = {name: x for name, x in now.items() if name in program.captured.assigned}
        if self.slots is not None and assigned:
            self.slots.assign(assigned)
        self.buffers |= assigned
        for name in buffers:
            self.state[name] = part_of(now[name], program.state[name].sharding, self.axes, self.place)

    def learn(self, program: DistributedProgram, tensors: Mapping[str, Tensor]) -> None:
        new = {name: program.state[name] for name in new_constants(program, self.state)}
        self.values.see({name: tensors[name] for name in new})
        for name, spec in new.items():
            self._take(tensors[name], spec)
        self.specs = {**self.specs, **new}
        if self.slots is not None:
            self.slots.add_state(new)
        self.values.remember_parts({name: self.state[name] for name in new})

    def forget(self, program: DistributedProgram) -> None:
        self.ready.pop(id(program), None)
        self.counted.pop(id(program), None)

    def new_caches(self, program: DistributedProgram, pages: int, old: Caches | None = None) -> Caches:
        rank = self.transport.rank
        return {rank: new_caches(program, program.rank(rank), pages, (old or {}).get(rank, {}), self.device)}

    def weights_stay(self) -> AbstractContextManager[None]:
        self._follow_module()
        return self.linears.weights_stay({**self.state, **self.padded}[name] for name in self.parameters)

    def clip_grad_norm(self, program: DistributedProgram, max_norm: float) -> Tensor:
        gradients = {name: local_of(x) for name, x in gradients_of(self.parameters).items()}
        if id(program) not in self.counted:
            mine = {name for name in self.parameters if self._counts(program.state[name], program)}
            self.counted[id(program)] = program, mine
        counted = [gradient for name, gradient in gradients.items() if name in self.counted[id(program)][1]]
        squares = total_norm(counted, program, self.device).to(self.device) ** 2
        if self.mesh.size > 1:
            everyone = tuple(range(self.mesh.size))
            squares = self.transport.start_sum(squares, everyone, "gradient norm")()
        total = squares.sqrt()
        clip(list(gradients.values()), max_norm, total)
        return total

    def parts(
        self, program: DistributedProgram, kinds: Sequence[str] = ("parameter",)
    ) -> Iterator[tuple[StateSpec, Tensor, list[Tensor]]]:
        self._follow_module()
        for spec in program.state.values():
            if spec.kind in kinds and spec.name in self.state:
                yield spec, self.state[spec.name], list(self._true_part(spec).positions)

    def wholes(self, program: DistributedProgram, names: Sequence[str]) -> Iterator[tuple[str, Tensor | None]]:
        self._follow_module()
        for name in names:
            yield name, self._whole(program, program.state[name])

    def _whole(self, program: DistributedProgram, spec: StateSpec) -> Tensor | None:
        """Return a whole tensor on rank 0: the ranks of the first stage that has it join it, and send it there."""
        stage = program.schedule.placement[spec.stages[0]] if spec.kind == "parameter" else 0
        sender = self.mesh.rank({**dict.fromkeys(self.mesh.names, 0), **({"pp": stage} if "pp" in self.place else {})})
        whole: Tensor | None = None
        if self.place.get("pp", 0) == stage:
            local = self.state[spec.name].contiguous().to(self.device)
            part = sharded_dtensor(local, spec, program.axes, self.stage_mesh)
            whole = part.full_tensor()  # on every rank of the stage, one tensor at a time
        if sender == 0:
            return whole if self.first else None
        if self.transport.rank == sender:
            assert whole is not None
            dist.send(whole.contiguous(), 0)
        if not self.first:
            return None
        received = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        dist.recv(received, sender)
        return received

    def whole_tensors(self, program: DistributedProgram) -> OneOwnerEach:
        specs = {id(p): program.state[name] for name, p in self.parameters.items()}
        host = program.host_optimizer or any(spec.host for spec in specs.values())
        owners = OneOwnerEach(self.mesh, self.transport, program.axes, specs, self.device, self.label, host)
        self._tune()
        return owners

    def everywhere(self, program: DistributedProgram, names: Sequence[str]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, whole in self.wholes(program, names):
            spec = program.state[name]
            empty = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
            tensors[name] = empty if whole is None else whole.contiguous().clone()
            dist.broadcast(tensors[name], 0)
        return tensors

    def agree(self, claims: Mapping[str, str], fix: str = SAME_SCRIPT) -> None:
        agree(claims, self.device, fix)

    def told(self, text: str) -> tuple[str, ...]:
        return tell(text, self.device)

    @property
    def first(self) -> bool:
        return dist.get_rank() == 0

    def _counts(self, spec: StateSpec, program: DistributedProgram) -> bool:
        """Return whether this rank counts its part: one of the ranks with the same one, in the first stage with it."""
        whole = [a.name for a, k in zip(program.axes, spec.sharding, strict=True) if not isinstance(k, Shard)]
        first = program.schedule.placement[spec.stages[0]]
        return self.place.get("pp", 0) == first and all(self.place.get(axis, 0) == 0 for axis in whole)

    def _ready(self, program: DistributedProgram, inputs: Sequence[Tensor], how: Run) -> _Process:
        ready = self.ready.get(id(program))
        if ready is None:
            agree({"program": program.text}, self.device)
            self.values.require_same(program, inputs, self.state, local=how.local)
            self.transport.add_groups(_groups(program, self.mesh))
            self.transport.connect(connections_of(program.schedule, self.mesh))
            self._tune()
            ready = self.ready[id(program)] = self._new_process(program, how.train)
        else:
            self.values.look(program, inputs, how.step if how.train else None, local=how.local)
        return ready

    def _new_process(self, program: DistributedProgram, train: bool) -> _Process:
        part = program.rank(self.transport.rank)
        store = gradient_store(program, part, self.transport, self.device, self.engine) if train else None
        settled = store.settled if store else {}
        gradients = [
            sharded_dtensor(self._true_part(spec).of_padded(x), spec, program.axes, self.stage_mesh)
            for x, spec in ((x, program.state[name]) for name, x in settled.items())
        ]
        if self.mesh["pp"] > 1:
            local_values.mark_stage_gradients(dict(zip(settled, gradients, strict=True)))
        handover = HandOver([self.parameters[name] for name in settled], gradients)
        executor = Executor(program, part, self.transport, self.device, store, self.linears.wrap(program, self.engine))
        return _Process(program, executor, store, step_function(executor), handover)


@dataclass(frozen=True)
class _Process(Ready):
    """The executor of a program in this process, and the gradients that its parameters get."""

    handover: HandOver


def _groups(program: DistributedProgram, mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the groups of ranks that add up gradients."""
    trained = [spec for spec in program.state.values() if spec.trainable]
    axes = {axes(spec, program) for spec in trained for axes in (reduced_axes, scattered_axes)}
    groups = dict.fromkeys(gradient_groups(mesh, axes - {()}))
    for _, spec in sorted(program.state.items()):
        for rank in range(mesh.size):
            groups[shared_by(spec, program, rank)] = None
    return [ranks for ranks in groups if ranks]


def _stored_part(
    whole: Tensor, spec: StateSpec, axes: Sequence[Axis], place: Mapping[str, int], device: torch.device
) -> Tensor:
    """Copy this rank's part to new memory with room for the gathered value; without values on the meta device."""
    part = part_of(whole, spec.sharding, axes, place)
    room = _room(spec, axes, place, part.dtype, device)
    return room if part.is_meta else room.copy_(part)


def _room(
    spec: StateSpec, axes: Sequence[Axis], place: Mapping[str, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return memory for a part, within memory that has room for the gathered value."""
    size = spec.room([axis.size for axis in axes])
    room = host_room(size, dtype, device) if spec.host else torch.empty(size, dtype=dtype, device=device)
    resident = spec.resident if spec.in_place else spec.sharding
    later = tuple(kind if kind != now else I for kind, now in zip(spec.sharding, resident, strict=True))
    return part_of(room, later, axes, place)
