"""Cost models: closed forms against counting, published micro-measurements, monotone prices, errors for the unknown."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import fx

from benchmarks.closed_forms import expressions
from benchmarks.closed_forms.kernel_set import MEGATRON, QUINTNET, KernelSet, Passes
from benchmarks.closed_forms.layer_kernels import ATTENTION_TILE, layer
from benchmarks.closed_forms.memory import (
    WORKSPACE_BYTES,
    backward_bytes,
    in_flight,
    layer_activation_bytes,
    peak_memory,
    stage_memory,
)
from benchmarks.closed_forms.pipeline_time import Stage, interleaved_seconds, one_f_one_b_seconds
from benchmarks.closed_forms.step_time import StepModel
from benchmarks.closed_forms.transformer import Decoder, ParallelLayout, stage_layers
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.core.annotations import Facts, annotate
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.collectives import (
    ALGORITHMS,
    BANDWIDTH_SHARE,
    MAX_BUCKET_BYTES,
    MIN_BUCKET_BYTES,
    MIN_BUCKETS,
    _around,
    bucket_bytes,
    collective_seconds,
    in_turn,
)
from quintnet_compiler.cost_models.hardware import A100_80, H100, HARDWARE, hardware
from quintnet_compiler.cost_models.kernels import kernel_seconds, matmul, memory, work_seconds
from quintnet_compiler.cost_models.operator_runs import run_seconds, traffic_seconds
from quintnet_compiler.cost_models.operators import kernel_of
from quintnet_compiler.cost_models.roofline import Roofline
from quintnet_compiler.ops.attention.ring_plan import ring_plan
from quintnet_compiler.ops.collectives import ring_attention
from quintnet_compiler.passes.frontend.normalize import Normalize
from quintnet_compiler.schedules.kinds import one_f_one_b
from quintnet_compiler.schedules.schedule import Op, chain, earliest_spans

from ..models import GPT, _llama, _tokens
from .graphs import linear

torch.set_num_threads(1)
OLD = {
    "dtype": "fp16",
    "gradient_dtype": "fp16",
    "kernels": KernelSet(flash=False),
    "overlap_dp": False,
    "overlap_pp": False,
}


def _korthikanti(layers: int, hidden: int, heads: int) -> Decoder:
    return Decoder(layers, hidden, 4 * hidden, heads, 51200, 2048, dropout=True, learned_positions=2048)


# -- closed forms


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_closed_forms_equal_a_counted_model(kind: str) -> None:
    length = 16
    if kind == "gpt":
        module, batch = GPT(width=64, depth=3, heads=4), _tokens(2, length, 64)
        vocab, positions = module.wte.weight.shape[0], module.wpe.weight.shape[0]
        model = Decoder(3, 64, 256, 4, vocab, length, tied=True, learned_positions=positions)
        tied = module.lm_head.weight is module.wte.weight
        model = replace(model, tied=tied)
    else:
        module = _llama()
        config = module.config  # type: ignore[union-attr]
        batch = {
            "input_ids": torch.ones(2, length, dtype=torch.long),
            "labels": torch.ones(2, length, dtype=torch.long),
        }
        model = Decoder(
            config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads,
            config.vocab_size, length, kv_heads=config.num_key_value_heads, head_dim=config.head_dim or 0, gated=True,
            tied=bool(config.tie_word_embeddings), biases=False,
        )  # fmt: skip
    assert expressions.parameters(model) == sum(p.numel() for p in module.parameters())
    program = Normalize(2, torch.device("cpu"))(capture(module, batch))  # type: ignore[arg-type]
    counted = 0.0
    for node in program.graph.nodes:
        if node.op != "call_function" or getattr(node.target, "__name__", "") == "getitem":
            continue
        kernel = kernel_of(node)
        if kernel.kind == "matmul":
            # rotary angles are a product of positions and frequencies: an outer one, of depth 1
            counted += kernel.flops if kernel.depth > 1 else 0
        elif kernel.kind == "attention":
            counted += 2 * kernel.flops if _causal(node) else kernel.flops
    assert counted == 2 * expressions.forward_flops(model)


def _causal(node: fx.Node) -> bool:
    return bool(
        node.kwargs.get("mask") == "causal" or node.kwargs.get("is_causal") or (len(node.args) > 5 and node.args[5])
    )


@pytest.mark.parametrize(
    ("hidden", "heads", "sequence", "selective", "both", "full"),
    [
        (6144, 64, 66.84, 49.42, 16.18, 7.64),
        (12288, 96, 62.04, 56.53, 18.49, 8.71),
        (20480, 128, 58.31, 62.04, 20.27, 9.42),
    ],
)
def test_activations_of_figure_7(
    hidden: int, heads: int, sequence: float, selective: float, both: float, full: float
) -> None:
    """Korthikanti et al. 2022, figure 7: percentages of plain tensor parallelism over 8 ranks (the last is of 2 sbh
    over 8 ranks in the paper's figure, here as in its table 2)."""
    model = _korthikanti(1, hidden, heads)
    whole = expressions.korthikanti_activations(model, 1, 8, False, "none")

    def percent(sequence_parallel: bool, recompute: str) -> float:
        return float(100 * expressions.korthikanti_activations(model, 1, 8, sequence_parallel, recompute) / whole)

    assert percent(True, "none") == pytest.approx(sequence, abs=0.3)
    assert percent(False, "selective") == pytest.approx(selective, abs=0.3)
    assert percent(True, "selective") == pytest.approx(both, abs=0.3)
    assert percent(False, "full") == pytest.approx(full, abs=0.3)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_memory_model_follows_the_closed_form(recompute: str) -> None:
    model = _korthikanti(1, 12288, 96)
    layout = ParallelLayout(tp=8, recompute=recompute, kernels=KernelSet(flash=False), dtype="fp16")  # type: ignore[arg-type]
    expected = expressions.korthikanti_activations(model, 1, 8, False, recompute)
    assert layer_activation_bytes(model, layout) == pytest.approx(float(expected), rel=0.08)


def test_explain_prints_expressions_with_numbers() -> None:
    text = [
        str(form)
        for form in expressions.explain(_korthikanti(48, 6144, 64), ParallelLayout(tp=8, microbatch=4, global_batch=4))
    ]
    assert text[0].startswith("parameters = ") and "L=48" in text[0] and "h=6144" in text[0]
    assert len(text) == 6
    model = _korthikanti(48, 6144, 64)
    first = expressions.explain(model, ParallelLayout())[0]
    assert first.value == expressions.parameters(model)


# -- published measurements


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "forward", "backward"),
    [
        (0, "none", 7.7, 11.9),
        (1, "none", 7.2, 11.8),
        (0, "full", 7.7, 19.5),
        (0, "selective", 7.7, 13.2),
        (1, "selective", 7.2, 13.1),
    ],
)
def test_layer_times_of_table_4(sequence_parallel: int, recompute: str, forward: float, backward: float) -> None:
    """Korthikanti et al. 2022, table 4: milliseconds of one layer of the 22B model; within 7%."""
    layout = ParallelLayout(
        tp=8,
        microbatch=4,
        global_batch=4,
        sequence_parallel=bool(sequence_parallel),
        recompute=recompute,
        **OLD,  # type: ignore[arg-type]
    )
    found = StepModel(_korthikanti(48, 6144, 64), layout, Cluster("a100")).layer
    assert 1e3 * found[0] == pytest.approx(forward, rel=0.07)
    assert 1e3 * (found[1] + found[2]) == pytest.approx(backward, rel=0.07)


