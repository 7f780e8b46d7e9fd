"""Blocks that are traced once: folded, they are what the whole model folds to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quintnet_compiler.capture.capture import capture
from quintnet_compiler.core.annotations import facts, leaf, values
from quintnet_compiler.passes.frontend.normalize import Normalize
from quintnet_compiler.passes.sharding.fold_blocks import FoldBlocks, Folded

from .models import CASES, GPT
from .zoo import ZOO

ROWS = 4


class Numbered(nn.Module):
    """A block that knows its number; every block gets the model's input too."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(width, width)

    def forward(self, x: Tensor, again: Tensor, scale: float) -> Tensor:
        return torch.tanh(self.linear(x)) * scale + again


class Stack(nn.Module):
    """``reads(i)``: the number of the earlier block that block i reads beside the one before it."""

    def __init__(self, depth: int, reads: Callable[[int], int], scale: Callable[[int], float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Numbered(i, 16) for i in range(depth))
        self.reads, self.scale = reads, scale

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for i, layer in enumerate(self.layers):
            found.append(layer(found[-1], found[self.reads(i)], self.scale(i)))
        return found[-1].square().mean()


def _folded(model: nn.Module, batch: Any, loss_fn: Any, *, once: bool) -> tuple[Folded, int]:
    captured = capture(model, batch, loss_fn, once=once, each=not once)
    return FoldBlocks()(Normalize(ROWS, torch.device("cpu"))(captured)), len(captured.graph.nodes)


def _described(folded: Folded) -> list[object]:
    """Every node by its place in the graph, not by its name."""
    place = {node: index for index, node in enumerate(folded.program.graph.nodes)}
    found: list[object] = []
    for node in folded.program.graph.nodes:
        if node.op == "output":
            continue
        known = leaf(node)
        inputs = tuple(place[source] for source in node.all_input_nodes)
        shapes = tuple((tuple(v.shape), v.dtype) for v in values(node))
        name = known.name if known else facts(node).where.module
        found.append((str(node.target) if known is None else "", name, inputs, shapes, folded.repeats[node]))
    return found


def _hugging_face(name: str, **changes: Any) -> tuple[nn.Module, Any, None]:
    entry = ZOO[name]
    config = {**entry.config, "num_hidden_layers": 7, **changes}
    return type(entry)(entry.architecture, config, entry.kind).build(), entry.batch(ROWS), None


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "gpt": lambda: (GPT(depth=9), CASES["gpt"].batch(ROWS), None),
    "Llama": lambda: _hugging_face("Llama"),
    "gpt-oss, two kinds in turn": lambda: _hugging_face(
        "gpt-oss", num_hidden_layers=8, layer_types=["sliding_attention", "full_attention"] * 4
    ),
    "DeepSeek-V3, another kind first": lambda: _hugging_face("DeepSeek-V3"),
    "all read the input": lambda: (Stack(9, lambda i: 0, lambda i: 0.5), (torch.randn(ROWS, 16),), None),
}


ALIKE = ("gpt", "Llama", "DeepSeek-V3, another kind first")  # where the fold takes the same blocks for a run


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "kind" in name else []) for name in MODELS]
)
def test_folds_to_what_the_whole_model_folds_to(name: str) -> None:
    model, batch, loss_fn = MODELS[name]()
    whole, many = _folded(model, batch, loss_fn, once=False)
    once, few = _folded(model, batch, loss_fn, once=True)
    assert few < 0.8 * many
    assert sum(once.repeats.values()) == sum(whole.repeats.values())
    if name in ALIKE:
        assert once.blocks == whole.blocks and _described(once) == _described(whole)
    assert not any("forward" in vars(module) for module in model.modules())


class Collected(Stack):
    """Reads at the end what every block has made."""

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(found[-1], x, 0.5))
        return torch.stack(found).square().mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "model",
    [
        Stack(9, lambda i: max(0, i - 3), lambda i: 0.5),  # each block reads one that is further back
        Stack(9, lambda i: 0, lambda i: 0.1 * i),  # each block does something else
        Stack(9, lambda i: 8 - i if i > 4 else 0, lambda i: 0.5),  # a U
        Collected(9, lambda i: 0, lambda i: 0.5),
    ],
)
def test_blocks_that_are_not_a_chain_are_all_traced(model: nn.Module) -> None:
    batch = (torch.randn(ROWS, 16),)
    whole, many = _folded(model, batch, None, once=False)
    once, few = _folded(model, batch, None, once=True)
    assert few == many and _described(once) == _described(whole)


def test_blocks_that_share_a_weight_are_traced() -> None:
    model = Stack(9, lambda i: 0, lambda i: 0.5)
    model.layers[5].linear.weight = model.layers[3].linear.weight
    assert not capture(model, (torch.randn(ROWS, 16),), once=True).like


def test_blocks_that_differ_in_private_settings_or_hooks_are_traced() -> None:
    batch = (torch.randn(ROWS, 16),)
    for change in (
        lambda block: setattr(block, "_slope", 0.5),
        lambda block: block.linear.register_forward_hook(lambda module, given, made: 2 * made),
    ):
        model = Stack(9, lambda i: 0, lambda i: 0.5)
        assert "layers.4" in capture(model, batch, once=True).like["layers.1"]
        change(model.layers[4])
        like = capture(model, batch, once=True).like
        assert not any("layers.4" in (kept, *names) for kept, names in like.items())


def test_blocks_with_equal_tables_are_traced_once() -> None:
    """As transformers 5.14 gives every attention: a dict of the functions that it may replace."""
    model = Stack(9, lambda i: 0, lambda i: 0.5)
    for block in model.layers:
        block._kernels = {"activation": torch.tanh}
    assert "layers.4" in capture(model, (torch.randn(ROWS, 16),), once=True).like["layers.1"]
    for table in ({"activation": torch.sin}, {"activation": torch.tanh, "norm": torch.tanh}, {}):
        model.layers[4]._kernels = table
        like = capture(model, (torch.randn(ROWS, 16),), once=True).like
        assert not any("layers.4" in (kept, *names) for kept, names in like.items())
