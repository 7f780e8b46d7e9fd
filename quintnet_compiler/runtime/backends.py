"""Where ranks run: all in this process, or one per process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import layout
from ..errors import InputError, RunError
from ..mesh import Mesh
from ..program import Axis, DistributedProgram, StateSpec
from ..sharding import I, Shard
from .buckets import reduced_axes, scattered_axes
from .distributed import DistributedTransport, device_mesh, gradient_groups
from .engines import Engine, eager
from .executor import Executor, Run
from .finite import require_finite
from .gradients import GradientStore, shared_by
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


def _add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """As autograd does: set, or add to what is there."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


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
        world = LocalWorld(self.mesh, program.sites)
        # here and not in each rank: ranks take turns in one thread, and would undo each other's mode
        with torch.no_grad():
            watches: Sequence[Watch | None] = watch or [None] * self.mesh.size
            given = caches or {}
            outputs = world.run(
                {r: self._rank(program, r, inputs, how, w, given.get(r, {})) for r, w in enumerate(watches)}
            )
            if how.train:
                self.scaler.update(how, finite=all(found is not None for _, found in outputs.values()))
                self._gather([found for _, found in outputs.values() if found is not None], program)
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
        gradients = [p.grad.to_local() for p in self.parameters.values() if p.grad is not None]  # type: ignore[attr-defined]
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
        program: DistributedProgram,
        rank: int,
        inputs: Sequence[Tensor],
        how: Run,
        watch: Watch | None,
        caches: Mapping[str, Tensor],
    ):
        def work(transport: LocalTransport) -> tuple[list[Tensor], Mapping[str, Tensor] | None]:
            part, device = program.rank(rank), _device_of(self.tensors)
            store = GradientStore(program, part, transport, device) if how.train else None
            state = {
                name: part_of(self.tensors[name], spec.sharding, program.axes, part.coordinate)
                for name, spec in program.state.items()
                if spec.kind != "cache"
            } | dict(caches)
            mine = [
                part_of(x, spec.sharding, program.axes, part.coordinate)
                for x, spec in zip(inputs, program.inputs, strict=True)
            ]
            executor = Executor(program, part, transport, device, store, self.engine)
            results = executor.step(state, mine, how, watch)
            if not executor.finite and how.may_skip:
                return results, None
            if not executor.finite:
                require_finite(executor, state, mine, how, results[0])
            return results, store.settled if store else {}

        return work

    def _gather(self, gradients: Sequence[Mapping[str, Tensor]], program: DistributedProgram) -> None:
        space = [(i, axis) for i, axis in enumerate(program.axes) if axis.role != "time"]
        for name, parameter in self.parameters.items():
            spec = program.state.get(name)
            if self.scaler.skipped:
                parameter.grad = None
            if spec is None or not any(name in g for g in gradients):
                continue
            parts: dict[tuple[int, ...], Tensor] = {}
            for rank, found in enumerate(gradients):
                place = self.mesh.coordinate(rank)
                key = tuple(place.get(axis.name, 0) for _, axis in space)
                if name in found and key not in parts:
                    parts[key] = found[name]
            kinds = tuple(spec.sharding[i] for i, _ in space)
            whole = layout.assemble(parts, kinds, [axis.size for _, axis in space])
            _add_gradient(parameter, whole_dtensor(whole, self.devices))  # in buckets that no other step uses


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
        self.ready: dict[int, _Ready] = {}
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
        old = {n: p.grad.clone() for n, p in self.parameters.items() if how.train and p.grad is not None}
        # rows that are already this data rank's are not split again
        axes = [replace(a, size=1) if how.local and a.role == "data" else a for a in program.axes]
        place = {**self.place, **({"dp": 0, "ep": 0} if how.local else {})}
        mine = [
            part_of(x, spec.sharding, axes, place).to(self.device)
            for x, spec in zip(inputs, program.inputs, strict=True)
        ]
        state = {**self.state, **(caches or {}).get(self.transport.rank, {})}
        with torch.no_grad():
            try:
                results = ready.executor.step(state, mine, how)
                if not ready.executor.finite and not how.may_skip:
                    require_finite(ready.executor, state, mine, how, results[0])
            except RunError:
                for name, gradient in old.items():
                    self.parameters[name].grad = gradient
                raise
            if how.train:
                self.scaler.update(how, finite=ready.executor.finite or not how.may_skip)
            for name, gradient in ready.gradients.items():
                found = gradient if name not in old else old[name] + gradient
                self.parameters[name].grad = None if self.scaler.skipped else found
        return results

    def learn(self, program: DistributedProgram, tensors: Mapping[str, Tensor]) -> None:
        for name in _unknown(program, self.state):
            spec = program.state[name]
            self.state[name] = _kept(tensors[name].detach(), spec, program.axes, self.place, self.device)

    def new_caches(self, program: DistributedProgram) -> Caches:
        rank = self.transport.rank
        return {rank: new_caches(program, program.rank(rank), self.device)}

    def clip_grad_norm(self, program: DistributedProgram, max_norm: float) -> Tensor:
        gradients = {n: p.grad.to_local() for n, p in self.parameters.items() if p.grad is not None}  # type: ignore[attr-defined]
        counted = [g for name, g in gradients.items() if self._counts(program.state[name], program)]
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

    def _ready(self, program: DistributedProgram, train: bool) -> _Ready:
        found = self.ready.get(id(program))
        if found is None:
            agree({"program": program.digest}, self.device)
            self.transport.add_groups(_groups(program, self.mesh))
            rank = self.transport.rank
            store = GradientStore(program, program.rank(rank), self.transport, self.device) if train else None
            gradients = {
                name: sharded_dtensor(gradient, program.state[name], program, self.stage_mesh)
                for name, gradient in (store.settled.items() if store else ())
            }
            executor = Executor(program, program.rank(rank), self.transport, self.device, store, self.engine)
            found = self.ready[id(program)] = _Ready(program, executor, store, gradients)
        return found


@dataclass(frozen=True)
class _Ready:
    """What running a program again and again needs. ``gradients`` are views of the store's buffers."""

    program: DistributedProgram
    executor: Executor
    store: GradientStore | None
    gradients: Mapping[str, Tensor]


def _norm(gradients: Sequence[Tensor], program: DistributedProgram, device: torch.device) -> Tensor:
    """The L2 norm of all elements: in float64 if any parameter of the program is, else in float32."""
    double = any(spec.dtype is torch.float64 for spec in program.state.values())
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
