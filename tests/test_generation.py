"""Texts that a program continues are those of transformers' own generate, and caches are as small as they can be."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

from .zoo import ZOO

torch.set_num_threads(1)
ROWS, NEW = 4, 10


def large_model(name: str) -> nn.Module:
    """A model of the zoo with large weights, so that its next token depends on all that came before."""
    model = ZOO[name].build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.eval()


def prompts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 60, (ROWS, 7), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    mask[3, :1] = 0
    return ids, mask


def theirs(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
        )
    return found


LAYOUTS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("GPT-2", {"pp": 2, "tp": 2}, {}),
    ("Mistral", {"tp": 2, "dp": 2}, {"zero": 3}),
]
MORE: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("Llama", {"tp": 2}, {}),
    ("Llama", {"pp": 2}, {"microbatches": 2}),
    ("Llama", {"dp": 2, "tp": 2}, {}),
    ("Qwen2", {"cp": 2, "pp": 2}, {}),
    ("Qwen3", {"tp": 4}, {}),
    ("GPT-NeoX", {"tp": 2, "pp": 2}, {}),
    ("Phi-3", {"tp": 2}, {}),
    ("OPT", {"tp": 2}, {}),
    ("Mixtral", {"ep": 2, "tp": 2}, {}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    ids=str,
)
def test_tokens_are_those_of_transformers(name: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    model, (ids, mask) = large_model(name), prompts()
    program = quintnet.compile(model, quintnet.Mesh(**axes), {"input_ids": ids}, training=False, **options)
    found = program.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0)
    expected = theirs(model, ids, mask)
    assert torch.equal(found, expected)
    assert len(expected[:, ids.shape[1] :].unique()) > 8  # not one token for ever
    assert not torch.equal(program.generate(ids, max_new_tokens=NEW, pad_token_id=0), expected)  # padding counts


@pytest.mark.slow
def test_caches_are_split_and_samples_are_the_same_on_every_layout() -> None:
    """2 x layers/pp x heads/tp x pages x page x width x pools/dp numbers on each rank; one seed, one text."""
    model, (ids, mask) = large_model("Llama"), prompts()
    config: Any = model.config
    texts = []
    for axes, microbatches in (({}, 1), ({"pp": 2, "tp": 2, "dp": 2}, 2)):
        mesh = quintnet.Mesh(**axes)
        program = quintnet.compile(model, mesh, {"input_ids": ids}, training=False, microbatches=microbatches)
        how = {"do_sample": True, "temperature": 5.0, "top_k": 20, "top_p": 0.9, "seed": 3, "eos_token_id": 63}
        texts.append(program.generate(ids, attention_mask=mask, max_new_tokens=NEW, **how))  # type: ignore[arg-type]
        greedy = program.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0)
        assert torch.equal(greedy, theirs(model, ids, mask))
        decoding = program._kept["decoding"]
        assert decoding is not None and len(decoding.programs) == 2  # the prompt's, and one token's
        kept = [decoding.backend.new_caches(one, 5) for one in decoding.programs.values()]
        pools = axes.get("dp", 1) * microbatches
        assert decoding.pools == pools
        share = config.num_key_value_heads * config.head_dim * config.num_hidden_layers * pools
        share //= math.prod(axes.values())
        for rank in range(mesh.size):
            shapes = [{name: tuple(x.shape) for name, x in caches[rank].items()} for caches in kept]
            assert shapes[0] == shapes[1]
            assert sum(x.nbytes for x in kept[0][rank].values()) == 2 * share * 5 * 16 * 8
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], theirs(model, ids, mask, eos_token_id=63))


class Plain(nn.Module):
    """The least that generation asks of a module, with weights that the second call trains."""

    def __init__(self, vocab: int = 32, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.embed, self.place = heads, nn.Embedding(vocab, width), nn.Embedding(64, width)
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, vocab)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(positions)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x)


@pytest.mark.slow
def test_a_plain_module_generates_between_training_steps() -> None:
    torch.manual_seed(0)
    model = Plain().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    ids = torch.randint(32, (2, 8))
    positions = torch.arange(8).expand(2, 8)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    program = quintnet.compile(model, quintnet.Mesh(tp=2), (ids, positions, ids), loss_fn=loss)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.5)
    texts = []
    for _ in range(2):
        texts.append(program.generate(ids, max_new_tokens=6))
        text = ids
        with torch.no_grad():
            for _ in range(6):
                logits = model(text, torch.arange(text.shape[1]).expand(2, -1))
                text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(texts[-1], text)
        program.step((ids, positions, ids))
        optimizer.step()
    assert not torch.equal(texts[0], texts[1])


class Counting(Plain):
    """Tells its positions by counting."""

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return super().forward(ids, torch.arange(ids.shape[1], device=ids.device).expand_as(positions))


class Averaging(Plain):
    """Has a memory beside attention's."""

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        made = super().forward(ids, positions)
        return made + made.cumsum(1) / 8


@pytest.mark.slow
def test_what_cannot_generate_is_refused() -> None:
    ids = prompts()[0]
    for model in (Counting(64), Averaging(64)):
        other = quintnet.compile(model, quintnet.Mesh(dp=1), (ids, torch.zeros_like(ids)), training=False)
        with pytest.raises(quintnet.CompileError, match=r"(?s)QN105.*logits of a token alone are off by"):
            other.generate(ids)
    capped = quintnet.compile(ZOO["Gemma 2"].build(), quintnet.Mesh(dp=1), {"input_ids": ids}, training=False)
    with pytest.raises(quintnet.CompileError, match="QN105"):
        capped.generate(ids)
    program = quintnet.compile(Plain(64), quintnet.Mesh(dp=2), (ids, torch.zeros_like(ids)), training=False)
    right = torch.ones_like(ids)
    right[0, -1] = 0
    for given, options, code in (
        (ids, {"attention_mask": right}, "QN102"),
        (ids.float(), {}, "QN102"),
        ([ids], {}, "QN102"),
        ([], {}, "QN102"),
        (ids, {"rows": 0}, "QN102"),
        (ids, {"max_new_tokens": 0}, "QN102"),
        (ids, {"do_sample": True, "top_p": 0.0}, "QN108"),
        (ids, {"do_sample": True, "temperature": 0.0}, "QN108"),
        (ids, {"do_sample": True, "top_k": 0}, "QN108"),
    ):
        with pytest.raises(quintnet.QuintNetError, match=code):
            program.generate(given, **options)  # type: ignore[arg-type]


def _generate(axes: dict[str, int]) -> Tensor:
    torch.set_num_threads(1)
    model, (ids, mask) = large_model("Llama"), prompts()
    program = quintnet.compile(model, quintnet.Mesh(**axes), {"input_ids": ids}, training=False)
    return program.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tp": 2}, pytest.param({"pp": 2}, marks=pytest.mark.slow)], ids=str)
def test_processes_write_the_same_text(axes: dict[str, int]) -> None:
    expected = theirs(large_model("Llama"), *prompts())
    for found in quintnet.launch(_generate, 2, (axes,), timeout=240):
        assert torch.equal(found, expected)
