"""Prices of real modules' graphs against published runs: what ``quintnet.estimate`` says where a row says enough.

    python benchmarks/published_graphs.py                    # a sample of all rows on A100 and H100 in 16 bits
    python benchmarks/published_graphs.py --only DGXC --per-group 3 --json

For each row, the module of transformers that its model is, whole, on the meta device, compiled in the row's layout:
``own`` is the price of that graph with the kernels that this compiler runs, which is what a user is told; ``source``
has the kernels of the source's software (``KernelSet``) instead of all nodes that memory bounds, and its host.
Products, attention, communication and the schedule are the graph's in both. ``closed`` is the closed form.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.closed_forms.kernel_set import MEGATRON, KernelSet
from benchmarks.closed_forms.layer_kernels import Kernels, LayerWork, embedding, head, layer
from benchmarks.closed_forms.step_time import StepModel
from benchmarks.closed_forms.transformer import Decoder
from benchmarks.published_rows import Row, Run, Unmodelled, read, run_of
from benchmarks.published_runs import DATA, figures
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.core.annotations import is_getitem
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.replaced import one_thread
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts
from quintnet_compiler.cost_models.kernels import kernel_seconds, with_host
from quintnet_compiler.cost_models.operators import kernel_of
from quintnet_compiler.ir.batch_form import FlatBatch, plain_batch
from quintnet_compiler.ir.plan import Plan, read_plan
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.planner.build import Builder
from quintnet_compiler.planner.evaluate import evaluate
from quintnet_compiler.planner.places import Place, PricedCluster
from quintnet_compiler.planner.planning import Planner
from quintnet_compiler.planner.stage_units import StageUnit

DEVICES = ("a100-80", "a100-40", "a800", "h100", "h800")


@dataclass(frozen=True)
class Module:
    """A causal model of transformers, and where its blocks are."""

    architecture: str
    blocks: str
    sizes: Mapping[str, Any]

    @classmethod
    def of(cls, d: Decoder) -> Module:
        """The one whose products and attention a decoder has.

        Raises:
            Unmodelled: for a decoder whose layers differ, or whose attention does.
        """
        if len(set(d.kinds)) > 1 or d.kv_rank or d.shared_ffn or d.predicted or d.short:
            raise Unmodelled("a decoder whose module is not described here")
        if not d.gated and not d.experts and (d.biases or not d.rotary):
            sizes = {"n_layer": d.layers, "n_embd": d.hidden, "n_head": d.heads, "n_inner": d.ffn, "n_positions": d.seq,
                     "vocab_size": d.vocab, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}  # fmt: skip
            return cls("GPT2LMHeadModel", "transformer.h", sizes)
        sizes = {"num_hidden_layers": d.layers, "hidden_size": d.hidden, "intermediate_size": d.ffn,
                 "num_attention_heads": d.heads, "num_key_value_heads": d.kv, "head_dim": d.width,
                 "vocab_size": d.vocab, "max_position_embeddings": d.seq, "tie_word_embeddings": d.tied}  # fmt: skip
        if d.experts:
            more = {"intermediate_size": d.moe_ffn, "num_local_experts": d.experts, "num_experts_per_tok": d.top_k,
                    "output_router_logits": False, "sliding_window": None}  # fmt: skip
            return cls("MixtralForCausalLM", "model.layers", sizes | more)
        return cls("LlamaForCausalLM" if d.gated else "NemotronForCausalLM", "model.layers", sizes)

    def build(self) -> nn.Module:
        """On the meta device, in bf16."""
        import transformers

        model_class = getattr(transformers, self.architecture)
        with torch.device("meta"):
            model: nn.Module = model_class(model_class.config_class(**self.sizes))
        return model.to(torch.bfloat16)


@dataclass(frozen=True)
class SourceCosts(ClusterCosts):
    """Prices of a graph without its nodes that memory bounds: :func:`with_kernels` has those of ``kernels``."""

    kernels: KernelSet = MEGATRON

    def node_seconds(self, node: fx.Node) -> float:
        if node.op != "call_function" or is_getitem(node):
            return 0.0
        kernel = kernel_of(node, self.unknown)
        if kernel.kind == "memory":
            return 0.0
        if kernel.kind == "attention":
            kernel = replace(kernel, generation=self.kernels.flash_generation)
        return kernel_seconds(kernel, self.cluster.device)

    def accumulate_seconds(self, num_bytes: float) -> float:
        return 0.0

    def host_seconds(self, node: fx.Node | None) -> float:
        return 0.0  # that of the source's software is added to units

    def optimizer_seconds(self, num_bytes: float) -> float:
        return self._traffic(self.kernels.optimizer_bytes * num_bytes / 2)  # for each parameter of two bytes


@dataclass(frozen=True)
class Added:
    """To a phase of a unit: seconds of kernels, and how long the host launches all of the phase."""

    seconds: float
    host: float

    def __call__(self, there: float) -> float:
        return with_host(there + self.seconds, self.host)


def with_kernels(units: Sequence[StageUnit], run: Run, blocks: str) -> tuple[StageUnit, ...]:
    """Units without what memory bounds, with the kernels of the run's software for that."""
    device, layout = run.cluster().device, run.layout
    launch = 0.0 if layout.graphs else device.efficiency.host_seconds

    def phase(kernels: Kernels, launched: int, *, whole: Kernels = ()) -> Added:
        memory_bound = [kernel for kernel in kernels if kernel.kind == "memory"]
        seconds = sum(kernel_seconds(kernel, device) for kernel in (*memory_bound, *whole))
        return Added(seconds, launch * (launched + sum(kernel.launches for kernel in (*kernels, *whole))))

    def both(work: LayerWork) -> tuple[Added, Added]:
        redone = layout.recompute == "full"  # then the graph has the products that are redone
        ahead = phase(work.forward, len(work.forward_communication))
        back = phase((*work.backward, *(work.again if redone else ())),
                     len(work.backward_communication) + len(work.again_communication),
                     whole=() if redone else work.again)  # fmt: skip
        return ahead, back

    block, first, last = (both(part(run.model, layout)) for part in (layer, embedding, head))
    changed = []
    for place, unit in enumerate(units):
        # the first block begins where their list does
        kinds = [block] if unit.begin == blocks or unit.begin.startswith(f"{blocks}.") else []
        kinds += [first] if place == 0 else []
        kinds += [last] if place == len(units) - 1 else []
        forward, backward = unit.forward, unit.backward
        for ahead, back in kinds:
            forward, backward = ahead(forward), back(backward)
        changed.append(replace(unit, forward=forward, backward=backward))
    return tuple(changed)


