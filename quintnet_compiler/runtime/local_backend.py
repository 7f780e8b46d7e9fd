"""All ranks in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import layout
from ..errors import InputError, RunError
from ..mesh import Mesh
from ..program import DistributedProgram, StateSpec
from .backend import Caches, clip, gradients_before, hand_over, not_known, refuse_unset, total_norm
from .engines import Engine, eager
from .executor import Executor, Run
from .finite import require_finite
from .gradients import GradientStore
from .local import LocalTransport, LocalWorld
from .loss_scale import LossScale
from .state import new_caches, one_rank_mesh, part_of, whole_dtensor, whole_parameter
from .watch import Watch


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
        self.ready: dict[int, _Ready] = {}
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
        refuse_unset(self.unset, program)
        how = self.scaler.run(program, how)
        old, given = gradients_before(self.parameters, how), caches or {}
        # here and not in each rank: ranks take turns in one thread, and would undo each other's mode
        with torch.no_grad():
            ready = self._ready(program, how.train)
            watches: Sequence[Watch | None] = watch or [None] * self.mesh.size
            try:
                outputs = ready.world.run(
                    {
                        rank: self._rank(ready, rank, inputs, how, watch, given.get(rank, {}))
                        for rank, watch in enumerate(watches)
                    }
                )
            except RunError:
                for name, gradient in old.items():
                    self.parameters[name].grad = gradient
                raise
            if how.train:
                executors = ready.executors.values()
                self.scaler.update(how, finite=all(one.finite for one in executors) or not how.may_skip)
                made = ready.gradients or self._wholes_of([one.settled for one in executors], program)
                hand_over(self.parameters, made, old, skipped=self.scaler.skipped)
        results: list[Tensor] = outputs[0]
        return results

    def learn(self, program: DistributedProgram, tensors: Mapping[str, Tensor]) -> None:
        device = _device_of(self.tensors)
        for name in not_known(program, self.tensors):
            self.tensors[name] = tensors[name].detach().to(device)

    def new_caches(self, program: DistributedProgram) -> Caches:
        device = _device_of(self.tensors)
        return {rank: new_caches(program, program.rank(rank), device) for rank in range(self.mesh.size)}

    def clip_grad_norm(self, program: DistributedProgram, max_norm: float) -> Tensor:
        gradients = [p.grad.to_local() for p in self.parameters.values() if p.grad is not None]  # type: ignore[attr-defined]
        total = total_norm(gradients, program, _device_of(self.tensors))
        clip(gradients, max_norm, total)
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

    def _ready(self, program: DistributedProgram, train: bool) -> _Ready:
        """One rank alone stays ready; several would hold gradients several times."""
        found = self.ready.get(id(program))
        if found is None:
            world, device = LocalWorld(self.mesh, program.sites), _device_of(self.tensors)
            executors, states = {}, {}
            for rank in range(self.mesh.size):
                part, transport = program.rank(rank), world.transport(rank)
                store = GradientStore(program, part, transport, device) if train else None
                executors[rank] = Executor(program, part, transport, device, store, self.engine)
                states[rank] = {
                    name: part_of(self.tensors[name], spec.sharding, program.axes, part.coordinate)
                    for name, spec in program.state.items()
                    if spec.kind != "cache"
                }
            found = _Ready(program, world, executors, states, {})
            if self.mesh.size == 1:
                found.gradients.update({n: whole_dtensor(x, self.devices) for n, x in executors[0].settled.items()})
                self.ready[id(program)] = found
        return found

    def _rank(  # type: ignore[no-untyped-def]
        self,
        ready: _Ready,
        rank: int,
        inputs: Sequence[Tensor],
        how: Run,
        watch: Watch | None,
        caches: Mapping[str, Tensor],
    ):
        def work(_: LocalTransport) -> list[Tensor]:
            executor, state = ready.executors[rank], {**ready.states[rank], **caches}
            program = ready.program
            mine = [
                part_of(x, spec.sharding, program.axes, executor.part.coordinate)
                for x, spec in zip(inputs, program.inputs, strict=True)
            ]
            results = executor.step(state, mine, how, watch)
            if not executor.finite and not how.may_skip:
                require_finite(executor, state, mine, how, results[0])
            return results

        return work

    def _wholes_of(self, settled: Sequence[Mapping[str, Tensor]], program: DistributedProgram) -> dict[str, Tensor]:
        """Gradients put together from those of all ranks."""
        space = [(i, axis) for i, axis in enumerate(program.axes) if axis.role != "time"]
        wholes: dict[str, Tensor] = {}
        for name in self.parameters:
            parts: dict[tuple[int, ...], Tensor] = {}
            for rank, found in enumerate(settled):
                place = self.mesh.coordinate(rank)
                key = tuple(place.get(axis.name, 0) for _, axis in space)
                if name in found and key not in parts:
                    parts[key] = found[name]
            if parts:
                kinds = tuple(program.state[name].sharding[i] for i, _ in space)
                whole = layout.assemble(parts, kinds, [axis.size for _, axis in space])
                wholes[name] = whole_dtensor(whole, self.devices)
        return wholes


@dataclass(frozen=True)
class _Ready:
    """What running a program needs. ``gradients``: of one rank alone, views of its store's buffers."""

    program: DistributedProgram
    world: LocalWorld
    executors: dict[int, Executor]
    states: dict[int, dict[str, Tensor]]
    gradients: dict[str, Tensor]


def _device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    return next((x.device for x in tensors.values()), torch.device("cpu"))
