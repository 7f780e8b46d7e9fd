"""Hugging Face attention as one operator: as the model computes it, whatever splits it, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.ops.attention.operator import attention

transformers: Any = pytest.importorskip("transformers")
torch.set_num_threads(1)

SMALL = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False,
}  # fmt: skip
WINDOW = 3
ROWS, LENGTH = 4, 8
MESHES = [quintnet.Mesh(cp=2), quintnet.Mesh(pp=2, cp=2, tp=2)]


def _in_double(model: nn.Module) -> nn.Module:
    """With torch's own RMSNorm, which computes in the dtype of its input."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, nn.RMSNorm(child.weight.shape[0], 1e-6))
    return model.double()


class Called(nn.Module):
    """A model with inputs by position."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *given: Tensor) -> Any:
        return self.model(**dict(zip(self.names, given, strict=True)))


class Dense(nn.Module):
    """In place of a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.linear(x), None


def _llama(*names: str, **changes: Any) -> nn.Module:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **changes))
    return Called(_in_double(model), "input_ids", *names)


def _mistral() -> nn.Module:
    config = transformers.MistralConfig(**SMALL, sliding_window=WINDOW)
    return Called(_in_double(transformers.MistralForCausalLM(config)), "input_ids")


def _gemma3() -> nn.Module:
    config = transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=WINDOW)
    return Called(transformers.Gemma3ForCausalLM(config), "input_ids")


def _gemma2() -> nn.Module:
    config = transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=WINDOW, attn_implementation="eager")
    return Called(transformers.Gemma2ForCausalLM(config), "input_ids")


def _bert() -> nn.Module:
    config = {name: size for name, size in SMALL.items() if name not in ("num_key_value_heads", "use_cache")}
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return Called(
        transformers.BertForMaskedLM(transformers.BertConfig(**config)).double(), "input_ids", "attention_mask"
    )


def _gpt_oss() -> nn.Module:
    """Sinks."""
    layers = ["sliding_attention", "full_attention"]
    config = transformers.GptOssConfig(**SMALL, head_dim=8, sliding_window=WINDOW, layer_types=layers)
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = Dense()
    return Called(_in_double(model), "input_ids")


def _llama4(*names: str) -> nn.Module:
    """Chunks in one layer, all positions in the other."""
    config = transformers.Llama4TextConfig(
        **SMALL, head_dim=8, intermediate_size_mlp=64, attention_chunk_size=4, no_rope_layers=[1, 0], moe_layers=[]
    )
    return Called(_in_double(transformers.Llama4ForCausalLM(config)), "input_ids", *names)


