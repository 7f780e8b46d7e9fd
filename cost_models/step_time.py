"""Time of one training step: pipeline of microbatches, what communication is not hidden, and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from . import closed_forms
from .cluster import Cluster, Group
from .collectives import beside, collective_seconds, in_turn, lost_seconds
from .hardware import BYTES_PER_ELEMENT
from .kernels import kernel_seconds, phase_seconds
from .layer_kernels import Communication, Kernels, LayerWork, embedding, head, layer
from .pipeline_time import Stage, interleaved_seconds, one_f_one_b_seconds
from .transformer import Decoder, ParallelLayout, stage_layers


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step and where they go; ``pipeline`` has ``bubble`` in it."""

    pipeline: float
    bubble: float
    data_parallel: float
    optimizer: float

    @property
    def seconds(self) -> float:
        return self.pipeline + self.data_parallel + self.optimizer


@dataclass(frozen=True)
class StepModel:
    """A decoder in a layout on a cluster.

    Raises:
        CompileError: QN301 if the layout needs more devices than the cluster has.
    """

    model: Decoder
    layout: ParallelLayout
    cluster: Cluster

    # -- parts of a stage

    def _lost(self, hidden: float, group: Group) -> float:
        return lost_seconds(hidden, group, self.cluster)

    def _communication(self, given: Sequence[Communication], kernels: Kernels) -> float:
        """What of ``given`` delays the rank: all of it, or what its neighbours in time do not cover."""
        exposed = 0.0
        windows: dict[tuple[str, ...], float] = {}
        for item in given:
            group = self.group(item.axis)
            seconds = collective_seconds(item.name, group, item.num_bytes)
            if not item.beside or self.layout.blocking:
                exposed += seconds
                continue
            left = windows.get(item.beside)
            if left is None:
                left = sum(kernel_seconds(k, self.cluster.device) for k in kernels if k.name in item.beside)
            hidden = min(seconds, left)
            windows[item.beside] = left - hidden
            exposed += seconds - hidden + self._lost(hidden, group)
        return exposed

    def group(self, axis: str) -> Group:
        """The ranks of ``axis``."""
        if axis == "ep":  # experts live on context and data ranks, and on tensor ranks that do not split an expert
            return self.cluster.group(self.layout.ep, self.layout.expert_tp)
        return self.cluster.axis(self.layout.mesh, axis)

    def _seconds(self, work: LayerWork) -> tuple[float, float, float]:
        """Forward, backward and redone seconds of one part, with the communication that is not hidden."""
        share = self.cluster.device.efficiency
        per_launch = 0.0 if self.layout.graphs else share.host_seconds
        found = []
        for kernels, messages in (
            (work.forward, work.forward_communication),
            (work.backward, work.backward_communication),
            (work.again, work.again_communication),
        ):
            device = phase_seconds(kernels, self.cluster.device, 0.0)
            device += self._communication(messages, kernels)
            launches = sum(k.launches for k in kernels) + len(messages)
            host = launches * per_launch
            found.append(device + host if self.layout.blocking else max(device, host))
        return found[0], found[1], found[2]

    @cached_property
    def layer(self) -> tuple[float, float, float]:
        """Forward, backward and redone seconds of a layer."""
        return self._seconds(layer(self.model, self.layout))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """One microbatch on each stage."""
        forward, backward, again = self.layer
        backward += again * self.layout.recompute_share
        counts = stage_layers(self.model, self.layout)
        ends = {0: self._seconds(embedding(self.model, self.layout)), -1: self._seconds(head(self.model, self.layout))}
        found = []
        for stage, count in enumerate(counts):
            parts = [(forward, backward, closed_forms.layer_parameters(self.model))] * count
            for end, (f, b, _) in ends.items():
                if stage == (0 if end == 0 else len(counts) - 1):
                    part = f, b, closed_forms.embedding_parameters(self.model)  # a tied table, for each use
                    parts = [part, *parts] if end == 0 else [*parts, part]
            found.append(self._stage(parts))
        return tuple(found)

    def _stage(self, parts: Sequence[tuple[float, float, float]]) -> Stage:
        """Parts of a stage in order, by seconds of their forward and backward, and parameters. ZeRO 3 gathers these
        one part ahead of computation, and 2 and 3 scatter gradients behind it."""
        layout, ahead, back = self.layout, [f for f, _, _ in parts], [b for _, b, _ in parts]
        if layout.zero < 3 or layout.shards == 1:
            return Stage(sum(ahead), sum(back))
        group = self.cluster.group(layout.shards, layout.tp)
        gather = [collective_seconds("all_gather", group, 2 * n / layout.tp) for _, _, n in parts]
        scatter = [self._scatter(n / layout.tp, group) for _, _, n in parts]

        def lost(hidden: float) -> float:
            return self._lost(hidden, group)

        nothing = [0.0] * len(parts)
        last = [0.0, *gather[-2::-1]]  # the last part's parameters are still there
        return Stage(in_turn(ahead, gather, nothing, lost), in_turn(back[::-1], last, scatter[::-1], lost))

    def _scatter(self, size: float, group: Group) -> float:
        """Of the gradients of ``size`` parameters, and their sum over ranks that hold the same slices."""
        layout, element = self.layout, BYTES_PER_ELEMENT[self.layout.gradient_dtype]
        scatter = collective_seconds("reduce_scatter", group, element * size)
        if layout.shards < layout.dp * layout.cp:
            rest = self.cluster.group(layout.dp * layout.cp // layout.shards, layout.tp * layout.shards)
            scatter += collective_seconds("all_reduce", rest, element * size / layout.shards)
        return scatter

    # -- the step

    @cached_property
    def _send(self) -> float:
        layout, model = self.layout, self.model
        if layout.pp == 1:
            return 0.0
        size = layout.microbatch * model.seq / layout.cp * model.hidden * 2
        if layout.sequence_parallel or not layout.whole_sends:
            size /= layout.tp
        return collective_seconds("send", self.cluster.axis(layout.mesh, "pp"), size)

    def pipeline_seconds(self) -> float:
        """From the first forward to the last backward."""
        layout, stages = self.layout, self.stages
        count = layout.microbatches
        if layout.pp == 1:
            return count * stages[0].both
        send = self._send
        if layout.vpp > 1:
            return interleaved_seconds(stages, count, layout.vpp, 0.0 if layout.overlap_pp else send)
        return one_f_one_b_seconds(stages, count, send)

    def rank_parameters(self) -> tuple[float, float]:
        """Dense and expert parameters of the fullest rank (the first or the last stage)."""
        model, layout = self.model, self.layout
        counts = stage_layers(model, layout)
        experts = closed_forms.expert_parameters(model) / (layout.ep * layout.expert_tp) if model.experts else 0.0
        dense = (closed_forms.layer_parameters(model) - closed_forms.expert_parameters(model)) / layout.tp
        table = closed_forms.embedding_parameters(model) / layout.tp
        if layout.pp == 1:
            table *= 1 if model.tied else 2
        return counts[0] * dense + table, counts[0] * experts

    def _settle(self) -> float:
        """Reduction of gradients (and gathering of parameters) over data ranks that is not hidden."""
        layout = self.layout
        ranks = layout.dp * layout.cp
        if ranks == 1 or layout.zero == 3:
            return 0.0
        dense, expert = self.rank_parameters()
        element = BYTES_PER_ELEMENT[layout.gradient_dtype]
        group = self.cluster.group(ranks, layout.tp)
        if layout.zero == 0:
            reduce = collective_seconds("all_reduce", group, element * dense)
            gather = 0.0
        else:
            reduce = collective_seconds("reduce_scatter", group, element * dense)
            gather = collective_seconds("all_gather", group, 2 * dense)
        copies = ranks * layout.tp // (layout.ep * layout.expert_tp)
        if expert and copies > 1:
            far = self.cluster.group(copies, layout.ep * layout.expert_tp)
            reduce += collective_seconds("all_reduce", far, element * expert)
        if not layout.overlap_dp:
            return reduce + gather
        behind = self.stages[0]
        return sum(
            beside(window, moved, lambda hidden: self._lost(hidden, group)) - window
            for moved, window in ((reduce, behind.backward), (gather, behind.forward))
        )

    def _optimizer(self) -> float:
        device, layout = self.cluster.device, self.layout
        dense, expert = self.rank_parameters()
        if layout.zero:
            dense /= layout.shards
            expert /= max(1, layout.shards * layout.tp // (layout.ep * layout.expert_tp))
        moved = layout.kernels.optimizer_bytes * (dense + expert)
        return moved / (device.memory_bytes_per_second * device.efficiency.memory)

    def step(self) -> StepTime:
        """Predicted time of one step."""
        busy = max(stage.both for stage in self.stages) * self.layout.microbatches
        pipeline = self.pipeline_seconds()
        return StepTime(pipeline, pipeline - busy, self._settle(), self._optimizer())