def plan_of(run: Run, blocks: str) -> Plan:
    """The row's layout as a plan; stages begin where its software has them, if they are equal.

    Raises:
        Unmodelled: for what a plan cannot say.
    """
    layout, deep = run.layout, run.layout.pp * run.layout.vpp
    if layout.shard:
        raise Unmodelled("shard groups")
    if run.model.kv_rank or run.model.short or run.model.shared_ffn or run.model.dense_layers or run.model.sinks:
        raise Unmodelled("a model that Llama's, Nemotron's, GPT-2's and Mixtral's modules are not")
    if layout.recompute_share != 1:
        raise Unmodelled("some layers are recomputed")
    if layout.ep > 1 and (layout.expert_tp != layout.tp or layout.dp % layout.ep):
        raise Unmodelled("experts over tensor ranks")
    mesh = {"dp": layout.dp // layout.ep, "ep": layout.ep, "cp": layout.cp, "tp": layout.tp, "pp": layout.pp}
    plan: dict[str, Any] = {
        "mesh": {axis: size for axis, size in mesh.items() if size > 1} or {"dp": 1},
        "microbatches": layout.microbatches, "zero": layout.zero if layout.dp > 1 else 0,
        "recompute": "full" if layout.recompute == "full" else "none", "async_tp": layout.overlap_tp,
        "reduce_dtype": "float32" if layout.gradient_dtype == "fp32" else "parameter",
    }  # fmt: skip
    if layout.ep > 1:
        plan["zero_axes"] = ["dp", "ep"]
    if layout.cp > 1:
        plan["context"] = "ring"
    if layout.vpp > 1:
        plan |= {"schedule": "interleaved", "virtual_stages": layout.vpp}
    if deep > 1 and run.model.layers % deep == 0:
        plan["stages"] = [f"{blocks}.{number}" for number in range(0, run.model.layers, run.model.layers // deep)][1:]
    return read_plan(plan)


@dataclass(frozen=True)
class Prices:
    """Seconds of a step of one row."""

    id: str
    kinds: tuple[str, ...]
    module: str
    measured: float
    own: float
    source: float
    closed: float

    def error(self, name: str) -> float:
        error: float = getattr(self, name) / self.measured - 1
        return error


def kinds_of(run: Run) -> tuple[str, ...]:
    """Return the features of a layout."""
    layout = run.layout
    axes = [axis for axis in ("tp", "pp", "cp", "ep") if getattr(layout, axis) > 1]
    sliced = [f"ZeRO {layout.zero}"] if layout.zero and layout.dp > 1 else []
    return tuple([*sliced, *axes] if sliced or axes else ["dp alone"])


def chosen(rows: Sequence[Row], only: str, per_group: int) -> Iterator[Run]:
    """Rows of 16 bits on A100 and H100 with fused attention; ``per_group`` of each source, GPU, model and kind of
    layout, evenly spread."""
    by_group: dict[Any, list[Run]] = defaultdict(list)
    for row in rows:
        try:
            run = run_of(row)
            plan_of(run, Module.of(run.model).blocks)
        except Unmodelled:
            continue
        wanted = run.device in DEVICES and run.layout.dtype in ("bf16", "fp16") and run.layout.kernels.flash
        if run.seconds and wanted and row["id"].startswith(only):
            source, size = row["id"].partition("-")[0], (run.model.hidden, run.model.experts)
            by_group[source, run.device, size, kinds_of(run)].append(run)
    for runs in by_group.values():
        step = max(1.0, len(runs) / per_group)
        yield from (runs[int(place * step)] for place in range(min(per_group, len(runs))))


@one_thread()
def price(run: Run) -> Prices:
    """The prices of a row.

    Raises:
        Unmodelled: for what a plan cannot say; CompileError: whatever the compiler says of the layout.
    """
    module = Module.of(run.model)
    plan, cluster = plan_of(run, module.blocks), run.cluster()
    ids = torch.empty(run.layout.global_batch, run.model.seq, dtype=torch.long, device="meta")
    batch = plain_batch({"input_ids": ids, "labels": ids})
    captured = capture(module.build(), batch, None, once=True)
    machine = PricedCluster(cluster)
    planner = Planner.from_captured(captured, FlatBatch.flatten(batch).rows, machine, plan, RULES)
    own = planner.estimate()
    costs = SourceCosts(cluster, kernels=run.layout.kernels)
    builder = Builder(planner.folded, plan, RULES, machine.prices, costs)
    units = with_kernels(builder(own.layout), run, module.blocks)
    other = evaluate([Place(units, costs)] * own.layout.pp, own.layout, plan.stages)
    closed = StepModel(run.model, run.layout, cluster).step().seconds
    return Prices(run.id, kinds_of(run), module.architecture, run.seconds or 0.0, own.seconds, other.seconds, closed)


def summary(prices: Sequence[Prices], devices: Mapping[str, str]) -> dict[str, dict[str, dict[str, float]]]:
    """Figures of errors per price, of all rows, each source, each GPU and each kind of layout."""
    groups: dict[str, list[Prices]] = defaultdict(list)
    for row_prices in prices:
        names = [
            "all",
            f"source {row_prices.id.partition('-')[0]}",
            f"GPU {devices[row_prices.id]}",
            f"module {row_prices.module}",
        ]
        for name in (*names, *(f"with {kind}" for kind in row_prices.kinds)):
            groups[name].append(row_prices)
    return {
        name: {kind: figures([row_prices.error(kind) for row_prices in group]) for kind in ("source", "closed", "own")}
        for name, group in sorted(groups.items())
    }


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rows", type=Path, nargs="+", help="CSV files (default: those in benchmarks/data)")
    options.add_argument("--only", default="", help="rows whose id begins with this")
    options.add_argument("--per-group", type=int, default=2, help="rows of each source, GPU, model and kind of layout")
    options.add_argument("--json", action="store_true", help="print JSON and nothing else")
    args = options.parse_args()
    files = args.rows or [DATA / "published_runs.csv", DATA / "published_runs_single_node.csv"]
    prices, devices, refused = [], {}, Counter[str]()
    for run in chosen([row for file in files for row in read(file)], args.only, args.per_group):
        try:
            row_prices = price(run)
        except CompileError as error:
            refused[f"{run.id}: {error.code} {error.message}"] += 1
            continue
        prices.append(row_prices)
        devices[row_prices.id] = run.device
        if not args.json:
            errors = " ".join(f"{name} {100 * row_prices.error(name):+6.1f}%" for name in ("source", "closed", "own"))
            kinds = ", ".join(row_prices.kinds)
            head = f"{row_prices.id:42s} {row_prices.module:20s} {kinds:20s} {row_prices.measured:8.3f} s"
            print(f"{head} {errors}", flush=True)
    total = summary(prices, devices) if prices else {}
    if args.json:
        print(json.dumps({"rows": list(map(vars, prices)), "summary": total, "refused": dict(refused)}, indent=1))
        return
    columns = "rows | source: median % | p90 % | bias % | closed: median % | p90 % | own: median % | p90 %"
    print(f"\n| graph prices | {columns} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, each in total.items():
        source, closed, own = each["source"], each["closed"], each["own"]
        parts = [
            source["median"],
            source["p90"],
            source["bias"],
            closed["median"],
            closed["p90"],
            own["median"],
            own["p90"],
        ]
        print(f"| {name} | {source['rows']} | {' | '.join(f'{100 * part:.1f}' for part in parts)} |")
    for reason in refused:
        print(f"refused: {reason}")


if __name__ == "__main__":
    main()
