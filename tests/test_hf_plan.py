"""A Hugging Face model's own plan: taken over where it says how parameters are laid out, and exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import quintnet
from quintnet import CompileError, Mesh

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}


def _model(kind: str, layers: int = 1, *, meta: bool = False, **changes: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "num_hidden_layers": layers, **changes})
    with torch.device("meta" if meta else "cpu"):
        return transformers.AutoModelForCausalLM.from_config(config)


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layers", "axes", "changes"),
    [
        ("Llama", 3, {"pp": 2, "tp": 2}, {"tie_word_embeddings": True}),
        ("Qwen2", 1, {"dp": 2, "tp": 2}, {}),  # with biases
        ("Qwen3", 1, {"tp": 2}, {"head_dim": 8}),
        ("Mistral", 1, {"tp": 4}, {}),  # two key heads on four ranks
        ("Phi3", 1, {"tp": 2}, {"pad_token_id": 0}),  # fused q, k and v
    ],
)
def test_a_models_own_plan_is_exact(kind: str, layers: int, axes: dict[str, int], changes: dict[str, Any]) -> None:
    model, mesh = _model(kind, layers, **changes), Mesh(**axes)
    program = quintnet.compile(model, mesh, _batch(), plan="hf")
    wanted = quintnet.hf_plan(model, mesh).plan.parameters
    found = program.plan.parameters
    assert wanted and all(found[name]["tp"].replace("R", "I") == kinds["tp"] for name, kinds in wanted.items())
    assert found["model.layers.0.self_attn.o_proj.weight"]["tp"] == "S(1)"
    report = program.verify(steps=1)
    assert report.ok, str(report)


def test_the_report_says_what_was_taken_over_and_what_was_not() -> None:
    found = quintnet.hf_plan(_model("Mixtral", 2, meta=True), Mesh(tp=2, dp=2))
    text = str(found)
    assert "model.layers.*.mlp.experts.gate_up_proj  tp S(1,2) x 2    packed_colwise" in text
    assert "model.norm.weight" in found.open and "model.layers.*.mlp.gate.weight" in found.open
    ((rule, reason),) = found.left_out
    assert rule == "model.layers.*.mlp.experts" and "derived" in reason and reason in text
    assert quintnet.Plan.from_json(found.plan.to_json()) == found.plan
    assert "the mesh has no tp" in str(quintnet.hf_plan(_model("Llama", meta=True), Mesh(dp=2)))


def test_experts_are_spread_whole_over_ep() -> None:
    plan = quintnet.hf_plan(_model("Mixtral", meta=True), Mesh(ep=2, tp=2)).plan
    assert plan.parameters["model.layers.0.mlp.experts.down_proj"] == {"ep": "S(0)"}
    assert plan.parameters["model.layers.0.self_attn.o_proj.weight"] == {"tp": "S(1)"}


def test_stages_are_cut_where_transformers_cuts_them() -> None:
    def stages(layers: int, pp: int) -> tuple[str, ...]:
        return quintnet.hf_plan(_model("Llama", layers, meta=True), Mesh(pp=pp)).plan.stages

    assert stages(7, 3) == ("model.layers.2", "model.layers.4")
    with pytest.raises(CompileError, match=r"QN206.*\n.*model.layers has 2 layers, and the pipeline 3 stages"):
        stages(2, 3)


def test_what_does_not_divide_is_listed() -> None:
    model: Any = _model("Llama", meta=True)
    with pytest.raises(CompileError) as caught:
        quintnet.compile(model, Mesh(tp=3), _batch(), plan="hf")
    assert caught.value.code == "QN203"
    listed = caught.value.message
    assert "model.layers.0.self_attn.q_proj.weight of shape (32, 32): 32 does not divide over tp=3" in listed
    if "model.embed_tokens" in model._tp_plan:  # the plans of older versions of transformers say nothing of it
        assert "model.embed_tokens.weight of shape (64, 32): 64 does not divide over tp=3" in listed
    assert "down_proj" in listed


@pytest.mark.parametrize("name", ["gpt2", "plain"])
def test_models_without_a_plan(name: str) -> None:
    model = nn.Linear(2, 2) if name == "plain" else _gpt2()
    with pytest.raises(CompileError, match=r"QN207(?s:.*)plan=None"):
        quintnet.compile(model, Mesh(tp=2), plan="hf")


def _gpt2() -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1))
    return model


def test_unknown_styles_and_modules_are_left_out_and_named() -> None:
    model = _model("Llama", meta=True)
    model._tp_plan = {
        "model.layers.*.mlp.up_proj": "diagonal",
        "model.layers.*.mlp.down_proj": "rowwise",
        "model.layers.*.gone": "colwise",
    }
    found = quintnet.hf_plan(model, Mesh(tp=2))
    assert found.plan.parameters == {"model.layers.0.mlp.down_proj.weight": {"tp": "S(1)"}}
    assert dict(found.left_out) == {
        "model.layers.*.mlp.up_proj": "the style diagonal is not known",
        "model.layers.*.gone": "colwise matches nothing",
    }
