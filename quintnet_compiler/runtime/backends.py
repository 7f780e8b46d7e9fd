"""Where ranks run: all in this process, or one per process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import attrgetter
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import layout
from ..errors import InputError, RunError
from ..mesh import Mesh
from ..program import Axis, DistributedProgram, StateSpec, ValueSpec
from ..sharding import I, Shard
from .buckets import reduced_axes, scattered_axes
from .distributed import DistributedTransport, device_mesh, gradient_groups
from .engines import Engine, eager
from .executor import Executor, Run
from .finite import require_finite
from .gradients import GradientStore, shared_by
from .handover import HandOver
from .handshake import agree, tell
from .local import LocalTransport, LocalWorld
from .loss_scale import LossScale
from .state import new_caches, one_rank_mesh, part_of, sharded_dtensor, whole_dtensor, whole_parameter
from .watch import Watch

Caches = Mapping[int, Mapping[str, Tensor]]  # of each rank of this process, by name


class Backend(Protocol):
    """Holds state and runs programs."""

    scaler: LossScale
    unset: set[str]  # tensors (of all ranks) that nobody gave values yet: with any of them, nothing runs

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...

    def run(
        self, program: DistributedProgram, inputs: Sequence[Tensor], how: Run, *, caches: Caches | None = None
    ) -> list[Tensor]:
        """One step over the whole batch. The result is the same on every rank. What the program keeps from run to run
        is in ``caches``."""
        ...

    def learn(self, program: DistributedProgram, tensors: Mapping[str, Tensor]) -> None:
        """Take those constants of ``program`` that the first program did not have; ``tensors``: their values."""
        ...

    def new_caches(self, program: DistributedProgram) -> Caches:
        """Room for what the ranks of this process keep from one run of ``program`` to the next."""
        ...

    def clip_grad_norm(self, program: DistributedProgram, max_norm: float) -> Tensor:
        """Scale all gradients to a global L2 norm of at most ``max_norm``; returns the norm before."""
        ...

    def parts(
        self, program: DistributedProgram, kinds: Sequence[str] = ("parameter",)
    ) -> Iterator[tuple[StateSpec, Tensor, list[Tensor]]]:
        """Each parameter that this process holds a part of: the storage, and the global indices of each dim in it."""
        ...

    def wholes(self, program: DistributedProgram, names: Sequence[str]) -> Iterator[tuple[str, Tensor | None]]:
        """Each of these tensors in turn, whole on the first rank; None on the others, which must ask for as many."""
        ...

    def agree(self, claims: Mapping[str, str]) -> None:
        """Raises: RunError QN403 on every rank if their claims differ."""
        ...

    def told(self, text: str) -> tuple[str, ...]:
        """What every rank has to tell (the start of it, if it is long), in their order."""
        ...

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files."""
        ...


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


@dataclass(frozen=True)
class _Ready:
    """What running a program again and again needs, on one rank. ``store``: None for forwards alone."""

    program: DistributedProgram
    executor: Executor
    store: GradientStore | None

    def step(
        self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], how: Run, watch: Watch | None = None
    ) -> tuple[list[Tensor], bool]:
        """The results, and whether the gradients are good: if not, their scale was too large.

        Raises:
            RunError: QN501 on every rank where the scale is not to blame.
        """
        results = self.executor.step(state, inputs, how, watch)
        if not self.executor.finite and not how.may_skip:
            require_finite(self.executor, state, inputs, how, results[0])
        return results, self.executor.finite or not how.may_skip


@dataclass(frozen=True)
class _World:
    """All ranks of a program in this process, and what they meet in. ``state``: each rank's parts; ``cut``: the names
    of those that are no views, and have to be cut again; ``joined``: whole gradients whose parts several ranks have."""

    world: LocalWorld
    ranks: Sequence[_Ready]
    state: Sequence[Mapping[str, Tensor]]
    cut: Sequence[str]
    joined: Mapping[str, Tensor]
    handover: HandOver


