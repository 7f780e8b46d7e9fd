"""Time of one training step: pipeline of microbatches, what communication is not hidden, and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from . import closed_forms
from .cluster import Cluster, Group
from .collectives import collective_seconds
from .hardware import BYTES_PER_ELEMENT
from .kernels import kernel_seconds, phase_seconds
from .layer_kernels import Communication, Kernels, LayerWork, embedding, head, layer
from .pipeline_time import Stage, interleaved_seconds, one_f_one_b_seconds
from .transformer import Decoder, ParallelLayout, stage_layers

# Mixed-precision Adam per parameter: gradients to fp32 and their norm (r4 w4, r4), parameter, two moments and gradient
# (r16, w12), and the 16-bit copy (r4 w2).
OPTIMIZER_BYTES = 46


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

    def _paid(self, hidden: float, group: Group) -> float:
        """What computation loses to ``hidden`` seconds of communication over ``group`` beside it."""
        fast = self.cluster.levels[0].bytes_per_second
        slowdown = min(1.0, min(hop.bytes_per_second for hop in group.hops) / fast) if group.hops else 0.0
        return self.cluster.device.efficiency.contention * hidden * slowdown

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
            exposed += seconds - hidden + self._paid(hidden, group)
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
            extra = [0.0, 0.0]
            for end, (f, b, _) in ends.items():
                if stage == (0 if end == 0 else len(counts) - 1):
                    extra[0] += f
                    extra[1] += b
            stage_forward, stage_backward = count * forward, count * backward
            if self.layout.zero == 3 and self.layout.shards > 1:
                stage_forward, stage_backward = self._gathered(count, forward, backward)
            found.append(Stage(stage_forward + extra[0], stage_backward + extra[1]))
        return tuple(found)

    def _gathered(self, count: int, forward: float, backward: float) -> tuple[float, float]:
        """Layers whose parameters are gathered one ahead of computation; gradients are scattered behind it."""
        layout = self.layout
        size = closed_forms.layer_parameters(self.model) / layout.tp
        group = self.cluster.group(layout.shards, layout.tp)
        gather = collective_seconds("all_gather", group, 2 * size)
        scatter = collective_seconds("reduce_scatter", group, BYTES_PER_ELEMENT[layout.gradient_dtype] * size)
        if layout.shards < layout.dp * layout.cp:
            rest = self.cluster.group(layout.dp * layout.cp // layout.shards, layout.tp * layout.shards)
            scatter += collective_seconds(
                "all_reduce", rest, BYTES_PER_ELEMENT[layout.gradient_dtype] * size / layout.shards
            )

        def beside(work: float, moved: float) -> float:
            return max(work + self._paid(min(work, moved), group), moved)

        return (
            gather + count * beside(forward, gather),
            scatter + count * beside(backward, gather + scatter),
        )

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
            max(0.0, moved - window) + self._paid(min(moved, window), group)
            for moved, window in ((reduce, behind.backward), (gather, behind.forward))
        )

    def _optimizer(self) -> float:
        device, layout = self.cluster.device, self.layout
        dense, expert = self.rank_parameters()
        if layout.zero:
            dense /= layout.shards
            expert /= max(1, layout.shards * layout.tp // (layout.ep * layout.expert_tp))
        return OPTIMIZER_BYTES * (dense + expert) / (device.memory_bytes_per_second * device.efficiency.memory)

    def step(self) -> StepTime:
        """Predicted time of one step."""
        busy = max(stage.both for stage in self.stages) * self.layout.microbatches
        pipeline = self.pipeline_seconds()
        return StepTime(pipeline, pipeline - busy, self._settle(), self._optimizer())