def test_iteration_times_of_table_5() -> None:
    """Korthikanti et al. 2022, table 5: mean error at most 3.7% and no error above 9%."""
    errors = []
    for layers, hidden, heads, pp, vpp, batch, size, full, selective in (
        (48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10), (96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
        (105, 20480, 128, 35, 3, 280, 1, 49.05, 37.83), (128, 25600, 160, 64, 1, 512, 1, 94.42, 71.49),
    ):  # fmt: skip
        for recompute, seconds in (("full", full), ("selective", selective)):
            layout = ParallelLayout(
                tp=8, pp=pp, vpp=vpp, microbatch=size, global_batch=batch, recompute=recompute,  # type: ignore[arg-type]
                sequence_parallel=recompute == "selective", **OLD,  # type: ignore[arg-type]
            )  # fmt: skip
            found = StepModel(_korthikanti(layers, hidden, heads), layout, Cluster("a100", nodes=pp)).step()
            errors.append(abs(found.seconds / seconds - 1))
    assert max(errors) < 0.09 and sum(errors) / len(errors) < 0.037


# -- properties

SIZES = st.integers(1, 1 << 14)


@given(SIZES, SIZES, SIZES, st.sampled_from(sorted(HARDWARE)))
@settings(max_examples=150, deadline=None)
def test_a_kernel_is_never_faster_than_the_datasheet(rows: int, columns: int, depth: int, name: str) -> None:
    device = HARDWARE[name]
    kernel = matmul("x", rows, columns, depth, dtype="bf16")
    seconds = kernel_seconds(kernel, device)
    assert seconds >= kernel.flops / device.flops_per_second("bf16")
    assert seconds >= kernel.bytes / device.memory_bytes_per_second
    assert seconds >= work_seconds(kernel, device) > 0


@given(st.floats(1, 1e12), st.floats(1, 1e12))
def test_more_bytes_take_longer(one: float, other: float) -> None:
    few, many = sorted((one, other))
    assert kernel_seconds(memory("x", few), H100) <= kernel_seconds(memory("x", many), H100)


@given(st.sampled_from(sorted(ALGORITHMS)), st.floats(1, 1e11), st.floats(1, 1e11), st.sampled_from([2, 8, 16, 256]))
@settings(deadline=None)
def test_collectives_grow_with_bytes_and_slow_down_over_slower_levels(
    name: str, one: float, other: float, ranks: int
) -> None:
    cluster = Cluster("h100", nodes=64, oversubscription=7)
    few, many = sorted((one, other))
    group = cluster.group(ranks)
    assert 0 < collective_seconds(name, group, few) <= collective_seconds(name, group, many)
    fast = Cluster("h100", nodes=64).group(ranks)
    assert collective_seconds(name, fast, few) <= collective_seconds(name, group, few)
    if ranks <= 8:
        assert collective_seconds(name, group, many) <= collective_seconds(name, cluster.group(ranks, 8), many)


@given(st.sampled_from(["all_reduce", "reduce_scatter"]), st.sampled_from([2, 8, 16, 64, 256]), st.floats(1e6, 1e12))
@settings(deadline=None)
def test_buckets_are_as_small_as_links_allow(name: str, ranks: int, total: float) -> None:
    """Half of one would lose more than a tenth to latency, unless they end elsewhere."""
    group = Cluster("h100", nodes=32).group(ranks)

    def reached(size: float) -> float:
        return size / 1e13 * collective_seconds(name, group, 1e13) / collective_seconds(name, group, size)

    found = bucket_bytes(lambda size: collective_seconds(name, group, size), total)
    assert MIN_BUCKET_BYTES <= found <= MAX_BUCKET_BYTES and found.bit_count() == 1
    assert found == MIN_BUCKET_BYTES or (found <= total / MIN_BUCKETS and reached(found / 2) < BANDWIDTH_SHARE + 1e-3)
    assert reached(found) > BANDWIDTH_SHARE - 1e-3 or 2 * found > min(MAX_BUCKET_BYTES, total / MIN_BUCKETS)


def test_buckets_grow_with_latency() -> None:
    cluster = Cluster("h100", nodes=32)
    groups = [cluster.group(ranks) for ranks in (2, 8, 64, 256)]
    sizes = [bucket_bytes(partial(collective_seconds, "reduce_scatter", group), 1e12) for group in groups]
    assert [size / 2**20 for size in sizes] == [128, 128, 512, 512]
    slow = Cluster("h100", nodes=32, network_seconds=1e-3).group(256)
    assert bucket_bytes(partial(collective_seconds, "reduce_scatter", slow), 1e12) == MAX_BUCKET_BYTES
    assert bucket_bytes(partial(collective_seconds, "reduce_scatter", groups[0]), 1e8) == 2**23  # an eighth


def test_collectives_have_seconds_as_unit() -> None:
    """1 GB around 8 GPUs at NVLink's speed: twice 7/8 of it at what the link reaches, within the ramp."""
    found = collective_seconds("all_reduce", Cluster("a100").group(8), 1e9)
    share = A100_80.efficiency.link * A100_80.link_bytes_per_second
    assert found == pytest.approx(2 * 7 / 8 * 1e9 / share, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6), st.integers(1, 30))
