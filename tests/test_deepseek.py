"""DeepSeek-V3 as transformers writes it: latent attention, experts chosen within groups with a bias, shared experts,
dense layers first; and a module of one's own around it that predicts a second token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

from .zoo.entry import COMMON, Entry, InDouble

torch.set_num_threads(1)
# 3 of 8 experts, from 2 of 4 groups
SIZES = {
    **COMMON, "num_hidden_layers": 3, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "routed_scaling_factor": 2.5,
}  # fmt: skip


class TwoTokens(nn.Module):
    """Multi-token prediction (DeepSeek-AI 2024, section 2.2): one more layer sees the model's last states beside the
    embedding of the next token, and predicts the one after it, by the model's own embedding and head."""

    def __init__(self, main: Any) -> None:
        super().__init__()
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

        config = main.config
        self.main = main
        self.of_states, self.of_tokens, self.last = (DeepseekV3RMSNorm(config.hidden_size) for _ in range(3))
        self.joined = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = DeepseekV3DecoderLayer(config, config.num_hidden_layers - 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        states = self.main.model(input_ids, use_cache=False).last_hidden_state
        tokens = self.main.model.embed_tokens(input_ids.roll(-1, 1))
        joined = self.joined(torch.cat([self.of_tokens(tokens), self.of_states(states)], -1))
        places = torch.arange(input_ids.shape[1])[None]
        rotary = self.main.model.rotary_emb(joined, places)
        further = self.layer(joined, attention_mask=None, position_embeddings=rotary, position_ids=places)
        return self._loss(states, labels, 1) + 0.3 * self._loss(self.last(further), labels, 2)

    def _loss(self, states: Tensor, labels: Tensor, ahead: int) -> Tensor:
        wanted = F.pad(labels[:, ahead:], (0, ahead), value=-100)
        return F.cross_entropy(self.main.lm_head(states).flatten(0, 1), wanted.flatten(), ignore_index=-100)


def _biased(model: Any) -> Any:
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            bias = layer.mlp.gate.e_score_correction_bias
            bias.copy_(0.3 * torch.randn(bias.shape, generator=dice))
    return model


def _balanced(model: Any) -> Any:
    """Each router moves its bias by the numbers of rows that its experts got (Wang et al. 2024)."""

    def move(router: Any, given: Any, result: tuple[Tensor, Tensor, Tensor]) -> None:
        if router.training:
            with torch.no_grad():
                bias = router.e_score_correction_bias
                load = F.one_hot(result[2].flatten(), bias.shape[0]).sum(0).to(bias.dtype)
                bias += 0.05 * torch.sign(load.mean() - load)

    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(move)
    return _biased(model)


def _exact(entry: Entry, axes: dict[str, int], options: dict[str, Any]) -> quintnet.CompiledProgram:
    with InDouble():
        program = quintnet.compile(entry.build(), quintnet.Mesh(**axes), entry.batch(8), check="off", **options)
        report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)
    return program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"ep": 3}, {}),
        ({"dp": 2, "ep": 2}, {"microbatches": 2, "zero": 1}),
        ({"pp": 3, "ep": 2}, {"microbatches": 4}),
        ({"pp": 2, "ep": 2, "tp": 2}, {"microbatches": 2}),
        ({"dp": 2, "cp": 2}, {"microbatches": 2, "zero": 3, "experts": ("dp", "cp")}),
        ({"dp": 2, "cp": 2, "tp": 2}, {"experts": ("cp",)}),
        ({"dp": 4}, {"zero": 3, "experts": ("dp",)}),
    ],
    ids=str,
)
def test_experts_of_chosen_groups_are_exact(axes: dict[str, int], options: dict[str, Any]) -> None:
    sizes = {**SIZES, "num_hidden_layers": max(2, axes.get("pp", 2))}
    _exact(Entry("DeepseekV3ForCausalLM", sizes, prepare=_biased), axes, options)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2, "ep": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_hooks_of_routers_balance_experts(axes: dict[str, int]) -> None:
    entry = Entry("DeepseekV3ForCausalLM", SIZES, prepare=_balanced)
    program = _exact(entry, axes, {"microbatches": 2})
    with InDouble():
        compared = program.verify().comparisons
    assert sum(one.what == "buffer" and "correction_bias" in one.name and not one.step for one in compared) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeepseekV2ForCausalLM", "Glm4MoeForCausalLM"])
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"ep": 3}, {}),
        ({"pp": 3, "ep": 2}, {"microbatches": 4}),
        ({"dp": 2, "cp": 2}, {"microbatches": 2, "zero": 3, "experts": ("dp", "cp")}),
    ],
    ids=str,
)
def test_models_that_choose_likewise(name: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    more = {"topk_method": "group_limited_greedy"} if "V2" in name else {"num_key_value_heads": 2, "head_dim": 8}
    prepare = None if "V2" in name else _biased  # the older one has no bias
    _exact(Entry(name, {**SIZES, **more}, prepare=prepare), axes, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 2}, {"microbatches": 2, "zero": 3}),
        ({"pp": 2}, {"microbatches": 4}),
        ({"pp": 4, "ep": 2}, {"microbatches": 2}),
        ({"cp": 2, "tp": 2}, {}),
        ({"pp": 2, "dp": 2, "tp": 2}, {"microbatches": 2, "experts": ("dp",)}),
    ],
    ids=str,
)
def test_two_tokens_are_predicted_by_one_table_and_one_head(axes: dict[str, int], options: dict[str, Any]) -> None:
    entry = Entry("DeepseekV3ForCausalLM", SIZES, "causal", prepare=lambda model: TwoTokens(_biased(model)))
    program = _exact(entry, axes, options)
    table = "main.model.embed_tokens.weight"
    stages = {s.index for rank in program.ranks for s in rank.stages if table in s.state.values()}
    assert 0 in stages and (len(stages) == 2) == ("pp" in axes), "it is read again where the second token is predicted"
