"""Executes one rank's actions. There is no second copy of the schedule: the list is the program."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ...core import slices
from ...core.sharding import P, Shard, local_shape
from ...ir.distributed_program import DistributedProgram, RankProgram, Slice, StageProgram, StateSpec, ValueSpec
from ...schedules.schedule import Action, Op
from ...schedules.sends import arrived_sends
from ..launch.preemption import Preemption
from ..state.gradients import GradientStore
from ..transport.disk_copies import DiskCopies
from ..transport.host_copies import HostCopies
from ..transport.transport import GRADIENTS, VALUES, Transport, Wait
from .comm import Comm
from .engines import Engine, eager, engine_of_parameters
from .interpreter_trace import Watch, run_watched


@dataclass(frozen=True)
class Run:
    """How to run a program once: ``train`` makes gradients; ``local`` inputs are this data rank's rows; ``seed`` and
    ``step`` are what random masks depend on; ``check_finite`` looks for NaN and Inf in loss and gradients; ``scale`` is
    the factor of a scaled loss, None where it is not scaled; ``preemption`` is what a step of training asks, and tells,
    whether some rank is to end."""

    train: bool = False
    local: bool = False
    seed: int = 0
    step: int = 0
    check_finite: bool = True
    scale: float | None = None
    preemption: Preemption | None = None

    @property
    def may_skip(self) -> bool:
        """Whether a bad gradient may be the factor's fault: smaller ones than 1 would only make gradients vanish."""
        return self.scale is not None and self.scale > 1