@example([(7, 7), (1, 1), (4, 9)], 17)  # a stage that is nearly the slowest: its queue is long in the making
@settings(max_examples=60, deadline=None)
def test_1f1b_recurrence_equals_the_simulated_schedule(stages: list[tuple[int, int]], microbatches: int) -> None:
    def seconds(action: object) -> float:
        return float(stages[action.stage][0 if action.op is Op.FORWARD else 1])  # type: ignore[attr-defined]

    schedule = one_f_one_b(len(stages), microbatches)
    spans = earliest_spans(schedule, chain(len(stages)), seconds)
    end = max(span.end for row in spans for span in row)
    assert one_f_one_b_seconds([Stage(f, b) for f, b in stages], microbatches) == pytest.approx(end)


@given(st.integers(1, 8), st.integers(1, 64), st.integers(1, 4))
def test_bubbles_equal_the_closed_form(pp: int, rounds: int, vpp: int) -> None:
    microbatches = pp * rounds
    busy = 3.0 * microbatches
    assert one_f_one_b_seconds([Stage(1, 2)] * pp, microbatches) == pytest.approx(
        busy * (1 + expressions.bubble_share(pp, microbatches))
    )
    assert interleaved_seconds([Stage(1, 2)] * pp, microbatches, vpp) == pytest.approx(
        busy * (1 + expressions.bubble_share(pp, microbatches, vpp))
    )


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.booleans(), st.integers(0, 3))
@settings(deadline=None)
def test_layouts_change_steps_and_memory_the_way_they_must(tp: int, pp: int, flash: bool, zero: int) -> None:
    model = Decoder(8, 4096, 16384, 32, 51200, 2048)
    layout = ParallelLayout(tp=tp, pp=pp, dp=4, global_batch=64, kernels=KernelSet(flash=flash), zero=zero)
    cluster = Cluster("h100", nodes=16)
    step = StepModel(model, layout, cluster).step().seconds
    assert StepModel(model, replace(layout, recompute="full"), cluster).step().seconds >= step
    assert StepModel(model, replace(layout, global_batch=128), cluster).step().seconds > step
    memory_used = peak_memory(model, layout).allocated
    assert peak_memory(model, replace(layout, recompute="full")).activations < peak_memory(model, layout).activations
    assert peak_memory(model, replace(layout, microbatch=2)).allocated > memory_used
    if zero < 3:
        assert peak_memory(model, replace(layout, zero=zero + 1)).parameters <= peak_memory(model, layout).parameters
        assert peak_memory(model, replace(layout, zero=zero + 1)).optimizer <= peak_memory(model, layout).optimizer
    assert sum(stage_layers(model, layout)) == model.layers
    assert in_flight(layout, 0) == min(pp, layout.microbatches)


