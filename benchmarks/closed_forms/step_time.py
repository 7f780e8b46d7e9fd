"""Time of one training step: pipeline of microbatches, what communication is not hidden, and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.collectives import beside, collective_seconds, in_turn, lost_seconds
from quintnet_compiler.cost_models.hardware import BYTES_PER_ELEMENT
from quintnet_compiler.cost_models.kernels import device_seconds, kernel_seconds, with_host
from quintnet_compiler.cost_models.links import Group

from . import expressions
from .layer_kernels import ALL, Communication, Kernels, LayerWork, embedding, head, layer, predicting
from .pipeline_time import Stage, interleaved_seconds, one_f_one_b_seconds
from .transformer import Decoder, LayerKind, ParallelLayout, stage_layers

# Parameters whose gradients travel together, and at least so many for each rank (Megatron-LM's
# DistributedDataParallelConfig.bucket_size).
BUCKET, BUCKET_PER_RANK = 40e6, 1e6
# What experts' exchanges take of the multiprocessors while they run beside computation: 20 of an H800's 132
# (DeepSeek-V3, section 3.2.2).
EXCHANGE_SHARE = 20 / 132
# Of a stage: seconds of its forward and its backward, and parameters that ranks of a tensor group share, and experts'.
Part = tuple[float, float, float, float]


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
        return lost_seconds(hidden, group, self.cluster.parts)

    def _communication(self, collectives: Sequence[Communication], kernels: Kernels) -> float:
        """Return the seconds of communication that no kernel hides."""
        exposed = 0.0
        windows: dict[tuple[str, ...], float] = {}
        for item in collectives:
            group = self.group(item.axis)
            seconds = collective_seconds(item.name, group, item.num_bytes)
            if not item.beside or self.layout.blocking:
                exposed += seconds
                continue
            window = windows.get(item.beside)
            if window is None:
                near = [k for k in kernels if item.beside == ALL or k.name in item.beside]
                window = sum(kernel_seconds(k, self.cluster.device) for k in near)
            hidden = min(seconds, window)
            windows[item.beside] = window - hidden
            lost = EXCHANGE_SHARE * hidden if item.beside == ALL else self._lost(hidden, group)
            exposed += seconds - hidden + lost
        return exposed

    def group(self, axis: str) -> Group:
        """Return the links between the ranks of ``axis``."""
        if axis == "ep":  # experts live on context and data ranks, and on tensor ranks that do not split an expert
            return self.cluster.group(self.layout.ep, self.layout.expert_tp)
        return self.cluster.axis(self.layout.mesh, axis)

    def _seconds(self, work: LayerWork) -> tuple[float, float, float]:
        """Return forward, backward and redone seconds of one part, with the communication that is not hidden."""
        share = self.cluster.device.efficiency
        per_launch = 0.0 if self.layout.graphs else share.host_seconds
        seconds = []
        for kernels, messages in (
            (work.forward, work.forward_communication),
            (work.backward, work.backward_communication),
            (work.again, work.again_communication),
        ):
            device = device_seconds(kernels, self.cluster.device)
            device += self._communication(messages, kernels)
            launches = sum(k.launches for k in kernels) + len(messages)
            host = launches * per_launch
            seconds.append(device + host if self.layout.blocking else with_host(device, host))
        return seconds[0], seconds[1], seconds[2]

    @cached_property
    def _kinds(self) -> dict[LayerKind, tuple[float, float, float]]:
        kinds = {*self.model.kinds, self.model.kinds[-1]}
        return {kind: self._seconds(layer(self.model, self.layout, kind)) for kind in kinds}

    @cached_property
    def layer(self) -> tuple[float, float, float]:
        """Return forward, backward and redone seconds of a layer, on average over the model's."""
        layers = [self._kinds[kind] for kind in self.model.kinds]
        forward, backward, again = (sum(column) / len(layers) for column in zip(*layers, strict=True))
        return forward, backward, again

    def _part(self, kind: LayerKind) -> Part:
        forward, backward, again = self._kinds[kind]
        experts = 0.0 if kind.dense else expressions.expert_parameters(self.model)
        shared = expressions.layer_parameters(self.model, kind.dense) - experts
        return forward, backward + again * self.layout.recompute_share, shared, experts

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Return one microbatch on each stage."""
        model, layout = self.model, self.layout
        parts = [self._part(kind) for kind in model.kinds]
        table = expressions.embedding_parameters(model)  # a tied table, for each use
        first, last = (
            (*self._seconds(work)[:2], table, 0.0) for work in (embedding(model, layout), head(model, layout))
        )
        forward, backward, _ = self._seconds(predicting(model, layout))
        further = [(forward, backward, 2.0 * model.hidden**2, 0.0), self._part(model.kinds[-1]), last] * model.predicted
        stage_parts: list[list[Part]] = []
        for count in stage_layers(model, layout):
            stage_parts.append(parts[:count])
            parts = parts[count:]
        stage_parts[0].insert(0, first)
        stage_parts[-1] += [last, *further]
        return tuple(self._stage(stage) for stage in stage_parts)

    def _stage(self, parts: Sequence[Part]) -> Stage:
        """Return the times of a stage, of its parts in order.

        Parts have seconds of their forward and backward, and parameters. ZeRO 3 gathers these one part ahead of
        computation, and 2 and 3 scatter gradients after it.
        """
        layout, ahead, back = self.layout, [part[0] for part in parts], [part[1] for part in parts]
        if layout.zero < 3 or layout.shards == 1:
            return Stage(sum(ahead), sum(back))
        group = self.cluster.group(layout.shards, layout.tp)
        apart = layout.ep * layout.expert_tp  # over so many ranks experts are split, and sliced over the others
        held = max(1, layout.shards * layout.tp // apart)
        expert_group = self.cluster.group(held, apart) if self.model.experts and held > 1 else Group(())

        def moved(name: str, element: float) -> list[float]:
            return [
                collective_seconds(name, group, element * n / layout.tp)
                + collective_seconds(name, expert_group, element * experts / apart)
                for _, _, n, experts in parts
            ]

        gather = moved("all_gather", 2)
        scatter = [
            seconds + self._copies(n / layout.tp)
            for seconds, (_, _, n, _) in zip(
                moved("reduce_scatter", BYTES_PER_ELEMENT[layout.gradient_dtype]), parts, strict=True
            )
        ]

        def lost(hidden: float) -> float:
            return self._lost(hidden, group)

        nothing = [0.0] * len(parts)
        last = [0.0, *gather[-2::-1]]  # the last part's parameters are still there
        if not layout.overlap_dp:
            return Stage(sum(ahead) + sum(gather), sum(back) + sum(last) + sum(scatter))
        return Stage(in_turn(ahead, gather, nothing, lost), in_turn(back[::-1], last, scatter[::-1], lost))

    def _copies(self, size: float) -> float:
        """Return the time of summing the gradients of ``size`` parameters over ranks that hold the same slices."""
        layout = self.layout
        if layout.shards == layout.dp * layout.cp:
            return 0.0
        replicas = self.cluster.group(layout.dp * layout.cp // layout.shards, layout.tp * layout.shards)
        return collective_seconds(
            "all_reduce", replicas, BYTES_PER_ELEMENT[layout.gradient_dtype] * size / layout.shards
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
        """Dense and expert parameters of the fullest rank (of the first or the last stage)."""
        stages = {0, self.layout.pp - 1}
        return max((expressions.held_parameters(self.model, self.layout, stage) for stage in stages), key=sum)

    def _settle(self) -> float:
        """Reduction of gradients (and gathering of parameters) over data ranks that is not hidden."""
        layout = self.layout
        ranks = layout.dp * layout.cp
        if ranks == 1 or layout.zero == 3:
            return 0.0
        dense, expert = self.rank_parameters()
        element, waited = BYTES_PER_ELEMENT[layout.gradient_dtype], 0.0
        group = self.cluster.group(layout.shards if layout.zero else ranks, layout.tp)
        # Megatron's buckets, which grow with the number of ranks because latency does
        count = max(1.0, dense / max(BUCKET, BUCKET_PER_RANK * ranks))
        table = float(expressions.embedding_parameters(self.model)) / layout.tp
        last = min(1.0, max(1 / count, table / dense))  # a table is a bucket of its own, or in a larger one
        if layout.zero == 0:
            reduce = count * collective_seconds("all_reduce", group, element * dense / count)
            gather = 0.0
        else:
            scatter = collective_seconds("reduce_scatter", group, element * dense / count)
            reduce = count * (scatter + self._copies(dense / count))
            gather = count * collective_seconds("all_gather", group, 2 * dense / count)
        if layout.zero and layout.owners:  # in the order of owners, so that the next forward waits for all of them
            products = expressions.products(self.model, layout.kernels.joined)
            owned = min(layout.shards, products * stage_layers(self.model, layout)[0] + 2)
            waited, gather = owned * collective_seconds("broadcast", group, 2 * dense / owned), 0.0
        copies = ranks * layout.tp // (layout.ep * layout.expert_tp)
        if expert and copies > 1:
            far = self.cluster.group(copies, layout.ep * layout.expert_tp)
            reduce += collective_seconds("all_reduce", far, element * expert)
        if not layout.overlap_dp:
            return waited + reduce + gather
        behind = self.stages[0]
        # the last bucket, the table's, is full, or the first one needed, when nothing is left to run beside it
        return waited + sum(
            last * moved + beside(window, moved - last * moved, lambda hidden: self._lost(hidden, group)) - window
            for moved, window in ((reduce, behind.backward), (gather, behind.forward))
        )

    def _optimizer(self) -> float:
        device, layout = self.cluster.device, self.layout
        dense, expert = self.rank_parameters()
        if layout.zero:
            dense /= layout.shards
            expert /= max(1, layout.shards * layout.tp // (layout.ep * layout.expert_tp))
        moved = layout.kernels.optimizer_bytes * (dense + expert)
        return device.launch_seconds + moved / (device.memory_bytes_per_second * device.efficiency.memory)

    def step(self) -> StepTime:
        """Predicted time of one step."""
        busy = max(stage.both for stage in self.stages) * self.layout.microbatches
        pipeline = self.pipeline_seconds()
        return StepTime(pipeline, pipeline - busy, self._settle(), self._optimizer())
