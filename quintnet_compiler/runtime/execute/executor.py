"""Execute one rank's actions, in the order of the program's schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core import slices
from ...core.sharding import P, Shard, local_shape
from ...ir.distributed_program import DistributedProgram, RankProgram, Slice, StageProgram, StateSpec, ValueSpec
from ...schedules.schedule import Action, Op
from ...schedules.sends import arrived_sends
from ..state.gradients import GradientStore
from ..transport.host_copies import HostCopies
from ..transport.transport import GRADIENTS, VALUES, Transport, Wait
from .comm import Comm
from .engines import Engine, eager, engine_of_parameters
from .extensions import rank_services
from .interpreter_trace import Watch, run_watched
from .run_options import Run
from .stage_values import StageValues

__all__ = ["Executor", "Run"]


class Executor:
    """Runs steps of one rank.

    ``gradients`` is None for forward-only programs; ``engine`` runs the generated functions.
    """

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
        self.gradients, self.engine = gradients, engine
        copies = HostCopies() if gradients is None else gradients.outward
        self.services = rank_services(program, part.rank, device, copies)
        self.comm = Comm(transport, program.mesh, part.coordinate, gradients, self.services)
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
        self.stage_values = {i: StageValues.for_stage(program, stage, self.stages) for i, stage in self.stages.items()}
        self.on_host = any(spec.host for spec in program.state.values())
        self.batches, self.everyone = program.batches, tuple(range(program.mesh.size))
        self.owners = [next(s.index for s in program.stages if i in s.results) for i in range(len(program.results))]
        self.counts = [self._counts(spec) for spec in program.results]
        self.roles = [axis.role for axis in program.axes]
        self.arrived = arrived_sends(program.schedule, part.coordinate.get("pp", 0))
        # the last send of each stage's and microbatch's gradients, after which they are freed
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
        options: Run,
        watch: Watch | None = None,
    ) -> list[Tensor]:
        """Run all microbatches of a step; autograd must be off.

        Sets ``finite``: false if the loss (the first output) or a gradient of any rank is not finite.

        Returns:
            What :meth:`compute` returns first.
        """
        results, verdict = self.compute(state, inputs, options, watch)
        self.conclude(options, verdict)
        return results

    def conclude(self, options: Run, verdict: Tensor | None) -> None:
        """Wait for what :meth:`compute` says of all ranks; set ``finite``, and tell whether ranks are asked to end."""
        self.finite = True
        if verdict is None:
            return
        numbers = verdict.tolist()
        if options.check_finite:
            self.finite = all(map(math.isfinite, numbers))
        if options.preemption is not None:
            options.preemption.hear(numbers[1])

    def compute(
        self,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        options: Run,
        watch: Watch | None = None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Do the work of a step on the device, without waiting for any of it.

        Args:
            state: this rank's parts of parameters, buffers and constants, by name.
            inputs: this rank's part of the flat batch, with all microbatches.
            options: how to run the program.
            watch: sees every value (slow).

        Returns:
            The program's outputs, whole and the same on every rank (for a parameter's new value, this rank's part), and
            the verdict for :meth:`conclude`, if it needs one.
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
        self.first_draw = options.step * self.batches
        self.live: set[tuple[int, int]] = set()
        self.peak_live = 0
        self.comm.seed, self.comm.step, self.comm.keys = options.seed, options.step, options.keys
        self.comm.scale = 1.0 if options.scale is None else options.scale
        self.watch, self.check_finite = watch, options.check_finite
        self.verdict: Tensor | None = None
        self.preemption = options.preemption
        self.comm.under_way.clear()  # a step that failed may have left some
        self.comm.shared.clear()
        self.comm.ids.clear()
        if self.gradients is not None:
            self.gradients.begin(options.scale)
        for stage in self.part.stages:
            self._once(stage, state, inputs)
        try:
            for handle, action in self.work:
                handle(action)
        except BaseException:
            for service in self.services.values():
                service.drop_values()
            raise
        for send in list(self.sent):
            self._forget(send)
        self.comm.wait_for_gathers()
        if self.gradients is not None:
            self._require_gradients(self.gradients)
            self.gradients.settle()
        results = [self._settled(position) for position in range(len(self.program.results))]
        if self.on_host:  # finish copies to the host, so that callers may use parameters and gradients at once
            self.comm.copies.wait_for_copies()
        for tensors in (self.whole, self.static, self.values, self.cotangents, self.results, self.carried):
            tensors.clear()
        verdict, self.verdict = self.verdict, None  # which holds memory
        return results, verdict

    # -- functions of stages

    def _once(self, stage: StageProgram, state: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> None:
        names = self.stage_values[stage.index]
        values = dict(zip(names.state, names.read_state(state), strict=True))
        values |= {value: inputs[position] for value, position in stage.inputs.items()}
        results = self._call(stage, "once", 0, [self.comm, *names.read_once(values)])
        values |= zip(stage.once.outputs, results, strict=True)
        self.whole[stage.index] = values
        self.carried[stage.index] = {name: values[name] for name in stage.carried}
        for label, read in names.read_static.items():
            self.static[stage.index, label] = read(values)
        for position, name in stage.results.items():
            if name in values:
                self.results[position].append(values[name])

    def _slice(self, stage: StageProgram, name: str, cut: Slice, microbatch: int) -> Tensor:
        whole = self.whole[stage.index][cut.source]
        return slices.slice_of_rank(whole, cut.dim, cut.parts, self.program.schedule.num_microbatches, microbatch)

    def _run(self, action: Action, label: str, dynamic: list[Tensor]) -> Sequence[Tensor]:
        self.comm.microbatch = action.microbatch
        if self.batches > 1:  # each batch draws other random numbers
            self.comm.step = self.first_draw + action.microbatch
        args = [self.comm, *self.static[action.stage, label], *dynamic]
        dynamic.clear()
        return self._call(self.stages[action.stage], label, action.microbatch, args)

    def _call(self, stage: StageProgram, label: str, microbatch: int, args: list[Any]) -> Sequence[Tensor]:
        if self.watch is not None:
            return run_watched(stage.pieces[label].module, args, self.watch.observer(stage, label, microbatch))
        return self.functions[stage.index, label](args)

    def _forward(self, action: Action) -> None:
        stage, key = self.stages[action.stage], (action.stage, action.microbatch)
        values = self.values[key]
        values.update((name, wait()) for name, wait in self.arriving.pop(key, ()))
        for send in self.arrived.get(action, ()):
            self._forget(send)
        for name, cut in stage.slices.items():
            values[name] = self._slice(stage, name, cut, action.microbatch)
        values |= self.carried[stage.index]
        dynamic = [values[name] for name in stage.forward.dynamic]
        outputs = self._run(action, "forward", dynamic)
        values |= zip(stage.forward.outputs, outputs, strict=True)
        for position, name in stage.results.items():
            if name in values:
                self.results[position].append(values[name])
        self.carried[stage.index] = {name: values[new] for name, new in stage.carried.items()}
        self.live.add(key)
        self.peak_live = max(self.peak_live, len(self.live))
        self._hand_over(action, self.forward, values, self.values)
        kept = self.stage_values[stage.index].kept
        self.values[key] = {name: x for name, x in values.items() if name in kept}
        if self.gradients is None:
            self.live.discard(key)

    def _backward(self, action: Action) -> None:
        """Run a stage's backward; where the schedule splits backwards, only the half that other stages wait for."""
        stage, key = self.stages[action.stage], (action.stage, action.microbatch)
        cotangents = self.cotangents[key]
        # not a loop: its variable would keep the last gradient alive while the function runs
        cotangents.update((name, wait()) for name, wait in self.returning.pop(key, ()))
        for send in self.arrived.get(action, ()):
            self._forget(send)
        values = self.values.pop(key) | cotangents
        cotangents.clear()
        dynamic = [values[name] for name in stage.backward.dynamic]
        deferred = stage.weight.dynamic if stage.weight is not None else ()
        saved = {name: values[name] for name in deferred if name in values}
        values.clear()
        for name, x in zip(stage.backward.outputs, self._run(action, "backward", dynamic), strict=True):
            if name in self.stage_values[stage.index].returned:
                cotangents[name] = x
            if name in deferred:
                saved[name] = x
        self._hand_over(action, self.backward, cotangents, self.cotangents, backward=True)
        if key not in self.last_sends:
            del self.cotangents[key]
        if stage.weight is None:
            self.live.discard(key)
            return
        self.values[key] = saved
        if action.op is Op.BACKWARD:
            self._weight(action)

    def _weight(self, action: Action) -> None:
        """Compute the gradients of parameters of a split backward, and free the microbatch's values."""
        stage, key = self.stages[action.stage], (action.stage, action.microbatch)
        values = self.values.pop(key)
        assert stage.weight is not None
        dynamic = [values[name] for name in stage.weight.dynamic]
        values.clear()
        self._run(action, "weight", dynamic)
        self.live.discard(key)

    def _hand_over(
        self,
        action: Action,
        edges: Mapping[tuple[int, int], tuple[str, ...]],
        values: Mapping[str, Tensor],
        store: dict[tuple[int, int], dict[str, Tensor]],
        *,
        backward: bool = False,
    ) -> None:
        """Store values for other stages of this rank, which need no transfer."""
        for (source, target), names in edges.items():
            home, user = (target, source) if backward else (source, target)
            if home == action.stage and user in self.stages:
                store[user, action.microbatch] |= {name: values[name] for name in names}

    # -- transfers

    def _rank_of(self, stage: int) -> int:
        return self.program.mesh.rank({**self.part.coordinate, "pp": self.program.schedule.placement[stage]})

    def _send_forward(self, action: Action) -> None:
        values = self.values[action.stage, action.microbatch]
        for name in self.forward[action.stage, action.peer]:
            label = f"{name} of microbatch {action.microbatch}"
            self.sent[action].append(self.transport.send(values[name], self._rank_of(action.peer), VALUES, label))

    def _forget(self, send: Action) -> None:
        """Wait for the messages of an action (there may be none), so that what they sent may be freed."""
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
        pending: list[tuple[str, Wait]] = []
        for name in names:
            shape, dtype = self.program.values[name]
            label = f"{name} of microbatch {action.microbatch}"
            pending.append((name, self.transport.receive(shape, dtype, source, channel, label)))
        return pending

    # -- results

    def _require_gradients(self, store: GradientStore) -> None:
        store.require_all()

    def _settled(self, position: int) -> Tensor:
        """Return the program's output at ``position``, whole on every rank."""
        spec = self.program.results[position]
        parts = self.results.get(position)
        mesh = self.program.mesh
        owner = self.owners[position]
        if position in self.stored:
            return self._stored(self.stored[position], owner, parts[-1] if parts else None)
        local = self._joined(spec, self._summed(spec, self._over_time(position, spec, parts))) if parts else None
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
        """Return this rank's part of a parameter's new value; a meta tensor if the rank stores none of it."""
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
        """Return the sum of ``x`` over the ranks that have terms of it."""
        ranks = self.program.mesh.peers(self.part.rank, spec.summed(self.program.axes))
        return x if len(ranks) == 1 else self.transport.start_sum(x.clone(), ranks, spec.path)()

    def _joined(self, spec: ValueSpec, x: Tensor) -> Tensor:
        """Return the all-gathered slices of data ranks, the innermost axis first; microbatches are joined already."""
        for position, (axis, kind) in reversed(list(enumerate(zip(self.program.axes, spec.sharding, strict=True)))):
            if isinstance(kind, Shard) and axis.role != "time":
                x = self.transport.run("all_gather", x, axis.name, kind.dim, kind.parts, len(self.program.sites) - 1)
                x = self._without_padding(spec, position, kind, x)
        return x

    def _without_padding(self, spec: ValueSpec, position: int, kind: Shard, x: Tensor) -> Tensor:
        """Return ``x``, joined over the axis at ``position``, without the padding of its parts."""
        ranks = [axis.size for axis in self.program.axes[:position]]
        size = local_shape(spec.shape, spec.sharding[:position], ranks)[kind.dim]
        return slices.trimmed(x, kind.dim, kind.parts, size)

    def _over_time(self, position: int, spec: ValueSpec, parts: list[Tensor]) -> Tensor:
        """Return the values of all microbatches, joined or added up."""
        kind = spec.sharding[self.roles.index("time")] if "time" in self.roles else None
        if position == 0 and self.batches > 1:  # the step's loss is the sum over batches
            kind = P
        if isinstance(kind, Shard):
            return self._without_padding(spec, self.roles.index("time"), kind, slices.join(parts, kind.dim, kind.parts))
        if kind is P:
            total = parts[0]
            for term in parts[1:]:
                total = total + term
            return total
        return parts[-1]

    def _counts(self, spec: ValueSpec) -> bool:
        """Return whether the sum of a scalar over all ranks counts this rank's part; of replicas, only the first."""
        kinds = zip(self.program.axes, spec.sharding, strict=True)
        replicated = [axis.name for axis, kind in kinds if axis.role != "time" and kind is not P]
        return all(self.part.coordinate.get(axis, 0) == 0 for axis in replicated)

    def _sum_of_scalars(self, position: int, local: Tensor | None, *, screened: bool) -> Tensor:
        """Return the sum of a scalar over all ranks: terms where partial, one replica, nothing from other stages.

        ``screened``: the step's verdict is summed with it: may all gradients be finite, how many ranks shall end.
        """
        dtype, several = self.program.results[position].dtype, len(self.everyone) > 1
        if local is None or not self.counts[position]:
            local = SHIPPED.zeros((), dtype=dtype, device=self.device)
        if self.gradients is None or not screened or not (self.check_finite or self.preemption):
            x = local.clone()
            return self.transport.start_sum(x, self.everyone, "loss")() if several else x
        # the second number: NaN if a gradient of some rank is not finite, else how many ranks are asked to end
        status = self.gradients.screen().to(local.device, dtype) if self.check_finite else SHIPPED.zeros_like(local)
        if self.preemption is not None and self.preemption.asked:
            status = status + 1
        pair = SHIPPED.stack((local, status))
        pair = self.transport.start_sum(pair, self.everyone, "loss")() if several else pair
        self.verdict = pair
        return pair[0]