# -- kernel sets


def test_a_kernel_set_lists_what_its_software_runs() -> None:
    llama = Decoder(2, 64, 256, 4, 512, 32, 2, gated=True, biases=False, rotary=True)

    def names(kernels: KernelSet, phase: str) -> list[str]:
        found = layer(llama, ParallelLayout(kernels=kernels, recompute="full"))
        return [kernel.name for kernel in getattr(found, phase) if kernel.bytes]

    assert [names(kernels, "forward").count("qkv") for kernels in (MEGATRON, QUINTNET)] == [1, 3]
    assert [names(kernels, "backward").count("qkv.sums") for kernels in (MEGATRON, QUINTNET)] == [0, 1]
    assert [names(kernels, "again").count("down") for kernels in (MEGATRON, QUINTNET)] == [1, 0]


def test_passes_count_bytes_and_launches() -> None:
    gpt = Decoder(2, 64, 256, 4, 512, 32)
    often = replace(MEGATRON, activation=Passes(7, 11, 3, 5))
    found = layer(gpt, ParallelLayout(kernels=often, microbatch=2, global_batch=2))
    ahead = next(kernel for kernel in found.forward if kernel.name == "activation")
    back = next(kernel for kernel in found.backward if kernel.name == "activation.backward")
    size = 2 * 2 * 32 * 256  # bytes, sequences, positions, the MLP's width
    assert (ahead.bytes, ahead.launches) == (7 * size, 3) and (back.bytes, back.launches) == (11 * size, 5)


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=5))
def test_communication_in_turn_is_hidden_at_most(parts: list[tuple[int, int, int]]) -> None:
    work, before, after = (list(column) for column in zip(*parts, strict=True))
    found = in_turn(work, before, after, lambda hidden: 0.0)
    assert max(sum(work), sum(before) + sum(after)) <= found <= sum(work) + sum(before) + sum(after)
    assert in_turn(work, before, after, lambda hidden: 0.1 * hidden) >= found