def _paligemma() -> nn.Module:
    """Tokens of type 0 are a prefix whose positions see each other."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.PaliGemmaConfig(
        text_config={**SMALL, "model_type": "gemma", "head_dim": 8},
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
        image_token_index=31,
        projection_dim=32,
    )
    return Called(transformers.PaliGemmaForConditionalGeneration(config).double(), "input_ids", "token_type_ids")


def _loss(out: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _batch(which: str) -> tuple[Tensor, ...]:
    dice = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, 32, (ROWS, LENGTH), generator=dice) for _ in range(2))
    if which == "padded":  # on the right, and on the left: queries that see nothing
        mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
        mask[0, 5:], mask[1, :3], mask[3, 7:] = 0, 0, 0
        return ids, mask, labels.masked_fill(mask == 0, -100)
    if which == "prefix":
        length = torch.tensor([[3], [5], [8], [1]])
        return ids.clamp(max=30), (torch.arange(LENGTH) >= length).long(), labels
    if which == "packed":
        first = (3, 5, 8, 1)
        places = torch.stack([torch.cat([torch.arange(n), torch.arange(LENGTH - n)]) for n in first])
        return ids, places, labels
    return ids, labels


# name -> (model, batch, whether attention is one operator, error)
MODELS: dict[str, tuple[Callable[[], nn.Module], str, bool, float]] = {
    "llama": (_llama, "plain", True, 1e-12),
    "llama padded": (lambda: _llama("attention_mask"), "padded", True, 1e-12),
    "llama packed": (lambda: _llama("position_ids"), "packed", True, 1e-12),
    "mistral": (_mistral, "plain", True, 1e-12),
    "llama4 chunks": (_llama4, "plain", True, 1e-5),  # its norms compute in float32
    "llama4 packed": (lambda: _llama4("position_ids"), "packed", True, 1e-5),
    "llama4 padded": (lambda: _llama4("attention_mask"), "padded", True, 1e-5),
    "paligemma prefix": (_paligemma, "prefix", True, 1e-5),
    "bert": (_bert, "padded", True, 1e-12),
    "gemma3": (_gemma3, "plain", True, 1e-5),  # its norms compute in float32
    "gemma2 softcap": (_gemma2, "plain", False, 1e-5),
    "gpt_oss sinks": (_gpt_oss, "plain", False, 1e-12),
    "llama eager": (lambda: _llama("attention_mask", attn_implementation="eager"), "padded", False, 1e-12),
}


def _build(name: str) -> tuple[nn.Module, tuple[Tensor, ...], float]:
    torch.manual_seed(0)
    model, which, _, error = MODELS[name]
    return model(), _batch(which), error


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_what_becomes_one_operator(name: str) -> None:
    model, batch, _ = _build(name)
    captured = capture(model, batch, _loss)
    count = sum(node.target is attention for node in captured.graph.nodes)
    assert count == (2 if MODELS[name][2] else 0)


FAST = ("llama padded", "gemma3", "gpt_oss sinks", "llama4 packed", "paligemma prefix")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_rings_equal_the_model(name: str) -> None:
    """Two layers on three axes; what is not one operator gathers keys."""
    model, batch, error = _build(name)
    program = quintnet.compile(model, MESHES[1], batch, loss_fn=_loss, context="ring")
    assert ("ring_attention" in program.ranks[0].forward.code) == MODELS[name][2]
    report = program.verify()
    assert report.ok and report.worst.error < error, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["all_gather", "ulysses", "ring"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_context_equals_the_model(name: str, mesh: quintnet.Mesh, context: str) -> None:
    model, batch, error = _build(name)
    report = quintnet.compile(model, mesh, batch, loss_fn=_loss, context=context).verify()
    assert report.ok and report.worst.error < error, str(report)


@pytest.mark.slow
def test_dropout_in_attention_is_drawn_as_elsewhere() -> None:
    torch.manual_seed(0)
    program = quintnet.compile(_llama(attention_dropout=0.1), MESHES[0], _batch("plain"), loss_fn=_loss, context="ring")
    assert program.verify().ok


@pytest.mark.slow
def test_chunks_of_the_models_own_positions_are_no_ids() -> None:
    """What the operator is told of positions that the model makes itself is a word."""
    program = quintnet.compile(_llama4(), MESHES[0], _batch("plain"), loss_fn=_loss, context="ring")
    code = program.ranks[0].forward.code
    assert "None, None, None, " in code and "'causal_chunk_4'" in code and "cumsum" not in code


@pytest.mark.slow
def test_positions_of_the_model_itself_are_one_document() -> None:
    """They are constants, so that the device's own causal kernel runs."""
    program = quintnet.compile(_llama(), quintnet.Mesh(dp=1), _batch("plain"), loss_fn=_loss)
    code = program.ranks[0].forward.code
    assert "cumsum" not in code and "logical_and" not in code


@pytest.mark.slow
def test_a_mask_of_the_users_own_is_kept() -> None:
    """4-D, and seen by nothing but the model: keys are gathered, whatever the plan says."""
    torch.manual_seed(0)
    ids, labels = _batch("plain")
    mask = torch.rand(ROWS, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.5
    mask = mask | torch.eye(LENGTH, dtype=torch.bool)
    model = _llama("attention_mask")
    program = quintnet.compile(model, MESHES[0], (ids, mask, labels), loss_fn=_loss, context="ring")
    assert "ring_attention" not in program.ranks[0].forward.code
    assert program.verify().ok


def test_nothing_is_left_behind() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    before = functions["sdpa"], masks["sdpa"]
    model = _llama()
    config = model.model.config.to_dict(), model.model.config._attn_implementation
    capture(model, _batch("plain"), _loss)
    with pytest.raises(quintnet.CompileError):
        capture(model, (torch.zeros(2, 8), torch.zeros(2, 8)), _loss)  # ids that are no ids
    assert (functions["sdpa"], masks["sdpa"]) == before
    assert (model.model.config.to_dict(), model.model.config._attn_implementation) == config


class Narrow(nn.Module):
    """Attention whose values have fewer features than its keys, as in DeepSeek."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v, self.out = nn.Linear(8, 64), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qk(x).chunk(2, -1))
        v = self.v(x).unflatten(-1, (4, 4)).transpose(1, 2)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pytest.mark.slow
@pytest.mark.parametrize("context", ["all_gather", "ring"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_values_of_another_width_than_keys_have_a_kernel_too(mesh: quintnet.Mesh, context: str) -> None:
    torch.manual_seed(0)
    batch = torch.randn(ROWS, LENGTH, 8, dtype=torch.float64), torch.randint(3, (ROWS, LENGTH))
    loss = nn.CrossEntropyLoss()
    program = quintnet.compile(
        Narrow().double(), mesh, batch, loss_fn=lambda out, y: loss(out.flatten(0, 1), y.flatten()), context=context
    )
    assert "safe_softmax" not in program.ranks[0].forward.code
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)
