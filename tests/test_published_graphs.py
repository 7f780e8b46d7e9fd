"""Real modules of published rows, priced with the kernels of the rows' software, cost what closed forms say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.closed_forms.layer_kernels import layer
from benchmarks.published_graphs import Module, chosen, kinds_of, plan_of, price, summary, with_kernels
from benchmarks.published_rows import Run, Unmodelled, read, run_of
from benchmarks.published_runs import DATA
from quintnet_compiler.cost_models.kernels import kernel_seconds
from quintnet_compiler.planner.stage_units import StageUnit

ROWS = {row["id"]: row for row in read(DATA / "published_runs.csv")}
LLAMA, MPT, NEMOTRON = "DGXC-24.11-Llama_3.1_8B-bf16-H100-8", "LLMF-043", "DGXC-24.11-Nemotron4_15B-bf16-H100-32"
GROK = "DGXC-24.11-Grok1_314B-bf16-H100-128"


def _few_layers(row_id: str, layers: int, **layout: int) -> Run:
    run = run_of(ROWS[row_id])
    return replace(run, model=replace(run.model, layers=layers), layout=replace(run.layout, **layout), gpus_per_node=8)


def test_modules_of_decoders() -> None:
    found = {name: Module.of(run_of(ROWS[name]).model) for name in (LLAMA, MPT, NEMOTRON, GROK)}
    assert [one.architecture.removesuffix("ForCausalLM") for one in found.values()] == [
        "Llama", "GPT2LMHeadModel", "Nemotron", "Mixtral",
    ]  # fmt: skip
    with pytest.raises(Unmodelled, match="not described"):
        Module.of(replace(run_of(ROWS[LLAMA]).model, kv_rank=512))  # latent attention
    assert found[MPT].blocks == "transformer.h" and found[GROK].sizes["num_local_experts"] == 8


def test_plans_of_rows() -> None:
    plan = plan_of(run_of(ROWS["DGXC-24.11-Llama_3.1_70B-bf16-H100-64"]), "model.layers")
    assert plan.mesh == {"dp": 2, "cp": 2, "tp": 4, "pp": 4} and plan.zero == 1 and plan.reduce_dtype == "float32"
    assert (plan.schedule, plan.virtual_stages, plan.context, plan.async_tp) == ("interleaved", 5, "ring", True)
    assert plan.stages[:2] == ("model.layers.4", "model.layers.8") and len(plan.stages) == 19
    experts = plan_of(run_of(ROWS[GROK]), "model.layers")
    assert experts.mesh == {"ep": 8, "cp": 2, "tp": 4, "pp": 2} and experts.zero_axes == ("dp", "ep")
    for name, reason in (("IEVO-tp1-z8-16", "shard groups"), ("ZOO-Q235-H100-C", "experts over tensor ranks")):
        with pytest.raises(Unmodelled, match=reason):
            plan_of(run_of(ROWS[name]), "model.layers")


def test_the_sample_has_every_kind_of_layout() -> None:
    runs = list(chosen(list(ROWS.values()), "", 2))
    kinds = Counter(kind for run in runs for kind in kinds_of(run))
    assert len(runs) >= 70 and {"tp", "pp", "cp", "ep", "ZeRO 1", "ZeRO 3"} <= set(kinds)
    assert {run.device for run in runs} == {"a100-80", "a100-40", "h100"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(_few_layers("IEVO-tp2-zall-8", 4), id="tp"),
        pytest.param(_few_layers(LLAMA, 4), id="cp"),
        pytest.param(_few_layers("DGXC-24.11-Grok1_314B-bf16-H100-32", 2), id="experts"),
        pytest.param(_few_layers(MPT, 4), id="zero 3"),
        pytest.param(_few_layers(NEMOTRON, 4), id="squared ReLU"),
        pytest.param(_few_layers("DGXC-24.11-Llama_3.1_70B-bf16-H100-64", 16, vpp=2), id="interleaved"),
        pytest.param(_few_layers("DGXC-24.11-Llama_3.1_70B-bf16-H100-64", 16, vpp=1), id="pipeline"),
    ],
)
def test_a_graph_with_the_kernels_of_the_rows_software_costs_what_the_closed_form_says(run: Run) -> None:
    found = price(run)
    assert found.source == pytest.approx(found.closed, rel=0.05)
    assert found.own > 0 and found.kinds == kinds_of(run)
    assert summary([found], {run.id: run.device})["all"]["source"]["rows"] == 1


def test_units_get_the_kernels_and_the_host_of_the_rows_software() -> None:
    """The first block begins where the list of blocks does; what is before and after blocks is the embedding and the
    head."""
    run = _few_layers(MPT, 2)
    nothing = StageUnit("", 0.0, 0.0, 0.0, 0.0, {}, 0, 0, 0, (), {})
    begins = ("transformer", "transformer.h", "transformer.h.1", "transformer.ln_f")
    units = tuple(replace(nothing, begin=begin) for begin in begins)
    idle = replace(run, layout=replace(run.layout, graphs=True))
    bare = with_kernels(units, idle, "transformer.h")
    device = run.cluster().device
    made = layer(run.model, run.layout)
    assert bare[1] == replace(bare[2], begin="transformer.h")
    forward = [kernel_seconds(kernel, device) for kernel in made.forward if kernel.kind == "memory"]
    assert bare[1].forward == pytest.approx(sum(forward)) and bare[1].backward > bare[1].forward
    assert bare[0].forward > 0 and bare[3].backward > bare[1].backward  # a vocabulary of 50,000
    small = replace(run, model=replace(run.model, seq=128))  # kernels are over before the next is launched
    launched = with_kernels(units, small, "transformer.h")
    host = device.efficiency.host_seconds * sum(kernel.launches for kernel in made.forward)
    assert launched[1].forward == pytest.approx(host)