# -- what is unknown raises


def test_unknown_things_raise() -> None:
    graph = fx.Graph()
    x = annotate(graph.placeholder("x"), Facts(torch.ones(2)))
    node = annotate(graph.call_function(torch.ops.aten._histogramdd_bin_edges.default, (x,)), Facts(torch.ones(2)))
    with pytest.raises(CompileError, match=r"QN210.*\n.*_histogramdd_bin_edges"):
        Roofline().operator_seconds(node)
    with pytest.raises(CompileError, match=r"unknown hardware 'h1000'.*\n.*h100"):
        hardware("h1000")
    with pytest.raises(CompileError, match="no price for the collective 'all_scatter'"):
        collective_seconds("all_scatter", Cluster("h100").group(8), 1.0)
    with pytest.raises(CompileError, match="QN301"):
        Cluster("h100").group(16)
    with pytest.raises(CompileError, match="no axis 'xp'"):
        Cluster("h100").axis((("tp", 8),), "xp")
    with pytest.raises(CompileError, match="no throughput for fp12"):
        H100.flops_per_second("fp12")
    with pytest.raises(CompileError, match="QN106"):
        ParallelLayout(dp=3, global_batch=4)


def test_groups_follow_the_order_of_the_mesh() -> None:
    cluster = Cluster("h100", nodes=4)
    mesh = (("tp", 4), ("cp", 2), ("dp", 2), ("pp", 2))
    names = {axis: [hop.level.name for hop in cluster.axis(mesh, axis).hops] for axis, _ in mesh}
    assert names == {"tp": ["NVLink"], "cp": ["NVLink"], "dp": ["leaf"], "pp": ["leaf"]}
    both = cluster.group(16)
    assert [(hop.members, hop.lanes) for hop in both.hops] == [(8, 1), (2, 8)]


# -- parts of operators


@pytest.mark.parametrize("share", [1.0, 0.5, 0.125])
def test_a_run_of_a_product_is_its_kernel_and_one_for_each_gradient(share: float) -> None:
    _, nodes = linear(rows=4096, features=512, results=256)  # x @ w.T, of which w trains
    rows = int(4096 * share)
    found = run_seconds(nodes["y"], share, [4.0 * rows * 512, 4.0 * 256 * 512], 4.0 * rows * 256, H100, "error")
    kernel = partial(kernel_seconds, device=H100)
    assert found.forward == pytest.approx(kernel(matmul("", rows, 256, 512, dtype="fp32", element=4.0)))
    assert found.input == 0.0
    assert found.weight == pytest.approx(kernel(matmul("", 512, 256, rows, dtype="fp32", element=4.0)))


def test_a_sum_passes_its_gradient_on() -> None:
    _, nodes = linear()
    found = run_seconds(nodes["loss"], 1.0, [4e6], 4.0, H100, "error")
    assert found.forward == pytest.approx(traffic_seconds(4e6 + 4, H100)) and found.input == found.weight == 0.0


# -- models with experts, windows, latent attention

ROTARY = {"gated": True, "tied": False, "biases": False, "rotary": True}
LATENT = {"head_dim": 192, "kv_rank": 512, "rotary_width": 64, "value_width": 128}
DEEPSEEK_V3 = Decoder(61, 7168, 18432, 128, 129280, 4096, experts=256, top_k=8, moe_ffn=2048, dense_layers=3,
                      shared_ffn=2048, query_rank=1536, **LATENT, **ROTARY)  # fmt: skip
GPT_OSS = Decoder(36, 2880, 2880, 64, 201088, 4096, 8, head_dim=64, experts=128, top_k=4, moe_ffn=2880, window=128,
                  windowed=18, sinks=True, gated=True, tied=False, biases=True, rotary=True)  # fmt: skip
