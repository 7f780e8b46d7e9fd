"""Adapters of PEFT and quantised frozen weights, beside the unsplit module."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import quintnet

peft = pytest.importorskip("peft")

LAYOUTS: list[tuple[quintnet.Mesh, dict[str, Any]]] = [
    (quintnet.Mesh(dp=2, tp=2), {"zero": 3}),
    (quintnet.Mesh(pp=2, dp=2), {"zero": 2, "microbatches": 2}),
    (quintnet.Mesh(cp=2, tp=2), {"recompute": "full"}),
    (quintnet.Mesh(pp=2, tp=2), {"microbatches": 2, "schedule": "zb-h1"}),
    (quintnet.Mesh(dp=2, cp=2), {"zero": 1}),
]


class Block(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, layers: int = 2, vocabulary: int = 32, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(32, (8, 8), generator=generator)
    return ids, ids.roll(-1, 1)


def adapted(layers: int = 2, dtype: torch.dtype = torch.float64, base: nn.Module | None = None, **options: Any) -> Any:
    """A decoder with LoRA of which no part is zero."""
    torch.manual_seed(0)
    base = Decoder(layers).to(dtype) if base is None else base
    model = peft.get_peft_model(base, peft.LoraConfig(**{"r": 4, "target_modules": ["qkv", "down"], **options}))
    for p in model.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.1)
    return model


KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "RSLoRA, head trained": {"use_rslora": True, "modules_to_save": ["head"]},
    "embedding": {"target_modules": ["embed", "up", "head"]},
    "biases": {"bias": "lora_only", "target_modules": ["out"]},
    "one layer": {"layers_to_transform": [1], "layers_pattern": "blocks"},
}


def check(model: Any, mesh: quintnet.Mesh, limit: float = 1e-11, **options: Any) -> quintnet.CompiledProgram:
    """Loss and gradients are those of the module itself; frozen parameters have none."""
    unsplit = copy.deepcopy(model)
    expected = unsplit(*batch())
    expected.backward()
    program = quintnet.compile(model, mesh, batch(), **options)
    torch.testing.assert_close(program.step(batch()).detach(), expected.detach(), rtol=limit, atol=limit)
    for (name, p), q in zip(model.named_parameters(), unsplit.parameters(), strict=True):
        assert (p.grad is None) == (not p.requires_grad), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=limit, atol=limit, msg=name)
    return program


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), [("LoRA", 1), ("DoRA", 0)])
def test_adapters_on_products_of_axes(kind: str, layout: int) -> None:
    mesh, options = LAYOUTS[layout]
    check(adapted(**KINDS[kind]), mesh, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_all_adapters_on_all_layouts(kind: str, layout: int) -> None:
    mesh, options = LAYOUTS[layout]
    check(adapted(**KINDS[kind]), mesh, **options)


@pytest.mark.slow
def test_frozen_parameters_cost_no_matmul_of_the_backward() -> None:
    """Of each frozen linear layer above the lowest adapter the gradient of its input; below it, nothing."""
    model = adapted(4, layers_to_transform=[2, 3], layers_pattern="blocks", target_modules=["qkv"])
    program = check(model, quintnet.Mesh(dp=2), zero=2)
    code = program.ranks[0].backward.code
    assert "blocks_3" in code
    assert not any(name in code for name in ("blocks.0", "blocks.1", "embed", "blocks_0", "blocks_1"))
    # of the head, and in both blocks of up, down and out, gradients of inputs; in block 3 that of the frozen part of
    # qkv, too. Of LoRA: two of weights in both blocks, between them one, and in block 3 one of the input
    assert code.count("torch.mm(") == 1 + 2 * 3 + 1 + 2 * 2 + 2 + 1
    optimizer = torch.optim.AdamW(program.parameters())
    optimizer.step()
    assert sum(len(state) > 0 for state in optimizer.state.values()) == 4
    trained = {n for n, p in program.named_parameters() if p.grad is not None}
    assert all("lora_" in name for name in trained) and len(trained) == 4


def _llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2)).double()


def _language() -> dict[str, Tensor]:
    ids, _ = batch()
    return {"input_ids": ids, "labels": ids}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"use_dora": True, "target_modules": ["q_proj", "down_proj"]}, marks=pytest.mark.slow),
        {"target_modules": ["embed_tokens", "v_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_saved_adapters_are_those_of_peft(options: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(base=_llama(), **options)
    program = quintnet.compile(model, quintnet.Mesh(dp=2, tp=2), _language(), zero=3)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.5)
    program.step(_language())
    optimizer.step()
    program.save_pretrained(tmp_path / "adapter")
    program.save_pretrained(tmp_path / "whole", merged=True)
    model.eval()
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], x) for name, x in theirs.items())
    ids = batch()[0]
    known = model(ids).logits
    loaded = peft.PeftModel.from_pretrained(_llama(), tmp_path / "adapter").eval()
    assert torch.equal(loaded(ids).logits, known)

    other = adapted(base=_llama(), **options)
    further = quintnet.compile(other, quintnet.Mesh(pp=2), _language())
    further.load_pretrained(tmp_path / "adapter")
    assert torch.equal(other.eval()(ids).logits, known)

    whole = type(_llama()).from_pretrained(tmp_path / "whole", dtype=torch.float64).eval()
    assert torch.equal(whole(ids).logits, copy.deepcopy(model).merge_and_unload()(ids).logits)

    with pytest.raises(quintnet.CheckpointError, match=r"QN602[\s\S]*missing from 'default'"):
        wrong = adapted(base=_llama(), target_modules=["k_proj"])
        quintnet.compile(wrong, quintnet.Mesh(dp=2), _language()).load_pretrained(tmp_path / "adapter")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"target_modules": "all-linear"}, {"modules_to_save": ["head"]}, {"target_modules": ["embed", "up"]}],
    ids=["LoRA", "all", "head trained", "embedding"],
)
def test_base_weights_come_from_their_own_folder(options: dict[str, Any], tmp_path: Path) -> None:
    """Into a model on the meta device; adapters have their values after it, or none."""
    torch.manual_seed(5)
    base = Decoder().double()
    mesh = quintnet.Mesh(dp=2, tp=2)
    quintnet.compile(copy.deepcopy(base), mesh, batch()).save_pretrained(tmp_path / "base")
    plain = adapted(base=base, **options)
    plain.save_pretrained(tmp_path / "adapter")
    with torch.device("meta"):
        model = adapted(**options).double()
    program = quintnet.compile(model, mesh, batch(), zero=3)
    program.load_pretrained(tmp_path / "base")
    with pytest.raises(quintnet.RunError, match=r"QN604[^!]*lora_"):
        program.step(batch())
    program.load_pretrained(tmp_path / "adapter")
    expected = plain(*batch())
    expected.backward()
    assert abs(float(program.step(batch()) - expected)) < 1e-12
    known = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in program.named_parameters() if p.grad is not None}
    assert found.keys() == known.keys() and len(known) > 2
    for name, gradient in known.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_base_weights_that_do_not_fit(tmp_path: Path) -> None:
    quintnet.compile(Decoder(layers=1), quintnet.Mesh(dp=1), batch()).save_pretrained(tmp_path / "base")
    program = quintnet.compile(adapted(dtype=torch.float32), quintnet.Mesh(tp=2), batch())
    before = {name: p.detach().clone() for name, p in program.named_parameters()}
    with pytest.raises(quintnet.CheckpointError, match=r"QN602[^!]*blocks.1.qkv.base_layer.weight: missing"):
        program.load_pretrained(tmp_path / "base")
    assert all(torch.equal(p, before[name]) for name, p in program.named_parameters())


def test_several_adapters_are_saved_and_the_active_one_trains(tmp_path: Path) -> None:
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["up"]))
    model.set_adapter("second")
    program = check(model, quintnet.Mesh(tp=2))
    program.save_pretrained(tmp_path / "both")
    again = adapted()
    again.load_adapter(tmp_path / "both" / "second", "second")
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.slow
def test_what_cannot_be_saved_as_an_adapter(tmp_path: Path) -> None:
    program = quintnet.compile(Decoder(), quintnet.Mesh(dp=2), batch())
    with pytest.raises(quintnet.CheckpointError, match=r"QN603[\s\S]*no peft.PeftModel"):
        program.save_pretrained(tmp_path / "none", merged=True)
    prompts = peft.get_peft_model(
        _llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    ).double()
    program = quintnet.compile(prompts, quintnet.Mesh(dp=2), _language())
    with pytest.raises(quintnet.CheckpointError, match="PROMPT_TUNING"):
        program.save_pretrained(tmp_path / "prompts")
    program.close()
    prompts.save_pretrained(tmp_path / "prompts")  # the fix
    assert (tmp_path / "prompts" / "adapter_model.safetensors").is_file()


def _train_on_ranks(folder: str, mesh: quintnet.Mesh, options: dict[str, Any]) -> float:
    model = adapted()
    program = quintnet.compile(model, mesh, batch(), **options)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.5)
    loss = program.step(batch())
    optimizer.step()
    program.save_pretrained(folder)
    return float(loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param(quintnet.Mesh(tp=2), {}),
        pytest.param(quintnet.Mesh(pp=2), {"microbatches": 2}, marks=pytest.mark.slow),
        pytest.param(quintnet.Mesh(dp=2), {"zero": 3}, marks=pytest.mark.slow),
    ],
)
def test_processes_save_one_adapter(mesh: quintnet.Mesh, options: dict[str, Any], tmp_path: Path) -> None:
    losses = quintnet.launch(_train_on_ranks, 2, args=(str(tmp_path / "saved"), mesh, options), timeout=240)
    unsplit = adapted()
    loss = unsplit(*batch())
    loss.backward()
    torch.optim.SGD([p for p in unsplit.parameters() if p.requires_grad], lr=0.5).step()
    assert losses == pytest.approx([float(loss.detach())] * 2, rel=1e-12)
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(Decoder().double(), tmp_path / "saved", is_trainable=True)
    for (name, p), q in zip(unsplit.named_parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-12, atol=1e-12, msg=name)