class LocalBackend:
    """All ranks in this process. Parameters are whole and share the module's memory."""

    def __init__(
        self,
        mesh: Mesh,
        program: DistributedProgram,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        engine: Engine = eager,
    ) -> None:
        self.mesh, self.engine, self.scaler = mesh, engine, LossScale.of(program)
        self.devices = one_rank_mesh(device.type)
        self.worlds: dict[int, _World] = {}
        self.unset = {name for name, x in tensors.items() if x.is_meta}
        self.tensors = {
            name: torch.empty_like(x, device=device) if x.is_meta else x.detach().to(device)
            for name, x in tensors.items()
        }
        self.parameters = {
            name: whole_parameter(self.tensors[name], self.devices, trainable=spec.trainable)
            for name, spec in program.state.items()
            if spec.kind == "parameter"
        }

    def run(
        self,
        program: DistributedProgram,
        inputs: Sequence[Tensor],
        how: Run,
        watch: Sequence[Watch] | None = None,
        *,
        caches: Caches | None = None,
    ) -> list[Tensor]:
        """As :meth:`Backend.run`; ``watch``: who looks at each rank from inside."""
        if how.local and self.mesh.data_ways > 1:
            raise InputError(
                "QN102",
                "batch_is_local was given where all data ranks run in this process",
                fix="pass the global batch",
            )
        _refuse_unset(self.unset, program)
        how = self.scaler.run(program, how)
        # here and not in each rank: ranks take turns in one thread, and would undo each other's mode
        with torch.no_grad():
            ready = self._world(program, how.train)
            old = ready.handover.take() if how.train else None
            if how.train and ready.handover.kept:
                del self.worlds[id(program)]
                ready = self._world(program, how.train)
            try:
                watches: Sequence[Watch | None] = watch or [None] * self.mesh.size
                given = caches or {}
                outputs = ready.world.run(
                    {r: self._rank(ready, r, inputs, how, w, given.get(r, {})) for r, w in enumerate(watches)}
                )
            except RunError:
                if old is not None:
                    ready.handover.put(old)
                raise
            if how.train:
                self.scaler.update(how, finite=all(good for _, good in outputs.values()))
                if self.scaler.skipped:
                    ready.handover.put(repeat(None))
                else:
                    self._join(ready, program)
                    ready.handover.give(old)
        results: list[Tensor] = outputs[0][0]
        return results

    def learn(self, program: DistributedProgram, tensors: Mapping[str, Tensor]) -> None:
        device = _device_of(self.tensors)
        for name in _unknown(program, self.tensors):
            self.tensors[name] = tensors[name].detach().to(device)

    def new_caches(self, program: DistributedProgram) -> Caches:
        device = _device_of(self.tensors)
        return {rank: new_caches(program, program.rank(rank), device) for rank in range(self.mesh.size)}

    def clip_grad_norm(self, program: DistributedProgram, max_norm: float) -> Tensor:
        gradients = list(_gradients(self.parameters).values())
        total = _norm(gradients, program, _device_of(self.tensors))
        _scale(gradients, max_norm, total)
        return total

    def parts(
        self, program: DistributedProgram, kinds: Sequence[str] = ("parameter",)
    ) -> Iterator[tuple[StateSpec, Tensor, list[Tensor]]]:
        for spec in program.state.values():
            if spec.kind in kinds:
                yield spec, self.tensors[spec.name], layout.positions(spec.shape, (), (), ())

    def wholes(self, program: DistributedProgram, names: Sequence[str]) -> Iterator[tuple[str, Tensor | None]]:
        for name in names:
            yield name, self.tensors[name]

    def agree(self, claims: Mapping[str, str]) -> None:
        pass

    def told(self, text: str) -> tuple[str, ...]:
        return (text,)

    @property
    def first(self) -> bool:
        return True

    def _rank(  # type: ignore[no-untyped-def]
        self,
        world: _World,
        rank: int,
        inputs: Sequence[Tensor],
        how: Run,
        watch: Watch | None,
        caches: Mapping[str, Tensor],
    ):
        ready = world.ranks[rank]
        program, place = ready.program, ready.executor.part.coordinate

        def part(x: Tensor, spec: StateSpec | ValueSpec) -> Tensor:
            return part_of(x, spec.sharding, program.axes, place)

        def work(_: LocalTransport) -> tuple[list[Tensor], bool]:
            cut = {name: part(self.tensors[name], program.state[name]) for name in world.cut}
            mine = [part(x, spec) for x, spec in zip(inputs, program.inputs, strict=True)]
            return ready.step({**world.state[rank], **cut, **caches}, mine, how, watch)

        return work

    def _world(self, program: DistributedProgram, train: bool) -> _World:
        """What runs ``program``: made once, but that only one program at a time has memory for gradients."""
        if id(program) not in self.worlds:
            self.worlds = {key: w for key, w in self.worlds.items() if not train or w.ranks[0].store is None}
            self.worlds[id(program)] = self._new_world(program, train)
        return self.worlds[id(program)]

    def _new_world(self, program: DistributedProgram, train: bool) -> _World:
        world, device, ranks = LocalWorld(self.mesh, program.sites), _device_of(self.tensors), []
        state: list[dict[str, Tensor]] = []
        kept = [spec for spec in program.state.values() if spec.kind != "cache"]
        for rank in range(self.mesh.size):
            part, transport = program.rank(rank), LocalTransport(world, rank)
            store = GradientStore(program, part, transport, device) if train else None
            ranks.append(_Ready(program, Executor(program, part, transport, device, store, self.engine), store))
            state.append(
                {s.name: part_of(self.tensors[s.name], s.sharding, program.axes, part.coordinate) for s in kept}
            )
        cut = [s.name for s in kept if not all(_views(mine[s.name], self.tensors[s.name]) for mine in state)]
        settled = {name: x for one in reversed(ranks) if one.store for name, x in one.store.settled.items()}
        joined = {
            name: torch.empty(program.state[name].shape, dtype=x.dtype, device=device)
            for name, x in settled.items()
            if any(isinstance(kind, Shard) for kind in program.state[name].sharding)
        }
        parameters = [self.parameters[name] for name in settled]
        gradients = [whole_dtensor(joined.get(name, x), self.devices) for name, x in settled.items()]
        return _World(world, ranks, state, cut, joined, HandOver(parameters, gradients))

    def _join(self, ready: _World, program: DistributedProgram) -> None:
        """Whole gradients of the parts that ranks have."""
        space = [(i, axis) for i, axis in enumerate(program.axes) if axis.role != "time"]
        for name, whole in ready.joined.items():
            parts: dict[tuple[int, ...], Tensor] = {}
            for rank, one in enumerate(ready.ranks):
                place = self.mesh.coordinate(rank)
                key = tuple(place.get(axis.name, 0) for _, axis in space)
                if one.store is not None and name in one.store.settled and key not in parts:
                    parts[key] = one.store.settled[name]
            kinds = tuple(program.state[name].sharding[i] for i, _ in space)
            whole.copy_(layout.assemble(parts, kinds, [axis.size for _, axis in space]))


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

    def _owned(self, program: DistributedProgram) -> Iterator[str]:
        here = self.place.get("pp", 0)
        for name, spec in program.state.items():
            if any(program.schedule.placement[stage] == here for stage in spec.stages):
                yield name

    def run(
        self, program: DistributedProgram, inputs: Sequence[Tensor], how: Run, *, caches: Caches | None = None
    ) -> list[Tensor]:
        _refuse_unset(self.unset, program)
        ready, how = self._ready(program, how.train), self.scaler.run(program, how)
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
                results, good = ready.step(state, mine, how)
            except RunError:
                if old is not None:
                    ready.handover.put(old)
                raise
            if how.train:
                self.scaler.update(how, finite=good)
                ready.handover.put(repeat(None)) if self.scaler.skipped else ready.handover.give(old)
        return results

    def learn(self, program: DistributedProgram, tensors: Mapping[str, Tensor]) -> None:
        for name in _unknown(program, self.state):
            spec = program.state[name]
            self.state[name] = _kept(tensors[name].detach(), spec, program.axes, self.place, self.device)

    def new_caches(self, program: DistributedProgram) -> Caches:
        rank = self.transport.rank
        return {rank: new_caches(program, program.rank(rank), self.device)}

    def clip_grad_norm(self, program: DistributedProgram, max_norm: float) -> Tensor:
        gradients = _gradients(self.parameters)
        if id(program) not in self.counted:
            mine = {name for name in self.parameters if self._counts(program.state[name], program)}
            self.counted[id(program)] = program, mine
        counted = [gradient for name, gradient in gradients.items() if name in self.counted[id(program)][1]]
        squares = _norm(counted, program, self.device) ** 2
        if self.mesh.size > 1:
            everyone = tuple(range(self.mesh.size))
            squares = self.transport.start_sum(squares, everyone, "gradient norm")()
        total = squares.sqrt()
        _scale(list(gradients.values()), max_norm, total)
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

    def _ready(self, program: DistributedProgram, train: bool) -> _Process:
        found = self.ready.get(id(program))
        if found is None:
            agree({"program": program.digest}, self.device)
            self.transport.add_groups(_groups(program, self.mesh))
            found = self.ready[id(program)] = self._made(program, train)
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
class _Process(_Ready):
    """The same, with what parameters get."""

    handover: HandOver