REAL = {
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", {}, DEEPSEEK_V3),
    "DeepSeek-V2-Lite": (
        "DeepseekV2ForCausalLM",
        {"num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10944, "num_attention_heads": 16,
         "num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2,
         "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "vocab_size": 102400},
        Decoder(27, 2048, 10944, 16, 102400, 4096, experts=64, top_k=6, moe_ffn=1408, dense_layers=1, shared_ffn=2816,
                **LATENT, **ROTARY),
    ),
    "GPT-OSS 120B": ("GptOssForCausalLM", {}, GPT_OSS),
    "GPT-OSS 20B": (
        "GptOssForCausalLM", {"num_hidden_layers": 24, "num_local_experts": 32},
        replace(GPT_OSS, layers=24, windowed=12, experts=32),
    ),
    "Mixtral": (
        "MixtralForCausalLM", {},
        Decoder(32, 4096, 14336, 32, 32000, 4096, 8, experts=8, top_k=2, moe_ffn=14336, **ROTARY),
    ),
    "Qwen3 30B A3B": (
        "Qwen3MoeForCausalLM",
        {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
         "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768, "intermediate_size": 6144,
         "vocab_size": 151936},
        Decoder(48, 2048, 6144, 32, 151936, 4096, 4, head_dim=128, experts=128, top_k=8, moe_ffn=768, head_norms=True,
                **ROTARY),
    ),
    "Mistral": (
        "MistralForCausalLM", {}, Decoder(32, 4096, 14336, 32, 32000, 8192, 8, window=4096, windowed=32, **ROTARY),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_parameters_are_those_of_the_real_modules(name: str) -> None:
    import transformers

    architecture, sizes, model = REAL[name]
    found = getattr(transformers, architecture)
    with torch.device("meta"):
        module = found(found.config_class(**sizes))
    assert expressions.parameters(model) == sum(parameter.numel() for parameter in module.parameters())
    assert expressions.explain(model, ParallelLayout())[0].value == expressions.parameters(model)
    layout = ParallelLayout(pp=4, ep=2, global_batch=4)
    held = [expressions.held_parameters(model, layout, stage) for stage in range(4)]
    tables = 0 if not model.tied else model.hidden * model.vocab
    assert sum(dense + 2 * routed for dense, routed in held) == expressions.parameters(model) - model.hidden + tables


@pytest.mark.parametrize("model", [DEEPSEEK_V3, GPT_OSS], ids=["DeepSeek-V3", "GPT-OSS"])
def test_kernels_of_a_layer_do_the_closed_form_s_arithmetic(model: Decoder) -> None:
    for kind in set(model.kinds):
        work = layer(model, ParallelLayout(), kind)
        products = sum(k.flops for k in work.forward if k.kind == "matmul")
        scores = sum(k.flops for k in work.forward if k.kind == "attention")
        full = 2 * model.seq**2 * model.heads * (model.width + model.value)
        assert products == pytest.approx(expressions.layer_forward_flops(model, kind.dense) - full, rel=1e-3)
        seen = (model.window + ATTENTION_TILE) / model.seq if kind.short else 0.5
        assert scores == pytest.approx(seen * full)


def test_layers_of_all_kinds_are_counted_where_they_are() -> None:
    assert [kind.dense for kind in DEEPSEEK_V3.kinds].count(True) == 3 and DEEPSEEK_V3.kinds[2].dense
    assert [kind.short for kind in GPT_OSS.kinds[:4]] == [False, True, False, True]
    assert not any(kind.short for kind in replace(GPT_OSS, seq=128).kinds)  # as long as the window
    every_other = replace(DEEPSEEK_V3, layers=48, dense_layers=0, expert_step=2)
    assert every_other.plain == 24 and [kind.dense for kind in every_other.kinds[:3]] == [True, False, True]
    # 61 layers, one that predicts further, the embedding and the head: 16 for each of 4 ranks
    further = replace(DEEPSEEK_V3, predicted=1)
    assert stage_layers(further, ParallelLayout(pp=4, vpp=4, global_batch=4)) == (15, 16, 16, 14)
    cluster, layout = Cluster("h100", nodes=32), ParallelLayout(dp=64, pp=4, vpp=4, ep=64, global_batch=4096)
    last = [StepModel(model, layout, cluster).stages[-1].both for model in (further, DEEPSEEK_V3)]
    assert last[0] != last[1]


def test_exchanges_of_experts_run_beside_the_other_microbatch() -> None:
    layout = ParallelLayout(dp=8, ep=8, global_batch=64, graphs=True)
    cluster = Cluster("h100")
    model = replace(REAL["Qwen3 30B A3B"][2], layers=4)
    waits, hides = (
        StepModel(model, replace(layout, overlap_ep=overlap), cluster).step().seconds for overlap in (False, True)
    )
    exchanged = [c for c in layer(model, layout).forward_communication if c.axis == "ep"]
    moved = 2 * 8 * 4 * sum(collective_seconds(c.name, cluster.group(8), c.num_bytes) for c in exchanged)
    assert waits - moved < hides < waits - 0.5 * moved


# -- many ranks


def test_a_ring_visits_every_rank() -> None:
    """Steps inside nodes at a link's latency, and one into each further node at the network's."""
    cluster = Cluster("h100", nodes=16)
    link, network = cluster.levels[0].seconds, cluster.levels[1].seconds
    whole = _around(cluster.group(128), 1.0, 0.0)
    assert whole == pytest.approx(16 * 7 * link + 15 * network)
    assert _around(cluster.group(16, 8), 1.0, 5e-6) == pytest.approx(15 * (network + 5e-6))


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "broadcast"])
def test_small_messages_pay_for_the_number_of_ranks(name: str) -> None:
    cluster = Cluster("a100", nodes=128)
    few, many = (collective_seconds(name, cluster.group(ranks), 1e6) for ranks in (64, 1024))
    assert many > 8 * few  # latency
    few, many = (collective_seconds(name, cluster.group(ranks), 1e11) for ranks in (64, 1024))
    assert many < 1.1 * few  # bandwidth


def test_shard_groups_of_a_node_beat_a_thousand_ranks() -> None:
    """InternEvo's 7B on 1024 A100: ZeRO-1 over all ranks takes 1.6 times as long as within nodes (train_performance.md)
    where each rank owns whole parameters; slices of each, gathered together, lose little."""
    model = Decoder(32, 4096, 11008, 32, 103168, 2048, gated=True, tied=False, biases=False, rotary=True)
    cluster = Cluster("a100", nodes=128, network_bytes_per_second=50e9)
    layout = ParallelLayout(dp=1024, zero=1, microbatch=2, global_batch=8192, gradient_dtype="bf16")

    def seconds(shard: int, owners: bool) -> float:
        return StepModel(model, replace(layout, shard=shard, owners=owners), cluster).step().seconds

    assert 1.3 < seconds(0, True) / seconds(8, True) < 1.8
    assert seconds(0, False) / seconds(8, False) < 1.1


def test_zero_3_gathers_what_a_rank_holds_of_experts() -> None:
    model = replace(REAL["Qwen3 30B A3B"][2], layers=4)
    cluster = Cluster("h100", nodes=8)
    spread = ParallelLayout(dp=64, ep=8, zero=3, global_batch=64, overlap_dp=False)
    whole, split = (StepModel(model, replace(spread, ep=ep), cluster).stages[0] for ep in (1, 8))
    assert split.forward < whole.forward
    hidden = StepModel(model, replace(spread, overlap_dp=True), cluster).stages[0]
    assert hidden.both < split.both


def test_megatrons_fused_softmax_takes_whole_groups_of_four() -> None:
    """Of 16 heads over 8 ranks, two sequences have four pairs: one kernel; one has two: PyTorch's operators."""
    gpt = Decoder(2, 1024, 4096, 16, 51200, 1024)
    kernels = replace(MEGATRON, flash=False)

    def softmax(microbatch: int, heads: int = 16) -> tuple[int, float]:
        layout = ParallelLayout(tp=8, microbatch=microbatch, global_batch=microbatch, kernels=kernels)
        (found,) = [k for k in layer(replace(gpt, heads=heads), layout).forward if k.name == "softmax"]
        return found.launches, found.bytes / (microbatch * heads / 8 * 1024**2)

    assert softmax(2) == softmax(1, heads=32) == (1, 3.0)
    assert softmax(1) == softmax(3) == (5, 37.0)


# -- memory


def test_what_a_stage_has_sent_may_be_held() -> None:
    layout = ParallelLayout(pp=4, microbatch=2, global_batch=16, recompute="full")
    model = _korthikanti(8, 1024, 16)
    freed, held = (stage_memory(model, replace(layout, holds_outputs=holds), 0).activations for holds in (False, True))
    assert held - freed == 4 * 2 * 2048 * 1024 * 2  # microbatches in flight, sequences, positions, width, bytes


def test_gradients_of_activations_take_memory() -> None:
    flash = ParallelLayout(tp=8, microbatch=4, global_batch=4)
    model = _korthikanti(2, 6144, 64)
    rows = 4 * 2048
    assert backward_bytes(model, flash) == 2 * (2 * rows * 6144 + 2 * rows * 24576 / 8)
    scores = 4 * 8 * 2048 * 2048
    unfused = replace(flash, kernels=KernelSet(flash=False))
    assert backward_bytes(model, unfused) == 2 * (2 * rows * 6144 + 2 * scores)


def test_inputs_of_8_bit_products_are_saved_in_8_bits() -> None:
    llama = Decoder(2, 4096, 14336, 32, 128256, 8192, 8, **ROTARY)
    wide, narrow = (layer_activation_bytes(llama, ParallelLayout(dtype=dtype)) for dtype in ("bf16", "fp8"))
    assert wide - narrow == 8192 * (2 * 4096 + 14336)  # before queries, keys and values, before and inside the MLP


def test_zero_3_holds_units_whole_while_it_needs_them() -> None:
    """Parameters of two layers and of the tables, and one unit's gradients before they are scattered."""
    llama = Decoder(8, 4096, 14336, 32, 128256, 2048, 8, **ROTARY)
    one, tables = expressions.layer_parameters(llama), 2 * 128256 * 4096
    found = stage_memory(llama, ParallelLayout(dp=64, zero=3, global_batch=64), 0)
    assert found.buffers == WORKSPACE_BYTES + 4 * one + 2 * tables + 6 * tables


# -- long contexts


@pytest.mark.parametrize("balance", [True, False])
def test_the_last_rank_of_a_ring_sees_all_keys(balance: bool) -> None:
    """Unless work is balanced, in which case every rank has half of all scores."""
    graph, length, ranks = fx.Graph(), 64, 4
    q, k, v = (
        annotate(graph.placeholder(name), Facts(torch.empty(1, 2, length, 8, dtype=torch.bfloat16, device="meta")))
        for name in "qkv"
    )
    plan = graph.call_function(ring_plan, (None, None, None, "causal", ranks * length, ranks, 2))
    annotate(plan, Facts(torch.empty(ranks, 2, dtype=torch.int64, device="meta")))
    how = ("cp", ranks, k, v, None, None, None, plan if balance else None, 1.0, "causal", 1 << 20)
    made = annotate(
        graph.call_function(ring_attention, (q, *how)),
        Facts((torch.empty(1, 2, length, 8, device="meta"), torch.empty(1, 2, length, device="meta"))),
    )
    seen = ranks * length / 2 if balance else ranks * length - length / 2
    kernel = kernel_of(made)
    assert kernel.flops == 2 * 2 * length * seen * (8 + 8)
    assert kernel.launches == ranks * (2 if balance else 1)  # blocks of which anything is seen
    assert kernel.bytes > 4 * ranks * 2 * length * 8  # merges results


def test_contexts_of_a_closed_form() -> None:
    llama = Decoder(4, 4096, 14336, 32, 128256, 131072, 8, **ROTARY)
    cluster = Cluster("h100")
    plain = ParallelLayout(cp=8, graphs=True, recompute="full")

    def seconds(**how: object) -> float:
        return StepModel(llama, replace(plain, **how), cluster).step().seconds  # type: ignore[arg-type]

    balanced = seconds()
    assert 1.5 < seconds(balanced=False) / balanced < 2
    assert seconds(context="all_gather", balanced=False) == pytest.approx(seconds(balanced=False), rel=0.02)
    assert seconds(context="ulysses") == pytest.approx(balanced, rel=0.03)
    assert seconds(kernels=replace(MEGATRON, own_ring=True)) > balanced
    core = next(k for k in layer(llama, plain).forward if k.name == "core")
    hops = [c for c in layer(llama, plain).forward_communication if c.axis == "cp"]
    assert core.launches == 16 and len(hops) == 7 and {c.name for c in hops} == {"send"}
    selective = layer(llama, replace(plain, recompute="selective"))
    assert [c.axis for c in selective.again_communication] == ["cp"] * 7  # keys travel again for what is redone