def picked(names: Sequence[str]) -> Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]:
    """``tuple(known[name] for name in names)`` as a function of ``known`` that has no loop in Python."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda known: tuple(known[name] for name in names)


class Executor:
    """Runs steps of one rank. ``gradients`` is None for forward-only programs; ``engine`` runs its functions."""

    def __init__(
        self,
        program: DistributedProgram,
        part: RankProgram,
        transport: Transport,
        device: torch.device,
        gradients: GradientStore | None = None,
        engine: Engine = eager,
    ) -> None:
        self.program, self.part, self.transport, self.device = program, part, transport, device
        self.gradients = gradients
        copies = HostCopies() if gradients is None else gradients.outward
        written = None if device.type == "meta" else program.disk
        self.disk = None if written is None else DiskCopies(written, part.rank, copies)
        self.comm = Comm(transport, program.mesh, part.coordinate, gradients, self.disk)
        self.stored = program.stored
        self.stages = {stage.index: stage for stage in self.part.stages}
        self.functions = {
            (stage.index, label): engine(piece.module, f"{label} of stage {stage.index}")
            for stage in self.part.stages
            for label, piece in stage.pieces.items()
        }
        once = engine_of_parameters(engine)
        self.functions |= {(stage.index, "once"): once(stage.once.module, "once") for stage in self.part.stages}
        self.peak_live = 0  # activations (of one stage and microbatch) alive at once in the last step
        self.forward = {(t.source, t.target): t.forward for t in program.transfers}
        self.backward = {(t.source, t.target): t.backward for t in program.transfers}
        # after a forward: what the backward needs, and what is still to be sent to other ranks
        self.kept = {
            stage.index: {
                n
                for (source, target), names in self.forward.items()
                if source == stage.index and target not in self.stages
                for n in names
            }
            | set(stage.saved)
            for stage in self.part.stages
        }
        self.returned = {
            stage.index: {n for (_, target), names in self.backward.items() if target == stage.index for n in names}
            for stage in self.part.stages
        }
        # of each stage: its state, what runs at the start of a step, and what all microbatches read
        self.state = {s.index: (tuple(s.state), picked(tuple(s.state.values()))) for s in self.part.stages}
        self.starts = {s.index: picked(s.once.static) for s in self.part.stages}
        self.reads = {
            s.index: [((s.index, label), picked(piece.static)) for label, piece in s.pieces.items()]
            for s in self.part.stages
        }
        self.on_host = any(spec.host for spec in program.state.values())
        self.batches, self.everyone = program.batches, tuple(range(program.mesh.size))
        self.owners = [next(s.index for s in program.stages if i in s.results) for i in range(len(program.results))]
        self.counts = [self._counts(spec) for spec in program.results]
        self.roles = [axis.role for axis in program.axes]
        self.arrived = arrived_sends(program.schedule, part.coordinate.get("pp", 0))
        # the last send of each stage's and microbatch's gradients: nobody needs them after it
        sends = [action for action in part.actions if action.op is Op.SEND_BACKWARD]
        self.last_sends = {(action.stage, action.microbatch): action for action in sends}
        handlers = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward,
            Op.BACKWARD_WEIGHT: self._weight,
            Op.SEND_FORWARD: self._send_forward,
            Op.RECV_FORWARD: self._receive_forward,
            Op.SEND_BACKWARD: self._send_backward,
            Op.RECV_BACKWARD: self._receive_backward,
        }
        self.work = [(handlers[action.op], action) for action in part.actions if action.op in handlers]

    def step(
        self,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        how: Run,
        watch: Watch | None = None,
    ) -> list[Tensor]:
        """One pass over all microbatches, to be called without autograd.

        ``inputs``: this rank's part of the flat batch, all microbatches of it. ``watch`` sees every value (slow).

        Returns the program's outputs, whole and the same on every rank, and of a parameter's new value this rank's
        part; ``finite`` then says whether the first of them and all gradients of all ranks may be finite.
        """
        self.whole: dict[int, dict[str, Tensor]] = {}
        self.static: dict[tuple[int, str], tuple[Tensor, ...]] = {}
        self.values: dict[tuple[int, int], dict[str, Tensor]] = defaultdict(dict)
        self.cotangents: dict[tuple[int, int], dict[str, Tensor]] = defaultdict(dict)
        self.arriving: dict[tuple[int, int], list[tuple[str, Wait]]] = defaultdict(list)
        self.returning: dict[tuple[int, int], list[tuple[str, Wait]]] = defaultdict(list)
        self.sent: dict[Action, list[Wait]] = defaultdict(list)
        self.results: dict[int, list[Tensor]] = defaultdict(list)
        self.carried: dict[int, dict[str, Tensor]] = {}
        self.first_draw = how.step * self.batches
        self.live: set[tuple[int, int]] = set()
        self.peak_live = 0
        self.comm.seed, self.comm.step, self.comm.scale = how.seed, how.step, how.scale or 1.0
        self.watch, self.check_finite, self.finite = watch, how.check_finite, True
        self.preemption = how.preemption
        self.comm.under_way.clear()  # of a step that failed
        self.comm.pages.clear()
        self.comm.ids.clear()
        if self.gradients is not None:
            self.gradients.begin(how.scale or 1.0)
        for stage in self.part.stages:
            self._once(stage, state, inputs)
        try:
            for handle, action in self.work:
                handle(action)
        except BaseException:
            if self.disk is not None:
                self.disk.clear()
            raise
        for send in list(self.sent):
            self._forget(send)
        self.comm.settle()
        if self.gradients is not None:
            self._require_gradients(self.gradients)
            self.gradients.settle()
        results = [self._settled(position) for position in range(len(self.program.results))]
        if self.on_host:  # whoever changes a parameter, or reads a gradient, need not wait for the device
            self.comm.copies.settle()
        for held in (self.whole, self.static, self.values, self.cotangents, self.results, self.carried):
            held.clear()  # copies of parameters, say, need not live until the next step
        return results

    # -- pieces

    def _once(self, stage: StageProgram, state: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> None:
        values, own = self.state[stage.index]
        known = dict(zip(values, own(state), strict=True))
        known |= {value: inputs[position] for value, position in stage.inputs.items()}
        made = self._call(stage, "once", 0, [self.comm, *self.starts[stage.index](known)])
        known |= zip(stage.once.outputs, made, strict=True)
        self.whole[stage.index] = known
        self.carried[stage.index] = {name: known[name] for name in stage.carried}
        for key, read in self.reads[stage.index]:
            self.static[key] = read(known)
        for position, name in stage.results.items():
            if name in known:
                self.results[position].append(known[name])

    def _slice(self, stage: StageProgram, name: str, cut: Slice, microbatch: int) -> Tensor:
        whole = self.whole[stage.index][cut.source]
        return slices.take(whole, cut.dim, cut.parts, self.program.schedule.num_microbatches, microbatch)

    def _run(self, action: Action, label: str, dynamic: list[Tensor]) -> Sequence[Tensor]:
        self.comm.microbatch = action.microbatch
        if self.batches > 1:  # each draws numbers of its own
            self.comm.step = self.first_draw + action.microbatch
        args = [self.comm, *self.static[action.stage, label], *dynamic]
        dynamic.clear()
        return self._call(self.stages[action.stage], label, action.microbatch, args)

    def _call(self, stage: StageProgram, label: str, microbatch: int, args: list[Any]) -> Sequence[Tensor]:
        if self.watch is not None:
            return run_watched(stage.pieces[label].module, args, self.watch.observer(stage, label, microbatch))
        return self.functions[stage.index, label](args)

    def _forward(self, action: Action) -> None:
        stage, here = self.stages[action.stage], (action.stage, action.microbatch)
        values = self.values[here]
        values.update((name, wait()) for name, wait in self.arriving.pop(here, ()))
        for send in self.arrived.get(action, ()):
            self._forget(send)
        for name, cut in stage.slices.items():
            values[name] = self._slice(stage, name, cut, action.microbatch)
        values |= self.carried[stage.index]
        dynamic = [values[name] for name in stage.forward.dynamic]
        made = self._run(action, "forward", dynamic)
        values |= zip(stage.forward.outputs, made, strict=True)
        for position, name in stage.results.items():
            if name in values:
                self.results[position].append(values[name])
        self.carried[stage.index] = {name: values[new] for name, new in stage.carried.items()}
        self.live.add(here)
        self.peak_live = max(self.peak_live, len(self.live))
        self._hand_over(action, self.forward, values, self.values)
        self.values[here] = {name: x for name, x in values.items() if name in self.kept[stage.index]}
        if self.gradients is None:
            self.live.discard(here)

    def _backward(self, action: Action) -> None:
        """The whole backward, or (of a stage that has them apart) the half that other stages wait for."""
        stage, here = self.stages[action.stage], (action.stage, action.microbatch)
        cotangents = self.cotangents[here]
        # not in a loop, whose variables would keep the last one alive while the function runs
        cotangents.update((name, wait()) for name, wait in self.returning.pop(here, ()))
        for send in self.arrived.get(action, ()):
            self._forget(send)
        known = self.values.pop(here) | cotangents
        cotangents.clear()
        dynamic = [known[name] for name in stage.backward.dynamic]
        later = stage.weight.dynamic if stage.weight is not None else ()
        kept = {name: known[name] for name in later if name in known}
        known.clear()
        for name, x in zip(stage.backward.outputs, self._run(action, "backward", dynamic), strict=True):
            if name in self.returned[stage.index]:
                cotangents[name] = x
            if name in later:
                kept[name] = x
        self._hand_over(action, self.backward, cotangents, self.cotangents, back=True)
        if here not in self.last_sends:
            del self.cotangents[here]
        if stage.weight is None:
            self.live.discard(here)
            return
        self.values[here] = kept
        if action.op is Op.BACKWARD:
            self._weight(action)

    def _weight(self, action: Action) -> None:
        """The half of a backward that only parameters need; the microbatch's values end here."""
        stage, here = self.stages[action.stage], (action.stage, action.microbatch)
        values = self.values.pop(here)
        assert stage.weight is not None
        dynamic = [values[name] for name in stage.weight.dynamic]
        values.clear()
        self._run(action, "weight", dynamic)
        self.live.discard(here)

    def _hand_over(
        self,
        action: Action,
        edges: Mapping[tuple[int, int], tuple[str, ...]],
        made: Mapping[str, Tensor],
        store: dict[tuple[int, int], dict[str, Tensor]],
        *,
        back: bool = False,
    ) -> None:
        """Values for another stage of this same rank need no transfer."""
        for (source, target), names in edges.items():
            home, user = (target, source) if back else (source, target)
            if home == action.stage and user in self.stages:
                store[user, action.microbatch] |= {name: made[name] for name in names}

    # -- transfers

    def _rank_of(self, stage: int) -> int:
        return self.program.mesh.rank({**self.part.coordinate, "pp": self.program.schedule.placement[stage]})

    def _send_forward(self, action: Action) -> None:
        values = self.values[action.stage, action.microbatch]
        for name in self.forward[action.stage, action.peer]:
            label = f"{name} of microbatch {action.microbatch}"
            self.sent[action].append(self.transport.send(values[name], self._rank_of(action.peer), VALUES, label))

    def _forget(self, send: Action) -> None:
        """What was sent (nothing, where a stage has only gradients for another) need not live any longer."""
        for wait in self.sent.pop(send, ()):
            wait()

    def _receive_forward(self, action: Action) -> None:
        box = self.arriving[action.stage, action.microbatch]
        box += self._receive(self.forward[action.peer, action.stage], action, VALUES)

    def _send_backward(self, action: Action) -> None:
        cotangents = self.cotangents[action.stage, action.microbatch]
        for name in self.backward[action.peer, action.stage]:
            label = f"{name} of microbatch {action.microbatch}"
            sent = self.transport.send(cotangents[name], self._rank_of(action.peer), GRADIENTS, label)
            self.sent[action].append(sent)
        if self.last_sends[action.stage, action.microbatch] is action:
            del self.cotangents[action.stage, action.microbatch]

    def _receive_backward(self, action: Action) -> None:
        box = self.returning[action.stage, action.microbatch]
        box += self._receive(self.backward[action.stage, action.peer], action, GRADIENTS)

    def _receive(self, names: Sequence[str], action: Action, channel: int) -> list[tuple[str, Wait]]:
        source = self._rank_of(action.peer)
        found: list[tuple[str, Wait]] = []
        for name in names:
            shape, dtype = self.program.values[name]
            label = f"{name} of microbatch {action.microbatch}"
            found.append((name, self.transport.receive(shape, dtype, source, channel, label)))
        return found

    # -- results

    def _require_gradients(self, store: GradientStore) -> None:
        store.require_all()

    def _settled(self, position: int) -> Tensor:
        """An output, whole, on every rank."""
        spec = self.program.results[position]
        found = self.results.get(position)
        mesh = self.program.mesh
        owner = self.owners[position]
        if position in self.stored:
            return self._stored(self.stored[position], owner, found[-1] if found else None)
        local = self._joined(spec, self._summed(spec, self._over_time(position, spec, found))) if found else None
        screened = position == 0 and self.gradients is not None
        if spec.shape == () and (screened or P in spec.sharding):
            return self._sum_of_scalars(position, local, screened=screened)
        if mesh["pp"] == 1:
            assert local is not None
            return local
        source = self._rank_of(owner)
        if local is None:
            local = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        return self.transport.broadcast(local.contiguous(), mesh.peers(self.part.rank, ["pp"]), source, spec.path)

    def _stored(self, spec: StateSpec, owner: int, local: Tensor | None) -> Tensor:
        """The new value of a parameter, as this rank stores it; without memory if it stores nothing of it."""
        placement = self.program.schedule.placement
        homes = {placement[stage] for stage in (*spec.stages, owner)}
        if len(homes) > 1:
            if local is None:
                sizes = local_shape(spec.shape, spec.sharding, [axis.size for axis in self.program.axes])
                local = torch.empty(sizes, dtype=spec.dtype, device=self.device)
            ranks = self.program.mesh.peers(self.part.rank, ["pp"])
            return self.transport.broadcast(local.contiguous(), ranks, self._rank_of(owner), spec.name)
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta") if local is None else local

    def _summed(self, spec: ValueSpec, x: Tensor) -> Tensor:
        """Add up the terms of ranks."""
        ranks = self.program.mesh.peers(self.part.rank, spec.summed(self.program.axes))
        return x if len(ranks) == 1 else self.transport.start_sum(x.clone(), ranks, spec.path)()

    def _joined(self, spec: ValueSpec, x: Tensor) -> Tensor:
        """Join the slices of data ranks, the innermost axis first: microbatches were joined before."""
        for position, (axis, kind) in reversed(list(enumerate(zip(self.program.axes, spec.sharding, strict=True)))):
            if isinstance(kind, Shard) and axis.role != "time":
                x = self.transport.run("all_gather", x, axis.name, kind.dim, kind.parts, len(self.program.sites) - 1)
                x = self._without_padding(spec, position, kind, x)
        return x

    def _without_padding(self, spec: ValueSpec, position: int, kind: Shard, x: Tensor) -> Tensor:
        """What the axis at ``position`` has split, after it was joined."""
        ranks = [axis.size for axis in self.program.axes[:position]]
        size = local_shape(spec.shape, spec.sharding[:position], ranks)[kind.dim]
        return slices.trimmed(x, kind.dim, kind.parts, size)

    def _over_time(self, position: int, spec: ValueSpec, found: list[Tensor]) -> Tensor:
        kind = spec.sharding[self.roles.index("time")] if "time" in self.roles else None
        if position == 0 and self.batches > 1:  # each batch gives a term of the step's loss
            kind = P
        if isinstance(kind, Shard):
            return self._without_padding(spec, self.roles.index("time"), kind, slices.join(found, kind.dim, kind.parts))
        if kind is P:
            total = found[0]
            for term in found[1:]:
                total = total + term
            return total
        return found[-1]

    def _counts(self, spec: ValueSpec) -> bool:
        """Whether this rank's part of a scalar is a term of the sum over all: one of those that have it whole."""
        kinds = zip(self.program.axes, spec.sharding, strict=True)
        whole = [axis.name for axis, kind in kinds if axis.role != "time" and kind is not P]
        return all(self.part.coordinate.get(axis, 0) == 0 for axis in whole)

    def _sum_of_scalars(self, position: int, local: Tensor | None, *, screened: bool) -> Tensor:
        """One sum over all ranks: terms where partial, one copy where whole, nothing from other stages. ``screened``:
        it tells every rank whether all gradients may be finite, and how many ranks are asked to end, too."""
        dtype, many = self.program.results[position].dtype, len(self.everyone) > 1
        if local is None or not self.counts[position]:
            local = torch.zeros((), dtype=dtype, device=self.device)
        if self.gradients is None or not screened or not (self.check_finite or self.preemption):
            x = local.clone()
            return self.transport.start_sum(x, self.everyone, "loss")() if many else x
        # the same sum tells every rank whether some rank's gradients are bad: then the second number is NaN; else it is
        # how many ranks are asked to end
        told = self.gradients.screen().to(local.device, dtype) if self.check_finite else torch.zeros_like(local)
        if self.preemption is not None and self.preemption.asked:
            told = told + 1
        both = torch.stack((local, told))
        both = self.transport.start_sum(both, self.everyone, "loss")() if many else both
        numbers = both.tolist()
        if self.check_finite:
            self.finite = all(map(math.isfinite, numbers))
        if self.preemption is not None:
            self.preemption.hear(numbers[1])
        return both[0]