def _gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """This process's parts of the gradients that there are."""
    there = zip(parameters, map(attrgetter("grad"), parameters.values()), strict=True)
    return {name: gradient._local_tensor for name, gradient in there if gradient is not None}


def _norm(gradients: Sequence[Tensor], program: DistributedProgram, device: torch.device) -> Tensor:
    """The L2 norm of all elements: in float64 if any parameter of the program is, else in float32."""
    double = torch.float64 in set(map(attrgetter("dtype"), program.state.values()))
    dtype = torch.float64 if double else torch.float32
    if not gradients:
        return torch.zeros((), dtype=dtype, device=device)
    total: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))).to(dtype))
    return total


def _scale(gradients: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
    """As torch.nn.utils.clip_grad_norm_ does."""
    if not gradients:  # of a step that was skipped
        return
    torch._foreach_mul_(list(gradients), torch.clamp(max_norm / (total + 1e-6), max=1.0).to(gradients[0].dtype))


def _views(part: Tensor, whole: Tensor) -> bool:
    """Whether ``part`` changes with ``whole``."""
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    return next((x.device for x in tensors.values()), torch.device("cpu"))


def _unknown(program: DistributedProgram, known: Mapping[str, Tensor]) -> list[str]:
    kinds = ("buffer", "constant")
    return [spec.name for spec in program.state.values() if spec.kind in kinds and spec.name not in known]


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


def _refuse_unset(unset: set[str], program: DistributedProgram) -> None:
    names = sorted(unset & program.state.keys())
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise RunError(
            "QN604",
            f"nobody gave (all of its) values to {', '.join(names[:8])}{more}",
            fix="call program.load_pretrained(folder) or program.initialize({...})",
        )
