"""All ranks in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor, nn

from ...compat.torch_codegen import SHIPPED
from ...core import slices
from ...core.errors import InputError, RunError
from ...core.mesh import Mesh
from ...core.sharding import Shard
from ...ir.distributed_program import DistributedProgram, StateSpec, ValueSpec
from ..execute.engines import Engine, eager
from ..execute.executor import Executor, Run
from ..execute.gradient_kernels import gradient_store
from ..execute.host_linears import HostLinears
from ..execute.interpreter_trace import Watch
from ..execute.loss_scale import LossScale
from ..execute.record import Recorder
from ..execute.whole_steps import step_function
from ..state.changed_state import split_results, written_state
from ..state.grad_handoff import HandOver, Old
from ..state.gradients import too_many_gradients
from ..state.module_parameters import Slots, WholeTensor, check_fits, like, move_tensor, whole_parameter
from ..state.state import new_caches, part_of
from ..transport.local import LocalTransport, LocalWorld
from .backend import Caches, Ready, clip, gradients_of, home_of, new_constants, refuse_unset, running_on, total_norm
from .whole_state import WholeState


def require_measure(mesh: Mesh) -> None:
    """Raise QN301 if several ranks in this process would be measured."""
    if mesh.size > 1:
        raise RunError(
            "QN301",
            f"the {mesh.size} ranks of {mesh} take turns in this process: their times say nothing",
            fix="measure in processes: quintnet measure, quintnet.launch or torchrun",
        )


class LocalBackend(WholeState):
    """All ranks in this process. Parameters are whole, and the module's own."""

    def __init__(
        self,
        mesh: Mesh,
        program: DistributedProgram,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        engine: Engine = eager,
        slots: Slots | None = None,
    ) -> None:
        self.mesh, self.device, self.engine, self.scaler = mesh, device, engine, LossScale.initial(program)
        self.linears = HostLinears()
        self.slots, self.specs = slots, program.state
        self.worlds: dict[int, _LocalRanks] = {}
        self.unset = {name for name, x in tensors.items() if x.is_meta}
        self.tensors: dict[str, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        for name in [*(name for name in program.state if name in tensors), *tensors.keys() - program.state.keys()]:
            self._take(name, tensors[name], self.specs.get(name))
        if slots is not None:
            slots.replace_tensors({**self.tensors, **self.parameters})

    def _take(self, name: str, x: Tensor, spec: StateSpec | None) -> None:
        """Read this tensor of the module from now on."""
        if spec is not None and spec.kind == "parameter":
            self.parameters[name] = whole_parameter(x, self.device, trainable=spec.trainable, host=spec.host)
            self.tensors[name] = Tensor.detach(self.parameters[name])
        elif x.is_meta:
            self.tensors[name] = SHIPPED.empty_like(x, device=self.device)
        else:
            if spec is not None and spec.kind == "buffer":
                x = move_tensor(x, self.device)
            self.tensors[name] = x.detach().to(self.device)

    def _follow_module(self) -> None:
        """Read tensors that were assigned to the module since, or raise QN112 if they do not fit the program."""
        if self.slots is None or self.slots.same:
            return
        changed = self.slots.changed()
        for name, x in changed.items():
            check_fits(name, x, self.specs[name], home_of(self.specs[name], self.device))
        for name, x in changed.items():
            self._take(name, x, self.specs[name])
            self.unset.discard(name)
        self.worlds = {}
        self.slots.look()

    def run(
        self,
        program: DistributedProgram,
        inputs: Sequence[Tensor],
        how: Run,
        watch: Sequence[Watch] | None = None,
        *,
        caches: Caches | None = None,
        recorder: Recorder | None = None,
    ) -> list[Tensor]:
        """Run as :meth:`Backend.run`; ``watch``: an observer of each rank."""
        if recorder is not None:
            require_measure(self.mesh)
        if how.local and self.mesh.data_ways > 1:
            raise InputError(
                "QN102",
                "batch_is_local was given where all data ranks run in this process",
                fix="pass the global batch",
            )
        self._follow_module()
        refuse_unset(self.unset, program)
        how = self.scaler.with_scale(program, how)
        # here and not in each rank: ranks take turns in one thread, and would undo each other's mode
        with torch.no_grad(), running_on(self.device):
            ready = self._world(program, how.train)
            old = ready.handover.take_gradients() if how.train else None
            if how.train and ready.handover.kept:
                del self.worlds[id(program)]
                ready = self._world(program, how.train)
            try:
                outputs = self._run_ranks(ready, inputs, how, watch, caches or {}, recorder)
            except RunError:
                if old is not None:
                    ready.handover.set_gradients(old)
                raise
            if how.train:
                self.scaler.update(how, finite=all(good for _, good in outputs.values()))
                self._hand_over(ready, program, old)
            results, new = split_results(program, outputs[0][0], self.tensors)
            for position, spec in program.stored.items():
                new[spec.name] = self._assembled(
                    program, spec, [outputs[rank][0][position] for rank in sorted(outputs)]
                )
            self._write(program, new)
        return results

    def _hand_over(self, ready: _LocalRanks, program: DistributedProgram, old: Old | None) -> None:
        """Give parameters the gradients of a step, or none if it is skipped."""
        if self.scaler.skipped:
            ready.handover.set_gradients(repeat(None))
        else:
            self._join(ready, program)
            ready.handover.give(old)

    def _run_ranks(
        self,
        ready: _LocalRanks,
        inputs: Sequence[Tensor],
        how: Run,
        watch: Sequence[Watch] | None,
        caches: Caches,
        recorder: Recorder | None,
    ) -> dict[int, tuple[list[Tensor], bool]]:
        """Return each rank's results, and whether its gradients are finite."""
        watches: Sequence[Watch | None] = watch or [None] * self.mesh.size
        functions = {
            rank: self._rank(ready, rank, inputs, how, observer, caches.get(rank, {}), recorder)
            for rank, observer in enumerate(watches)
        }
        return ready.world.run_ranks(functions)

    def _write(self, program: DistributedProgram, new: Mapping[str, Tensor]) -> None:
        """Keep the new values of buffers and parameters."""
        if program.stored:
            self.linears.changed()
        now = written_state(program, new, self.tensors) if new else {}
        assigned = {name: x for name, x in now.items() if name in program.captured.assigned}
        self.tensors |= assigned
        if self.slots is not None and assigned:
            self.slots.assign(assigned)
        for world in self.worlds.values() if assigned else ():
            for ready, state in zip(world.ranks, world.state, strict=True):
                place = ready.executor.part.coordinate
                for name in assigned.keys() & state.keys():
                    state[name] = part_of(assigned[name], ready.program.state[name].sharding, ready.program.axes, place)

    def learn(self, program: DistributedProgram, tensors: Mapping[str, Tensor]) -> None:
        new = {name: program.state[name] for name in new_constants(program, self.tensors)}
        for name, spec in new.items():
            self._take(name, tensors[name], spec)
        self.specs = {**self.specs, **new}
        if self.slots is not None:
            self.slots.add_state(new)

    def forget(self, program: DistributedProgram) -> None:
        self.worlds.pop(id(program), None)

    def new_caches(self, program: DistributedProgram, pages: int, old: Caches | None = None) -> Caches:
        return {
            rank: new_caches(program, program.rank(rank), pages, (old or {}).get(rank, {}), self.device)
            for rank in range(self.mesh.size)
        }

    def weights_stay(self) -> AbstractContextManager[None]:
        self._follow_module()
        return self.linears.weights_stay(self.tensors[name] for name in self.parameters)

    def clip_grad_norm(self, program: DistributedProgram, max_norm: float) -> Tensor:
        gradients = list(gradients_of(self.parameters).values())
        total = total_norm(gradients, program, self.device)
        clip(gradients, max_norm, total)
        return total

    def _rank(  # type: ignore[no-untyped-def]
        self,
        world: _LocalRanks,
        rank: int,
        inputs: Sequence[Tensor],
        how: Run,
        watch: Watch | None,
        caches: Mapping[str, Tensor],
        recorder: Recorder | None,
    ):
        ready = world.ranks[rank]
        program, place = ready.program, ready.executor.part.coordinate

        def part(x: Tensor, spec: StateSpec | ValueSpec) -> Tensor:
            home = home_of(spec, self.device) if isinstance(spec, StateSpec) else self.device
            return part_of(x, spec.sharding, program.axes, place).to(home)

        def work(_: LocalTransport) -> tuple[list[Tensor], bool]:
            cut = {name: part(self.tensors[name], program.state[name]) for name in world.cut}
            mine = [part(x, spec) for x, spec in zip(inputs, program.inputs, strict=True)]
            return ready.step({**world.state[rank], **cut, **caches}, mine, how, watch, recorder)

        return work

    def _world(self, program: DistributedProgram, train: bool) -> _LocalRanks:
        """Return the ranks of ``program``, set up once.

        Only one program at a time has memory for gradients, beside a few whose graphs write theirs.
        """
        if id(program) not in self.worlds:
            if train:
                self._free_gradients()
            self.worlds[id(program)] = self._new_world(program, train)
        return self.worlds[id(program)]

    def _free_gradients(self) -> None:
        stores = {key: world.ranks[0].store for key, world in self.worlds.items()}
        surplus = too_many_gradients(stores)
        kept = {key for key, store in stores.items() if store is None or store.stays}
        self.worlds = {key: world for key, world in self.worlds.items() if key in kept.difference(surplus)}

    def _new_world(self, program: DistributedProgram, train: bool) -> _LocalRanks:
        world, device, ranks = LocalWorld(self.mesh, program.sites), self.device, []
        state: list[dict[str, Tensor]] = []
        specs = [spec for spec in program.state.values() if spec.kind != "cache"]
        for rank in range(self.mesh.size):
            part, transport = program.rank(rank), world.transport(rank)
            store = gradient_store(program, part, transport, device, self.engine) if train else None
            engine = self.linears.wrap(program, self.engine)
            executor = Executor(program, part, transport, device, store, engine)
            ranks.append(Ready(program, executor, store, step_function(executor)))
            state.append(
                {s.name: part_of(self.tensors[s.name], s.sharding, program.axes, part.coordinate) for s in specs}
            )
        cut = [s.name for s in specs if not all(_views(mine[s.name], self.tensors[s.name]) for mine in state)]
        settled = {name: x for ready in reversed(ranks) if ready.store for name, x in ready.store.settled.items()}
        joined = {
            name: torch.empty(program.state[name].shape, dtype=x.dtype, device=x.device)
            for name, x in settled.items()
            if any(isinstance(kind, Shard) for kind in program.state[name].sharding)
        }
        parameters = [self.parameters[name] for name in settled]
        gradients = [like(joined.get(name, x), WholeTensor) for name, x in settled.items()]
        return _LocalRanks(world, ranks, state, cut, joined, HandOver(parameters, gradients))

    def _join(self, ready: _LocalRanks, program: DistributedProgram) -> None:
        """Assemble the whole gradients from the ranks' parts."""
        for name, whole in ready.joined.items():
            stores = [rank.store for rank in ready.ranks]
            settled = [None if store is None else store.settled.get(name) for store in stores]
            whole.copy_(self._assembled(program, program.state[name], settled))

    def _assembled(self, program: DistributedProgram, spec: StateSpec, each: Sequence[Tensor | None]) -> Tensor:
        """Return the whole tensor from the part of ``each`` rank, laid out as ``spec``; None or meta: it has none."""
        space = [(i, axis) for i, axis in enumerate(program.axes) if axis.role != "time"]
        parts: dict[tuple[int, ...], Tensor] = {}
        for rank, part in enumerate(each):
            place = self.mesh.coordinate(rank)
            if part is not None and not part.is_meta:
                parts.setdefault(tuple(place.get(axis.name, 0) for _, axis in space), part)
        kinds = tuple(spec.sharding[i] for i, _ in space)
        return slices.assemble(parts, kinds, [axis.size for _, axis in space], spec.shape)


@dataclass(frozen=True)
class _LocalRanks:
    """All ranks of a program in this process, and the world that they run in.

    ``state``: each rank's parts. ``cut``: the names of those that are no views, and are cut again in each run.
    ``joined``: whole gradients of which several ranks have parts.
    """

    world: LocalWorld
    ranks: Sequence[Ready]
    state: Sequence[dict[str, Tensor]]
    cut: Sequence[str]
    joined: Mapping[str, Tensor]
    handover: HandOver


def _views(part: Tensor, whole: Tensor) -> bool:
    """Return whether ``part`` changes with ``whole``."""
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
