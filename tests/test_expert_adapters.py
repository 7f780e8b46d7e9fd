"""PEFT's LoRA of parameters (``target_parameters``): of experts, and of other parameters, beside the unsplit module."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

from .zoo import ZOO, InDouble
from .zoo.entry import Entry

peft = pytest.importorskip("peft")
torch.set_num_threads(1)


def _adapted(model: nn.Module, **options: Any) -> Any:
    """LoRA of which no part is zero."""
    found = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, **options))
    dice = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in found.named_parameters():
            if "lora_" in name:
                p.copy_(0.1 * torch.randn(p.shape, generator=dice))
    return found.double()


def _experts(name: str, layers: int = 2) -> Entry:
    """A mixture whose experts have adapters, as have two projections of attention."""
    parts = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    config = {**ZOO[name].config, "num_hidden_layers": layers}
    config |= {"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {}
    return replace(ZOO[name], config=config, prepare=lambda model: _adapted(model, **parts))


def _exact(entry: Entry, axes: dict[str, int], options: dict[str, Any]) -> quintnet.CompiledProgram:
    with InDouble():
        program = quintnet.compile(entry.build(), quintnet.Mesh(**axes), entry.batch(8), check="off", **options)
        report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)
    return program


@pytest.mark.slow
def test_rows_of_experts_go_through_both_factors() -> None:
    program = _exact(_experts("Mixtral", 1), {"ep": 2}, {})
    stage = program.ranks[0].stages[0]
    code = stage.backward.code
    # of two adapters with two factors; the experts themselves are frozen, and have gradients of rows alone
    assert code.count("quintnet.grouped_weight_grad.default(") == 4
    kept = [program._primary().program.state[name] for name in stage.state.values() if "experts" in name]
    frozen = {spec.name: str(spec.sharding[0]) for spec in kept if not spec.trainable}
    assert set(frozen.values()) == {"S(0)"} and len(frozen) == 2


class Own(nn.Module):
    """Parameters that the module multiplies itself: all rows by two matrices, and one of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.head = Both(), nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.both(x)), labels)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ni,eoi->neo", x, self.weight).tanh().sum(1)


@pytest.mark.parametrize(
    ("axes", "options"),
    [({"dp": 2}, {"zero": 3, "microbatches": 2}), pytest.param({"tp": 2}, {}, marks=pytest.mark.slow)],
    ids=str,
)
def test_other_parameters_are_the_sum(axes: dict[str, int], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = _adapted(Own(), target_parameters=["both.weight", "head.weight"])
    batch = torch.randn(8, 8, dtype=torch.float64), torch.randint(0, 5, (8,))
    unsplit = copy.deepcopy(model)
    unsplit(*batch).backward()
    program = quintnet.compile(model, quintnet.Mesh(**axes), batch, **options)
    program.step(batch)
    trained = 0
    for (name, p), q in zip(model.named_parameters(), unsplit.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-11, atol=1e-12, msg=name)
            trained += 1
    assert trained == 4
    assert type(model.base_model.model.both.base_layer) is Both, "no class was changed"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "gpt-oss"])
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"tp": 2}, {}),
        ({"ep": 3}, {}),
        ({"pp": 2, "ep": 2}, {"microbatches": 2}),
        ({"dp": 2, "tp": 2}, {"zero": 3, "experts": ("dp",)}),
        ({"dp": 2, "cp": 2}, {"zero": 1, "experts": ("dp", "cp")}),
    ],
    ids=str,
)
def test_adapters_of_experts_on_products_of_axes(name: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    _exact(_experts(name), axes, options)


@pytest.mark.slow
def test_saved_adapters_of_experts_are_those_of_peft(tmp_path: Path) -> None:
    entry, ids = _experts("Mixtral"), ZOO["Mixtral"].batch(8)
    model = entry.build()
    program = quintnet.compile(model, quintnet.Mesh(dp=2, ep=2), ids)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.5)
    program.step(ids)
    optimizer.step()
    program.save_pretrained(tmp_path / "adapter")
    program.save_pretrained(tmp_path / "whole", merged=True)
    known = model.eval()(**ids).logits
    base: Any = entry.build().unload()  # type: ignore[operator]
    plain = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").eval()
    torch.testing.assert_close(plain(**ids).logits, known)
    whole = type(base).from_pretrained(tmp_path / "whole", dtype=torch.float64).eval()
    whole.set_experts_implementation("eager")  # the usual one has no float64
    torch.testing.assert_close(whole(**ids).logits, known)
    other = entry.build()
    further = quintnet.compile(other, quintnet.Mesh(ep=2), ids)
    further.load_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(other.eval()(**ids).logits, known)
