"""Models on the meta device are compared with themselves, each distinct block once, with drawn values."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet_compiler.equivalence import module_check


class Chain(nn.Module):
    """Blocks of which each reads the one before and nothing else."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(blocks))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() * self.scale


@pytest.fixture
def values_drawn(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Record which parameters get values in each comparison."""
    names: list[set[str]] = []
    with_values = module_check.with_values

    def recorded(*args: Any) -> Any:
        copies, tensors = with_values(*args)
        names.append({name for name, p in copies[0].named_parameters() if not p.is_meta})
        return copies, tensors

    monkeypatch.setattr(module_check, "with_values", recorded)
    return names


def _compile(model: nn.Module, batch: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", quintnet.CheckWarning)
        quintnet.compile(model, quintnet.Mesh(dp=2), batch)


@pytest.mark.parametrize("blocks", [4, 7])
def test_blocks_that_do_not_run_stay_without_values(blocks: int, values_drawn: list[set[str]]) -> None:
    with torch.device("meta"):
        model = Chain(blocks)
    _compile(model, (torch.randn(4, 8),))
    run = ["0", "1", str(blocks - 1)]
    assert values_drawn == [{f"layers.{block}.0.{name}" for block in run for name in ("weight", "bias")}]


def test_a_program_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = Chain(5)
    capture = module_check.capture

    def scaled(model: Chain, *args: Any, **kwargs: Any) -> Any:
        model.scale = 1.5
        try:
            return capture(model, *args, **kwargs)
        finally:
            model.scale = 1.0

    monkeypatch.setattr(module_check, "capture", scaled)
    with pytest.raises(quintnet.CompileError, match=r"QN111 (.|\n)*differs by"):
        _compile(model, (torch.randn(4, 8),))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [pytest.param("Llama", marks=pytest.mark.slow), "GPT2"])
def test_models_that_make_caches_are_compared(architecture: str, values_drawn: list[set[str]]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "Llama": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2},
        "GPT2": {"n_embd": 16, "n_layer": 5, "n_head": 2, "n_positions": 16},
    }[architecture]
    config = getattr(transformers, f"{architecture}Config")(vocab_size=32, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert config.use_cache
    ids = torch.randint(0, 32, (4, 8))
    _compile(model, {"input_ids": ids, "labels": ids})
    assert len(values_drawn) == 1 and config.use_cache
    assert not any(".2." in name or ".3." in name for name in values_drawn[0])
